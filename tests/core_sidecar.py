"""The trainable part on disk: what is saved comes back, and anything else is refused by name."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from c2kv_core.errors import InputError, RatioError, SidecarError
from c2kv_core.extractor import Extractor
from c2kv_core.sidecar import HEADER_FILE, TENSOR_FILE, Sidecar
from c2kv_core.sidecar_config import SidecarConfig, SidecarHeader
from tests.tiny_models import random_sidecar, tiny_model, token_ids

CONFIGS = {
    "full": SidecarConfig(ratios=(8, 4), max_part_tokens=512, overlap_tokens=2, trained=True),
    "low rank": SidecarConfig(ratios=(4,), rank=3),
}


def saved(folder: Path, config: SidecarConfig = CONFIGS["full"], architecture: str = "qwen2") -> Path:
    random_sidecar(tiny_model(architecture), config).save(folder / "sidecar")
    return folder / "sidecar"


# ---------------------------------------------------------------- round trip


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_saved_sidecar_comes_back(tmp_path: Path, kind: str, architecture: str) -> None:
    model = tiny_model(architecture)
    sidecar = random_sidecar(model, CONFIGS[kind])
    sidecar.save(tmp_path / "a" / "sidecar")
    loaded = Sidecar.load(tmp_path / "a" / "sidecar")
    assert loaded.header == sidecar.header
    assert loaded.config == CONFIGS[kind]
    assert loaded.digest() == sidecar.digest()
    for name, tensor in sidecar.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    ids = token_ids(11)
    wanted, got = (Extractor(model, s).extract([ids], 4)[0] for s in (sidecar, loaded))
    assert torch.equal(got.keys, wanted.keys) and torch.equal(got.values, wanted.values)


def test_the_dtype_is_kept(tmp_path: Path) -> None:
    sidecar = random_sidecar(tiny_model()).to(torch.bfloat16)
    sidecar.save(tmp_path / "sidecar")
    loaded = Sidecar.load(tmp_path / "sidecar")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded.digest() == sidecar.digest() != random_sidecar(tiny_model()).digest()


def test_low_rank_starts_as_the_base() -> None:
    model, ids = tiny_model("qwen2"), token_ids(11)
    full, low = (Sidecar.from_base(model, SidecarConfig(ratios=(4,), rank=rank)) for rank in (None, 3))
    wanted, got = (Extractor(model, s).extract([ids], 4)[0] for s in (full, low))
    torch.testing.assert_close(got.keys, wanted.keys)
    assert sum(p.numel() for p in low.parameters()) < sum(p.numel() for p in full.parameters())


def test_only_safetensors_and_json_are_written(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    assert {f.name for f in directory.iterdir()} == {HEADER_FILE, TENSOR_FILE}
    assert [f.name for f in tmp_path.iterdir()] == ["sidecar"]


def test_a_directory_in_use_is_not_overwritten(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    before = (directory / TENSOR_FILE).read_bytes()
    with pytest.raises(SidecarError, match="empty directory"):
        random_sidecar(tiny_model()).save(directory)
    assert (directory / TENSOR_FILE).read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(SidecarError):
        random_sidecar(tiny_model()).save(tmp_path / "file")


def test_a_digest_is_of_names_dtypes_shapes_and_values() -> None:
    model = tiny_model()
    sidecar = random_sidecar(model)
    assert sidecar.digest() == random_sidecar(model).digest()
    assert sidecar.digest() != random_sidecar(model, seed=2).digest()
    with torch.no_grad():
        sidecar.layers[1]["v_proj"].weight[0, 0] += 1e-3
    assert sidecar.digest() != random_sidecar(model).digest()


# ---------------------------------------------------------------- header


def edited(directory: Path, **changes: Any) -> Path:
    """The sidecar with changed header keys; a dict is merged into the group of that name."""
    data = json.loads((directory / HEADER_FILE).read_text())
    for key, value in changes.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) else value
    (directory / HEADER_FILE).write_text(json.dumps(data))
    return directory


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_format_version_is_refused(tmp_path: Path, version: object) -> None:
    with pytest.raises(SidecarError, match="expected format_version 1"):
        Sidecar.load(edited(saved(tmp_path), format_version=version))


@pytest.mark.parametrize("group", ["config", "geometry"])
def test_an_unknown_key_is_named(tmp_path: Path, group: str) -> None:
    with pytest.raises(SidecarError, match="unknown key 'window'"):
        Sidecar.load(edited(saved(tmp_path), **{group: {"window": 3}}))


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"ratios": []}},
        {"config": {"ratios": [0]}},
        {"config": {"ratios": ["4"]}},
        {"config": {"residual": "embed_all"}},
        {"config": {"max_part_tokens": 0}},
        {"config": {"max_part_tokens": "many"}},
        {"config": {"overlap_tokens": -1}},
        {"config": {"max_part_tokens": 10.5}},
        {"config": {"overlap_tokens": None}},
        {"config": {"trained": "no"}},
        {"config": {"rank": 0}},
        {"config": []},
        {"config": None},
        {"geometry": {"layers": 5}},
        {"geometry": {"layers": 1}},
        {"geometry": {"layers": "2"}},
        {"geometry": None},
    ],
    ids=str,
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Sidecar.load(edited(saved(tmp_path), **changes))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format_version": 1}'])
def test_a_header_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    directory = saved(tmp_path)
    (directory / HEADER_FILE).write_text(text)
    with pytest.raises(SidecarError, match=HEADER_FILE):
        Sidecar.load(directory)


def test_a_header_that_is_no_text_is_refused(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    (directory / HEADER_FILE).write_bytes(b"\xff\xfe{}")
    with pytest.raises(SidecarError, match=HEADER_FILE):
        Sidecar.load(directory)


def test_a_header_reads_back() -> None:
    header = random_sidecar(tiny_model(), CONFIGS["full"]).header
    assert SidecarHeader.from_json(header.to_json(), source="x") == header
    assert header.config.ratios == (4, 8)
    assert set(asdict(header)) == {"format_version", "config", "geometry", "base_digest"}


def test_ratios_are_a_set_and_untrained_ones_are_named() -> None:
    config = SidecarConfig(ratios=(8, 4, 8))
    assert config.ratios == (4, 8)
    assert config.require_ratio(8) == 8
    with pytest.raises(RatioError, match=r"ratio 5 .*\(4, 8\)"):
        config.require_ratio(5)
    with pytest.raises(RatioError):
        replace(config, ratios=())


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("name", [HEADER_FILE, TENSOR_FILE])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    directory = saved(tmp_path)
    (directory / name).unlink()
    with pytest.raises(SidecarError, match=f"found no {name}"):
        Sidecar.load(directory)


@pytest.mark.parametrize("damage", ["truncated", "empty", "noise", "pickle"])
def test_damaged_tensors_are_refused(tmp_path: Path, damage: str) -> None:
    directory = saved(tmp_path)
    file = directory / TENSOR_FILE
    data = file.read_bytes()
    if damage == "pickle":
        torch.save({"slot_embedding": torch.zeros(32)}, file)
    else:
        file.write_bytes({"truncated": data[:-100], "empty": b"", "noise": b"\x01" * 200}[damage])
    with pytest.raises(SidecarError, match=TENSOR_FILE):
        Sidecar.load(directory)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "vector"])
def test_tensors_that_do_not_fit_the_header_are_refused(change: str) -> None:
    sidecar = random_sidecar(tiny_model("qwen2"))
    tensors = dict(sidecar.state_dict())
    if change == "missing":
        del tensors["layers.1.v_proj.weight"]
    elif change == "unexpected":
        tensors["layers.2.v_proj.weight"] = tensors["layers.1.v_proj.weight"]
    elif change == "shape":
        tensors["layers.1.v_proj.bias"] = tensors["layers.1.v_proj.bias"][:-1]
    else:
        del tensors["slot_embedding"]
    with pytest.raises(SidecarError, match="do not fit"):
        Sidecar.from_tensors(sidecar.header, tensors, source="file")


def test_tensors_of_another_rank_than_the_header_says_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SidecarError):
        Sidecar.load(edited(saved(tmp_path, CONFIGS["low rank"]), config={"rank": 4}))
    with pytest.raises(SidecarError):
        Sidecar.load(edited(tmp_path / "sidecar", config={"rank": None}))
