"""Sidecars in a bucket: fetched once, fetched anew when written anew, refused in plain words."""

from pathlib import Path

import pytest

from c2kv_core import Sidecar
from c2kv_core.errors import SidecarError, StoreError
from c2kv_core.remote_sidecar import sidecar_directory
from c2kv_core.sidecar import HEADER_FILE, TENSOR_FILE
from c2kv_core.store import open_storage
from tests.tiny_models import random_sidecar, tiny_model


def put(uri: str, sidecar: Sidecar, folder: Path) -> None:
    sidecar.save(folder)
    for name in (HEADER_FILE, TENSOR_FILE):
        open_storage(uri).put(name, (folder / name).read_bytes())


def sidecar_of(seed: int) -> Sidecar:
    return random_sidecar(tiny_model(), seed=seed)


def test_a_sidecar_comes_out_of_a_bucket_and_changes_with_it(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("C2KV_CACHE_DIR", str(tmp_path / "cache"))
    first, second = sidecar_of(1), sidecar_of(2)
    put(bucket, first, tmp_path / "first")
    here = sidecar_directory(bucket)
    assert Sidecar.load(here).digest() == first.digest()
    stamps = [file.stat().st_mtime_ns for file in sorted(here.iterdir())]
    assert sidecar_directory(bucket) == here
    assert [file.stat().st_mtime_ns for file in sorted(here.iterdir())] == stamps
    put(bucket, second, tmp_path / "second")
    assert Sidecar.load(sidecar_directory(bucket)).digest() == second.digest()
    assert [file.name for file in (tmp_path / "cache/sidecars").iterdir() if file.name[0] == "."] == []


def test_what_is_no_sidecar_is_said(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("C2KV_CACHE_DIR", str(tmp_path))
    with pytest.raises(SidecarError, match=f"found no {HEADER_FILE}"):
        sidecar_directory(bucket)
    open_storage(bucket).put(HEADER_FILE, b"{}")
    with pytest.raises(SidecarError, match=f"found no {TENSOR_FILE}"):
        sidecar_directory(bucket)
    with pytest.raises(StoreError, match="no such bucket"):
        sidecar_directory("s3://c2kv-not-there/sidecar")
