"""The sidecar directory that a run ends in: what ``c2kv extract`` and ``serve`` take, with its model card."""

import shutil
import tempfile
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from c2kv_core import Sidecar
from c2kv_core.models import parse_dtype
from c2kv_core.sidecar_config import SidecarHeader
from pipelines.control import Control, Documents
from pipelines.train.folder import CONTROL, SIDECAR, RunFolder, writing


def best_path(step: int, attempt: int) -> str:
    """Where the weights of a best sidecar are kept until the run ends."""
    return f"best/step-{step:08d}-a{attempt:06d}.safetensors"


def save_best(folder: RunFolder, path: str, weights: dict[str, Tensor]) -> None:
    """Keep a copy of the weights."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in weights.items()}
    with writing(folder.location):
        folder.storage.put(path, safetensors.torch.save(tensors))


def load_best(folder: RunFolder, path: str) -> dict[str, Tensor]:
    """What ``save_best`` kept."""
    return safetensors.torch.load(bytes(folder.storage.get(path)))


def collect_best(folder: RunFolder, keep: str | None) -> None:
    """Delete the kept copies but one."""
    for file in list(folder.storage.list_files("best/")):
        if file.path != keep:
            folder.storage.delete(file.path)


def export_control(
    folder: RunFolder, header: SidecarHeader, weights: dict[str, Tensor], *, documents: Documents, dtype: str
) -> str:
    """Write the directory of a control; gives its place below the run folder."""
    control = Control(documents=documents, sidecar=_sidecar(folder, header, weights, dtype))
    with writing(folder.location):
        for name, content in control.files().items():
            folder.storage.put(f"{CONTROL}/{name}", content)
    return CONTROL


def _sidecar(folder: RunFolder, header: SidecarHeader, weights: dict[str, Tensor], dtype: str) -> Sidecar:
    kind: torch.dtype = parse_dtype(dtype)
    tensors = {name: tensor.to(kind) for name, tensor in weights.items()}
    return Sidecar.from_tensors(header, tensors, source=folder.location)


def export_sidecar(
    folder: RunFolder, header: SidecarHeader, weights: dict[str, Tensor], *, card: str, dtype: str
) -> str:
    """Write the sidecar directory and its card, with its digest; gives its place below the run folder."""
    sidecar = _sidecar(folder, header, weights, dtype)
    card += f"\nSidecar {sidecar.digest()} (`c2kv store ls` shows which documents are of it).\n"
    scratch = Path(tempfile.mkdtemp(prefix="c2kv-sidecar-"))
    try:
        sidecar.save(scratch / "made")
        with writing(folder.location):
            for file in sorted((scratch / "made").iterdir()):
                folder.storage.put(f"{SIDECAR}/{file.name}", file.read_bytes())
            folder.storage.put(f"{SIDECAR}/README.md", card.encode())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return SIDECAR
