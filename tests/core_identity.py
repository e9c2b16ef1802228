"""Digests and fingerprints: the same everywhere for the same thing, different for anything else (R10-R14)."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from c2kv_core import compressor as compressor_module
from c2kv_core.base_digest import base_digest
from c2kv_core.compressor import Compressor
from c2kv_core.digest import tensors_digest
from c2kv_core.document import Geometry
from c2kv_core.errors import IdentityError, ModelError, RatioError, SidecarError
from c2kv_core.identity import Identity
from c2kv_core.sidecar_config import SidecarConfig
from c2kv_core.spec import CompressorSpec
from tests.tiny_models import random_sidecar, save_tiny_model, tiny_model

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("C2KV_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


def change_one_weight(directory: Path) -> None:
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})


# ---------------------------------------------------------------- weights


def test_a_digest_does_not_depend_on_file_sharding(tmp_path: Path, model_dir: Path) -> None:
    cut = save_tiny_model(tmp_path / "cut", max_shard_size="40KB")
    assert len(list(cut.glob("*.safetensors"))) > 2
    assert len(list(model_dir.glob("*.safetensors"))) == 1
    assert base_digest(cut) == base_digest(model_dir)


def test_a_digest_does_not_depend_on_the_process(model_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from c2kv_core.spec import CompressorSpec; "
        "print(CompressorSpec(model=sys.argv[1]).identities()[4].canonical_json)"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "1234",
        "PYTHONPATH": str(ROOT),
        "C2KV_CACHE_DIR": str(tmp_path / "other-cache"),
    }
    command = [sys.executable, "-c", code, str(model_dir)]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert made.stdout.strip() == CompressorSpec(model=str(model_dir)).identities()[4].canonical_json


def test_a_digest_changes_with_one_weight(tmp_path: Path, model_dir: Path) -> None:
    before = base_digest(model_dir)
    assert base_digest(model_dir) == before
    copied = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    assert base_digest(copied) == before
    change_one_weight(copied)
    assert base_digest(copied) != before
    assert base_digest(save_tiny_model(tmp_path / "other", seed=1)) != before


def test_a_changed_file_of_equal_size_and_time_is_noticed(model_dir: Path) -> None:
    before = base_digest(model_dir)
    (file,) = model_dir.glob("*.safetensors")
    stat = file.stat()
    change_one_weight(model_dir)
    # as archives, image layers and `cp --preserve` leave it
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    assert base_digest(model_dir) != before


def test_a_damaged_note_is_computed_anew(model_dir: Path, tmp_path: Path) -> None:
    before = base_digest(model_dir)
    (note,) = (tmp_path / "cache" / "digests").glob("*.json")
    note.write_text("{")
    assert base_digest(model_dir) == before
    note.write_text("{}")
    assert base_digest(model_dir) == before


def test_a_cache_that_cannot_be_written_costs_only_time(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = base_digest(model_dir)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("C2KV_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert base_digest(model_dir) == before


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="safetensors"):
        base_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"noise" * 9)
    with pytest.raises(ModelError, match="cannot read"):
        base_digest(tmp_path)


def test_a_tensor_digest_is_of_name_dtype_shape_and_bytes() -> None:
    x = torch.arange(6, dtype=torch.float32)
    variants: list[dict[str, torch.Tensor]] = [
        {"x": x},
        {"y": x},
        {"x": x.view(2, 3)},
        {"x": x.view(torch.int32)},
        {"x": x + 1},
        {"x": x, "y": x},
    ]
    digests = {tensors_digest(v.items()) for v in variants}
    assert len(digests) == len(variants)
    assert tensors_digest([("x", x), ("y", x + 1)]) == tensors_digest([("y", x + 1), ("x", x)])
    assert tensors_digest([("x", x.view(2, 3).T.contiguous().T)]) == tensors_digest([("x", x.view(2, 3))])
    assert tensors_digest([("x", x.to(torch.bfloat16))]) != tensors_digest([("x", x)])


# ---------------------------------------------------------------- identities

IDENTITY = Identity(
    format_version=1,
    base_digest="b",
    tokenizer_digest="t",
    rendering_version=1,
    splitter_version=1,
    document_layout="turns",
    rope={"rope_type": "default", "rope_theta": 1e4},
    geometry=Geometry(layers=2, kv_heads=2, head_dim=8),
    sidecar_digest="s",
    ratio=4,
    overlap_tokens=0,
    residual="none",
    max_part_tokens=1024,
    slot_dtype="bfloat16",
    quantisation="none",
)
CHANGES: dict[str, Any] = {
    "format_version": 2,
    "base_digest": "x",
    "tokenizer_digest": "x",
    "rendering_version": 2,
    "splitter_version": 2,
    "document_layout": "block",
    "rope": {"rope_type": "default", "rope_theta": 1e5},
    "geometry": Geometry(layers=2, kv_heads=2, head_dim=16),
    "sidecar_digest": "x",
    "ratio": 8,
    "overlap_tokens": 2,
    "residual": "embed_mean",
    "max_part_tokens": 512,
    "slot_dtype": "float16",
    "quantisation": "int8",
    "selection": "topk",
}


def test_every_field_is_tried() -> None:
    assert set(CHANGES) == {f.name for f in fields(Identity)}


@pytest.mark.parametrize("name", CHANGES)
def test_a_fingerprint_differs_with_every_field(name: str) -> None:
    other = replace(IDENTITY, **{name: CHANGES[name]})
    assert other.fingerprint != IDENTITY.fingerprint
    assert IDENTITY.differing_fields(other) == [name]


def test_a_fingerprint_is_of_canonical_json() -> None:
    text = IDENTITY.canonical_json
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text
    assert Identity.from_json(text) == IDENTITY
    turned = replace(IDENTITY, rope=dict(reversed(IDENTITY.rope.items())))
    assert turned.fingerprint == IDENTITY.fingerprint
    assert len(IDENTITY.fingerprint) == 64 and IDENTITY.differing_fields(turned) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"geometry": {}}', '{"geometry": 3}'])
def test_text_that_is_no_identity_is_refused(text: str) -> None:
    with pytest.raises(IdentityError):
        Identity.from_json(text)


def test_an_identity_with_an_unknown_field_is_refused() -> None:
    data = {**json.loads(IDENTITY.canonical_json), "later": 1}
    with pytest.raises(IdentityError):
        Identity.from_json(json.dumps(data))


# ---------------------------------------------------------------- of a spec


def fingerprint(**settings: Any) -> str:
    return CompressorSpec(**settings).identities()[4].fingerprint


def test_what_changes_the_slots_changes_the_fingerprint(tmp_path: Path, model_dir: Path) -> None:
    sidecar = tmp_path / "sidecar"
    random_sidecar(tiny_model(), SidecarConfig(ratios=(4, 8))).save(sidecar)
    retrained = tmp_path / "retrained"
    random_sidecar(tiny_model(), SidecarConfig(ratios=(4, 8)), seed=2).save(retrained)
    shorter = tmp_path / "shorter"
    random_sidecar(tiny_model(), SidecarConfig(ratios=(4, 8), max_part_tokens=64)).save(shorter)
    model = str(model_dir)
    found = [
        fingerprint(model=model),
        *(fingerprint(model=model, sidecar=str(d)) for d in (sidecar, retrained, shorter)),
        fingerprint(model=model, sidecar=str(sidecar), slot_dtype="float16"),
        fingerprint(model=str(save_tiny_model(tmp_path / "m1", seed=1))),
        fingerprint(model=str(save_tiny_model(tmp_path / "m2", "llama", "yarn"))),
        fingerprint(model=str(save_tiny_model(tmp_path / "m3", style="qwen2.5"))),
    ]
    assert len(set(found)) == len(found)
    both = CompressorSpec(model=model, sidecar=str(sidecar), ratios=(4, 8)).identities()
    assert both[4].differing_fields(both[8]) == ["ratio"]


def test_what_does_not_change_the_slots_does_not(tmp_path: Path, model_dir: Path) -> None:
    copied = shutil.copytree(model_dir, tmp_path / "elsewhere")
    assert fingerprint(model=str(model_dir)) == fingerprint(model=str(copied))
    # an untrained sidecar is the same for whatever set of ratios
    assert fingerprint(model=str(model_dir), ratios=(4, 8)) == fingerprint(model=str(model_dir))


def test_a_sidecar_of_other_weights_is_refused(tmp_path: Path, model_dir: Path) -> None:
    sidecar = random_sidecar(tiny_model())
    sidecar.header = replace(sidecar.header, base_digest="0" * 64)
    sidecar.save(tmp_path / "sidecar")
    spec = CompressorSpec(model=str(model_dir), sidecar=str(tmp_path / "sidecar"))
    with pytest.raises(SidecarError, match="000000000000"):
        spec.identities()


def test_a_spec_names_what_is_wrong_with_it(tmp_path: Path) -> None:
    with pytest.raises(RatioError):
        CompressorSpec(ratios=())
    with pytest.raises(RatioError):
        CompressorSpec(ratios=(0,))
    with pytest.raises(ModelError, match="int8"):
        CompressorSpec(slot_dtype="int8")
    random_sidecar(tiny_model(), SidecarConfig(ratios=(4,))).save(tmp_path / "sidecar")
    spec = CompressorSpec(sidecar=str(tmp_path / "sidecar"), ratios=(8,))
    with pytest.raises(RatioError, match="ratio 8"):
        spec.load_sidecar()
    assert replace(spec, force_ratio=True).load_sidecar() is not None


def test_a_sidecar_changed_while_it_is_loaded_is_refused(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = tmp_path / "sidecar"
    random_sidecar(tiny_model()).save(sidecar)
    spec = CompressorSpec(model=str(model_dir), sidecar=str(sidecar))
    load = compressor_module.load_base

    def retrain_then_load(*args: Any, **options: Any) -> Any:
        shutil.rmtree(sidecar)
        random_sidecar(tiny_model(), seed=2).save(sidecar)
        return load(*args, **options)

    monkeypatch.setattr(compressor_module, "load_base", retrain_then_load)
    with pytest.raises(IdentityError, match="changed while they were loaded"):
        Compressor.load(spec)
    monkeypatch.undo()
    assert Compressor.load(spec).sidecar.digest() == spec.identities()[4].sidecar_digest
