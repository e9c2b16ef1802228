"""The trainable part: one slot vector and slot q/k/v projections in every layer.

Shape legend: D hidden, L layers, R rank.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from c2kv_core import hf_adapter
from c2kv_core.digest import tensors_digest
from c2kv_core.errors import SidecarError
from c2kv_core.head_slots import FRACTIONS
from c2kv_core.sidecar_config import SHARING, SIDECAR_FORMAT_VERSION, SidecarConfig, SidecarHeader

HEADER_FILE = "sidecar.json"
TENSOR_FILE = "sidecar.safetensors"
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
SCORE_STEPS = 4096
"""Scores are multiples of 1 / this, in nats of attention."""


class LowRankProjection(nn.Module):
    """The base projection plus a trained delta ``up @ down`` of rank R."""

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, in_features) / in_features**0.5)
        self.up = nn.Parameter(torch.zeros(out_features, rank))

    def fits(self, base: nn.Linear) -> bool:
        """Whether it can stand beside this base projection."""
        return (self.up.shape[0], self.down.shape[1]) == tuple(base.weight.shape)

    def forward(self, x: Tensor, base: nn.Linear) -> Tensor:
        """(..., in) to (..., out)."""
        out: Tensor = base(x) + self.added(x, base)
        return out

    def added(self, x: Tensor, base: nn.Linear) -> Tensor:
        """What it adds to the base's projection of ``x``."""
        delta: Tensor = (x @ self.down.T) @ self.up.T
        return delta


class FullProjection(nn.Module):
    """A projection of its own, with a bias iff the base's has one."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def fits(self, base: nn.Linear) -> bool:
        """Whether it can stand beside this base projection."""
        return self.weight.shape == base.weight.shape and (self.bias is None) == (base.bias is None)

    def forward(self, x: Tensor, base: nn.Linear) -> Tensor:
        """(..., in) to (..., out); the base is not used."""
        return nn.functional.linear(x, self.weight, self.bias)

    def added(self, x: Tensor, base: nn.Linear) -> Tensor:
        """What it adds to the base's projection of ``x``."""
        delta: Tensor = self(x, base) - base(x)
        return delta


class TokenScores(nn.Module):
    """For each kv head, how much of a token its slot wants: linear in the token's normed state."""

    def __init__(self, hidden_size: int, kv_heads: int, *, shares: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(kv_heads, hidden_size))
        self.shares = nn.Parameter(torch.tensor(FRACTIONS).repeat(kv_heads, 1)) if shares else None
        """(K, P), see ``head_slots``; at the start all heads have the same."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to float32 (..., K): many tokens are compared, and bfloat16 tells too few apart.

        Where heads share slots out they are rounded, so that equal tokens (in layer 0 all occurrences of a word) stay
        equal whatever batch they are in. Sidecars of equal heads keep the bits that they always had.
        """
        scores = nn.functional.linear(x.float(), self.weight.float())
        return scores if self.shares is None else (scores * SCORE_STEPS).round() / SCORE_STEPS


def is_fitted(name: str) -> bool:
    """Whether a sidecar's tensor of this name is fitted before training, which then leaves it as it is."""
    return name.endswith((".scores.weight", ".scores.shares"))


