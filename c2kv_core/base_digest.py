"""Digest of a base model's weights, computed once a directory and remembered.

The digest runs over (name, dtype, shape, bytes) of the saved tensors in order of name, so that it does not depend on
how the weights are cut into files. The note in the user's cache folder is found by each file's path and stamp.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from c2kv_core.alias import cache_folder
from c2kv_core.digest import update_digest
from c2kv_core.errors import ModelError


def base_digest(directory: str | Path) -> str:
    """SHA-256 hex of the weights in a Hugging Face directory.

    Raises:
        ModelError: no safetensors files there, or unreadable ones.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"expected weights as *.safetensors in {directory}, found none; save the model in that form"
        )
    stamp = {str(f.resolve()): _stamp(f.stat()) for f in files}
    key = hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest()
    note = cache_folder() / "digests" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads(note.read_text())["digest"])
    digest = _files_digest(files)
    # A cache that cannot be written costs time, not correctness.
    with contextlib.suppress(OSError):
        _write(note, {"digest": digest, "files": stamp})
    return digest


def _stamp(stat: os.stat_result) -> list[int]:
    # Archives, image layers and `cp --preserve` set the modification time; nothing sets the change time.
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _files_digest(files: list[Path]) -> str:
    state = hashlib.sha256()
    try:
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(safe_open(f, framework="pt")) for f in files]
            places = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (not a dict)
            for name in sorted(places):
                update_digest(state, name, places[name].get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read the weights in {files[0].parent}: {error}") from error
    return state.hexdigest()


def _write(note: Path, content: dict[str, Any]) -> None:
    note.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=note.parent)
    with os.fdopen(handle, "w") as file:
        json.dump(content, file)
    os.replace(scratch, note)
