"""Sidecars in object storage, copied once to the user's cache folder."""

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from c2kv_core.alias import cache_folder
from c2kv_core.errors import SidecarError
from c2kv_core.sidecar import HEADER_FILE, TENSOR_FILE
from c2kv_core.store import open_storage
from c2kv_core.store.failures import as_store_error

_FILES = (HEADER_FILE, TENSOR_FILE)


def sidecar_directory(place: str | os.PathLike[str]) -> Path:
    """The directory of a sidecar given as directory or ``s3://`` URI.

    What lies in a bucket is copied to the cache folder, under a name that changes with the objects' size and time, so
    that many loads of one sidecar fetch it once, and a sidecar written anew is fetched anew.

    Raises:
        SidecarError: the URI holds no sidecar.
        StoreError: object storage cannot be read.
    """
    text = os.fspath(place)
    if "://" not in text:
        return Path(text).expanduser()
    storage = open_storage(text)
    with as_store_error(f"read the sidecar {text}"):
        found = {file.path: file for name in _FILES for file in storage.list_files(name)}
    missing = [name for name in _FILES if name not in found]
    if missing:
        raise SidecarError(
            f"expected a sidecar at {text}, found no {missing[0]}; give the prefix that holds one"
        )
    stamp = [(name, found[name].size_bytes, found[name].modified_s) for name in _FILES]
    key = hashlib.sha256(json.dumps([text, stamp]).encode()).hexdigest()
    target = cache_folder() / "sidecars" / key
    if _is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
    except OSError as error:
        raise SidecarError(f"cannot keep the sidecar of {text}: {error}; set C2KV_CACHE_DIR") from error
    try:
        for name in _FILES:
            with as_store_error(f"read the sidecar {text}"):
                (scratch / name).write_bytes(storage.get(name))
        if target.is_dir() and not _is_whole(target):
            shutil.rmtree(target, ignore_errors=True)
        with suppress(OSError):  # another process may have been faster, with the same bytes
            scratch.rename(target)
        if not _is_whole(target):
            raise SidecarError(f"cannot keep the sidecar of {text} in {target.parent}; make it writable")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)