class Sidecar(nn.Module):
    """Everything C2KV trains. Tensors are named ``slot_embedding``, ``layers.{l}.{q,k,v}_proj.*`` and, with selection,
    ``layers.{l}.scores.weight``, ``layers.{l}.scores.shares``."""

    slot_embedding: nn.Parameter
    """(D,), the input of every slot."""

    def __init__(self, header: SidecarHeader, slot_embedding: Tensor, layers: list[nn.ModuleDict]) -> None:
        super().__init__()
        self.header = header
        self.slot_embedding = nn.Parameter(slot_embedding)
        self.layers = nn.ModuleList(layers)

    @property
    def config(self) -> SidecarConfig:
        """Settings that decide what the slots mean."""
        return self.header.config

    @classmethod
    def from_base(
        cls,
        model: PreTrainedModel,
        config: SidecarConfig,
        *,
        eos_token_id: int | None = None,
        base_digest: str = "",
    ) -> "Sidecar":
        """An untrained sidecar: projections copy the base's, the slot vector is EOS's embedding (0 with embed_last).

        Args:
            model: the frozen base, of a supported architecture.
            config: settings; ``rank`` decides between full and low-rank projections.
            eos_token_id: id whose embedding starts the slot vector; the model's own by default.
            base_digest: recorded so that the sidecar is refused for other weights.
        """
        if eos_token_id is None:
            eos_token_id = min(hf_adapter.eos_token_ids(model), default=0)
        table: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
        header = SidecarHeader(
            format_version=SIDECAR_FORMAT_VERSION,
            config=config,
            geometry=hf_adapter.geometry(model.config),
            base_digest=base_digest,
        )
        layers = [
            _projections_like(layer.self_attn, config.rank) for layer in hf_adapter.decoder_layers(model)
        ]
        if config.selection != "none":
            for made in layers:
                scores = TokenScores(
                    table.shape[1], header.geometry.kv_heads, shares=config.selection == SHARING
                )
                made["scores"] = scores.to(table.dtype)
        start = table[eos_token_id].detach().clone()
        if config.residual == "embed_last":
            # The slot then starts as its block's last token, not as a sum of two tokens.
            start.zero_()
        return cls(header, start, layers).to(table.device)

    def project(self, layer: int, name: str, x: Tensor, attention: hf_adapter.StockLayer) -> Tensor:
        """Slot projection ``q``, ``k`` or ``v`` of a layer: (..., D) to (..., heads*H)."""
        projections: nn.ModuleDict = self.layers[layer]  # type: ignore[assignment]
        out: Tensor = projections[f"{name}_proj"](x, getattr(attention, f"{name}_proj"))
        return out

    def added(self, layer: int, name: str, x: Tensor, attention: hf_adapter.StockLayer) -> Tensor:
        """What slot projection ``k`` or ``v`` of a layer adds to the base's: (..., D) to (..., heads*H)."""
        projections: nn.ModuleDict = self.layers[layer]  # type: ignore[assignment]
        out: Tensor = projections[f"{name}_proj"].added(x, getattr(attention, f"{name}_proj"))  # type: ignore[operator]
        return out

    def scores(self, layer: int, x: Tensor) -> Tensor:
        """How much each kv head of a layer wants of tokens with normed states ``x``: (..., D) to (..., K)."""
        made: Tensor = self.layers[layer]["scores"](x)  # type: ignore[index]
        return made

    def shares(self) -> Tensor:
        """(L, K, P) how heads share slots out, see ``head_slots``."""
        return torch.stack([layer["scores"].shares for layer in self.layers])  # type: ignore[index]

    def projections(self) -> Iterator[nn.Module]:
        """All projections, layer by layer."""
        for layer in self.layers:
            yield from (layer[name] for name in PROJECTIONS)  # type: ignore[index]

    def digest(self) -> str:
        """Digest of tensors; with the settings it identifies the slots' meaning."""
        return tensors_digest(self.state_dict().items())

    def save(self, directory: str | Path) -> None:
        """Write ``sidecar.json`` and ``sidecar.safetensors`` into a new or empty directory, atomically.

        Raises:
            SidecarError: the directory exists and is not empty.
        """
        target = Path(directory)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise SidecarError(
                f"expected a new or empty directory for the sidecar, {target} holds something already"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
            save_file(tensors, scratch / TENSOR_FILE)
            (scratch / HEADER_FILE).write_text(self.header.to_json())
            # Made private by their libraries; a sidecar is for whoever may read the folder.
            (scratch / TENSOR_FILE).chmod(0o644)
            scratch.chmod(0o755)
            os.replace(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    @classmethod
    def load(cls, directory: str | Path) -> "Sidecar":
        """Read what ``save`` wrote.

        Raises:
            SidecarError: missing or damaged files, or another format version.
        """
        root = Path(directory)
        missing = [name for name in (HEADER_FILE, TENSOR_FILE) if not (root / name).is_file()]
        if missing:
            # A run folder holds one below it.
            meant = f", perhaps {root / 'sidecar'}" if (root / "sidecar" / HEADER_FILE).is_file() else ""
            raise SidecarError(
                f"expected a sidecar in {root}, found no {missing[0]}; give the folder that holds one{meant}"
            )
        header = SidecarHeader.from_json(_read_header(root / HEADER_FILE), source=str(root / HEADER_FILE))
        tensors = _read_tensors(root / TENSOR_FILE)
        return cls.from_tensors(header, tensors, source=str(root / TENSOR_FILE))

    @classmethod
    def from_tensors(cls, header: SidecarHeader, tensors: dict[str, Tensor], *, source: str) -> "Sidecar":
        """A sidecar from tensors under the names of ``state_dict``.

        Raises:
            SidecarError: a tensor is missing, unexpected, or of a wrong shape.
        """
        try:
            layers = [_projections_from(tensors, index) for index in range(header.geometry.layers)]
            sidecar = cls(header, tensors["slot_embedding"].clone(), layers)
            sidecar.load_state_dict(tensors)
        except (KeyError, RuntimeError, TypeError) as error:
            raise SidecarError(f"{source}: tensors do not fit the sidecar's header: {error}") from error
        _check_selection(header, tensors, source)
        ranks = {p.down.shape[0] if isinstance(p, LowRankProjection) else None for p in sidecar.projections()}
        if ranks - {header.config.rank}:
            raise SidecarError(f"{source}: expected projections of rank {header.config.rank}, got {ranks}")
        return sidecar.to(tensors["slot_embedding"].dtype)

    def check_base(self, model: PreTrainedModel) -> None:
        """Refuse a base model of another shape.

        Raises:
            SidecarError: names what differs.
        """
        expected, got = self.header.geometry, hf_adapter.geometry(model.config)
        if expected != got:
            raise SidecarError(
                f"the sidecar is for a model of {expected}, got one of {got}; give its own base model"
            )
        hidden, width = self.slot_embedding.shape[0], model.config.hidden_size
        if hidden != width:
            raise SidecarError(f"the sidecar is for a hidden size of {hidden}, the model has {width}")
        for index, layer in enumerate(hf_adapter.decoder_layers(model)):
            projections: Any = self.layers[index]
            for name in PROJECTIONS:
                base = getattr(layer.self_attn, name)
                if not projections[name].fits(base):
                    raise SidecarError(
                        f"the sidecar's layers.{index}.{name} does not fit the model's {base}; give its own base model"
                    )


def _projections_like(attention: hf_adapter.StockLayer, rank: int | None) -> nn.ModuleDict:
    made: dict[str, nn.Module] = {}
    for name in PROJECTIONS:
        base: nn.Linear = getattr(attention, name)
        if rank is not None:
            made[name] = LowRankProjection(base.in_features, base.out_features, rank).to(base.weight.dtype)
            continue
        full = FullProjection(base.in_features, base.out_features, base.bias is not None).to(
            base.weight.dtype
        )
        full.load_state_dict(base.state_dict())
        made[name] = full
    return nn.ModuleDict(made)


def _projections_from(tensors: dict[str, Tensor], layer: int) -> nn.ModuleDict:
    made: dict[str, nn.Module] = {}
    scores = tensors.get(f"layers.{layer}.scores.weight")
    if scores is not None:
        shares = f"layers.{layer}.scores.shares" in tensors
        made["scores"] = TokenScores(scores.shape[1], scores.shape[0], shares=shares)
    for name in PROJECTIONS:
        prefix = f"layers.{layer}.{name}"
        if f"{prefix}.down" in tensors:
            down, up = tensors[f"{prefix}.down"], tensors[f"{prefix}.up"]
            made[name] = LowRankProjection(down.shape[1], up.shape[0], down.shape[0])
        else:
            weight = tensors[f"{prefix}.weight"]
            made[name] = FullProjection(weight.shape[1], weight.shape[0], f"{prefix}.bias" in tensors)
    return nn.ModuleDict(made)


def _check_selection(header: SidecarHeader, tensors: dict[str, Tensor], source: str) -> None:
    """Tensors of a selection are there iff the header names it, and shares can be shared out by."""
    selection = header.config.selection
    for layer in range(header.geometry.layers):
        for part, expected in (("weight", selection != "none"), ("shares", selection == SHARING)):
            name = f"layers.{layer}.scores.{part}"
            if (name in tensors) != expected:
                there = "" if expected else "no "
                raise SidecarError(
                    f"{source}: expected {there}{name}, as selection is {selection} in its header"
                )
            if (
                expected
                and part == "shares"
                and not bool((tensors[name] >= 0).logical_and(tensors[name].isfinite()).all())
            ):
                raise SidecarError(f"{source}: expected finite numbers of 0 or more in {name}, got others")


def _read_header(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SidecarError(f"{path}: expected JSON, got something else: {error}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise SidecarError(f"{path}: expected a safetensors file, got something else: {error}") from error
