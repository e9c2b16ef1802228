"""Checkpoints: a folder of files each, complete only once its manifest is there, which is written last.

``checkpoints/step-<step>-a<attempt>/`` holds ``tensors.safetensors``, ``state.json`` and ``manifest.json`` (size and
SHA-256 of the others). The attempt in the name keeps two processes out of each other's folders.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from c2kv_core.store.storage import Storage
from pipelines.train.attempts import Attempt, trusted
from pipelines.train.folder import writing

TENSORS = "tensors.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoints/(step-(\d{8})-a(\d{6}))/([^/]+)$")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What was read."""

    name: str
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def name_of(step: int, attempt: int) -> str:
    """Folder name of a checkpoint."""
    return f"step-{step:08d}-a{attempt:06d}"


class Checkpoints:
    """The checkpoints of a run folder."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def save(self, attempt: Attempt, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> str:
        """Write a checkpoint and commit it by its manifest.

        Raises:
            StaleAttemptError: a later attempt has taken over; the folder stays without a manifest.
            TrainingError: the storage failed.
        """
        name = name_of(step, attempt.number)
        whole = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        files = {TENSORS: safetensors.torch.save(whole), STATE: json.dumps(state, indent=2).encode()}
        with writing(self._storage.uri):
            attempt.require_latest()
            for file, data in files.items():
                self._storage.put(f"checkpoints/{name}/{file}", data)
            manifest = {
                "step": step,
                "attempt": attempt.number,
                "files": {f: _seal(d) for f, d in files.items()},
            }
            attempt.require_latest()
            self._storage.put(f"checkpoints/{name}/{MANIFEST}", json.dumps(manifest, indent=2).encode())
        return name

    def complete(self) -> dict[str, int]:
        """Names of complete checkpoints and their attempts, whoever wrote them."""
        found = {}
        for file in self._storage.list_files("checkpoints/"):
            match = _NAME.search(file.path)
            if match and match[4] == MANIFEST:
                found[match[1]] = int(match[3])
        return found

    def names(self) -> list[str]:
        """Complete checkpoints that may be resumed from, newest first."""
        return sorted(trusted(self._storage, self.complete()), reverse=True)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is complete, trusted and undamaged."""
        for name in self.names():
            checkpoint = self.read(name)
            if checkpoint is not None:
                return checkpoint
        return None

    def read(self, name: str) -> Checkpoint | None:
        """A checkpoint; None where a file is missing or not what the manifest says."""
        root = f"checkpoints/{name}"
        try:
            manifest = json.loads(bytes(self._storage.get(f"{root}/{MANIFEST}")))
            files = {file: bytes(self._storage.get(f"{root}/{file}")) for file in manifest["files"]}
            if {file: _seal(data) for file, data in files.items()} != manifest["files"]:
                return None
            return Checkpoint(
                name=name, tensors=safetensors.torch.load(files[TENSORS]), state=json.loads(files[STATE])
            )
        except (FileNotFoundError, ValueError, KeyError, SafetensorError):
            return None

    def collect(self, *, keep: int) -> list[str]:
        """Delete all but the newest ``keep`` checkpoints, and every folder that can never be resumed from.

        Only the latest attempt may call this: an incomplete folder may be one that another attempt is writing.
        """
        kept = set(self.names()[:keep])
        dropped: dict[str, list[str]] = {}
        for file in self._storage.list_files("checkpoints/"):
            match = _NAME.search(file.path)
            if match and match[1] not in kept:
                dropped.setdefault(match[1], []).append(file.path)
        for paths in dropped.values():
            # The manifest goes first: what is half deleted is incomplete, not damaged.
            for path in sorted(paths, key=lambda p: not p.endswith(MANIFEST)):
                self._storage.delete(path)
        return sorted(dropped)


def _seal(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
