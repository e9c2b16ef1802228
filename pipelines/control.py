"""The control of evaluations: the base itself tuned on a sidecar's rows, so that learning the form of answers is not
taken for compression.

It has the sidecar's low-rank projections, added to the base's at every token: LoRA (arXiv 2106.09685) on q, k and v.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from c2kv_core import Sidecar, hf_adapter
from c2kv_core.errors import SidecarError
from c2kv_core.sidecar_config import SidecarHeader

Documents = Literal["full", "none"]
"""What a control saw in training, and sees when it answers."""

_HEADER, _TENSORS = "control.json", "control.safetensors"


@dataclass(frozen=True, kw_only=True)
class Control:
    """Low-rank deltas for every layer's own projections."""

    documents: Documents
    sidecar: Sidecar
    """Holds the deltas; the slot vector is not used."""

    def deltas(self, model: PreTrainedModel) -> Iterator[tuple[nn.Linear, Any]]:
        """The base's projections, each with its low-rank pair."""
        for index, layer in enumerate(hf_adapter.decoder_layers(model)):
            pairs: Any = self.sidecar.layers[index]
            for name, pair in pairs.items():
                yield getattr(layer.self_attn, name), pair

    @contextmanager
    def beside(self, model: PreTrainedModel) -> Iterator[None]:
        """Inside, the base computes with the deltas, differentiably; its weights are not touched."""
        handles = [base.register_forward_hook(_adder(pair)) for base, pair in self.deltas(model)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def merge_into(self, model: PreTrainedModel) -> None:
        """Add the deltas to the model's own weights."""
        self.sidecar.check_base(model)
        for base, pair in self.deltas(model):
            base.weight += (pair.up.float() @ pair.down.float()).to(base.weight.dtype)

    def files(self) -> dict[str, bytes]:
        """The content of ``control.json`` and ``control.safetensors``, by name."""
        header = {"documents": self.documents, "deltas": json.loads(self.sidecar.header.to_json())}
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.sidecar.state_dict().items()}
        text = json.dumps(header, indent=2, sort_keys=True) + "\n"
        return {_HEADER: text.encode(), _TENSORS: save(tensors)}

    @classmethod
    def load(cls, directory: str | Path) -> "Control":
        """Read a directory of what ``files`` gives.

        Raises:
            SidecarError: missing or damaged files.
        """
        root = Path(directory).expanduser()
        try:
            header = json.loads((root / _HEADER).read_text(encoding="utf-8"))
            documents, deltas = header["documents"], json.dumps(header["deltas"])
            tensors = load_file(root / _TENSORS)
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            raise SidecarError(
                f"expected a control in {root} (`c2kv train control=full` makes one): {error}"
            ) from error
        if documents not in ("full", "none"):
            raise SidecarError(f"{root / _HEADER}: expected documents full or none, got {documents!r}")
        header = SidecarHeader.from_json(deltas, source=str(root / _HEADER))
        sidecar = Sidecar.from_tensors(header, tensors, source=str(root / _TENSORS))
        return cls(documents=documents, sidecar=sidecar)


def _adder(pair: Any) -> Any:
    def add(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        added: Tensor = out + (inputs[0] @ pair.down.T) @ pair.up.T
        return added

    return add
