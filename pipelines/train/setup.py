"""What a worker holds: frozen base, sidecar, rows and objective, made from the configuration alone."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from c2kv_core import ComposedContext, Extractor, Sidecar, hf_adapter, load_base, prefill
from c2kv_core.base_digest import base_digest
from c2kv_core.digest import update_digest
from c2kv_core.errors import ConfigError, SidecarError
from c2kv_core.models import model_directory
from c2kv_core.remote_sidecar import sidecar_directory
from c2kv_core.sidecar import is_fitted
from c2kv_core.text import ChatRenderer
from pipelines.train.config import TrainConfig
from pipelines.train.control_objective import ControlObjective
from pipelines.train.ingest import RowFile, open_rows
from pipelines.train.objective import Objective
from pipelines.train.prepare import Preparer
from pipelines.train.stream import RowStream

GAINS_SHARES = ("topk", "heads")
"""Selections of a sidecar to start from, and of the run, that may differ."""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """Everything but the state that changes."""

    config: TrainConfig
    model: PreTrainedModel
    sidecar: Sidecar
    unfitted: frozenset[str]
    """Tensors of the sidecar that are to be fitted before the first step."""
    files: list[RowFile]
    dev_files: list[RowFile]
    preparer: Preparer
    stream: RowStream
    objective: Objective | ControlObjective
    prefix_ids: list[int]
    prefix: ComposedContext | None
    untrained_digest: str
    """Digest of the base's tensors before training."""

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return torch.device(self.model.device)

    def base_tensors_digest(self) -> str:
        """Digest of the base's tensors now."""
        return _digest(self.model)


def set_up(
    config: TrainConfig,
    *,
    device: str | torch.device | None = None,
    shard: Callable[[PreTrainedModel], None] | None = None,
) -> TrainingSetup:
    """Load the base, make the sidecar, read the data.

    Args:
        config: the run.
        device: overrides the configuration's.
        shard: spreads the base over the workers; it is then loaded into main memory first.

    Raises:
        InputError: a subclass that says which part cannot be used.
    """
    place = torch.device(device or config.device)
    model, tokenizer = load_base(config.model, dtype=config.dtype, device="cpu" if shard else place)
    renderer = ChatRenderer(tokenizer)
    sidecar, unfitted = _sidecar(config, model, tokenizer.eos_token_id)
    digest = _digest(model)
    if shard is not None:
        shard(model)
        model.to(place)  # type: ignore[arg-type]
    extractor = Extractor(model, sidecar, recompute=config.gradient_checkpointing)
    prefix_ids = renderer.prefix_ids(config.system)
    prefix = prefill(model, prefix_ids) if prefix_ids else None
    preparer = Preparer(
        tokenizer,
        renderer,
        max_part_tokens=config.max_part_tokens,
        # The prefix takes positions too.
        max_row_tokens=_row_limit(config, model) - len(prefix_ids),
        reconstruction=config.reconstruction,
    )
    files, dev_files = open_rows(config)
    objective = (
        ControlObjective(config, model, extractor.sidecar, prefix_ids=prefix_ids)
        if config.control
        else Objective(config, extractor, prefix_ids=prefix_ids, prefix=prefix)
    )
    return TrainingSetup(
        config=config,
        model=model,
        sidecar=extractor.sidecar,
        unfitted=unfitted,
        files=files,
        dev_files=dev_files,
        preparer=preparer,
        stream=RowStream(config, files, preparer),
        objective=objective,
        prefix_ids=prefix_ids,
        prefix=prefix,
        untrained_digest=digest,
    )


def _row_limit(config: TrainConfig, model: PreTrainedModel) -> int:
    """Most tokens of a row with its prefix: what is configured, or what the model's positions leave beside the gaps.

    Raises:
        ConfigError: the gaps leave none.
    """
    positions = hf_adapter.max_positions(model)
    if config.gap_tokens >= positions:
        raise ConfigError(
            f"expected gap_tokens below the model's {positions} positions, got {config.gap_tokens}; give fewer"
        )
    return min(config.max_row_tokens, positions - config.gap_tokens)


def _digest(model: PreTrainedModel) -> str:
    """Of all tensors; those spread over workers are gathered one by one, on every worker."""
    state, tensors = hashlib.sha256(), model.state_dict()
    for name in sorted(tensors):
        update_digest(state, name, _whole(tensors[name]))
    return state.hexdigest()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load_start(config: TrainConfig, place: str) -> Sidecar:
    """The sidecar that a run is to start from.

    Raises:
        SidecarError: there is none, or it has other settings than the run.
    """
    loaded, settings = Sidecar.load(sidecar_directory(place)), config.sidecar_config(trained=True)
    for name in ("rank", "overlap_tokens", "selection"):
        own, wanted = getattr(loaded.config, name), getattr(settings, name)
        if own != wanted and (own, wanted) != GAINS_SHARES:
            raise SidecarError(f"{place} has {name} {own}, the run {wanted}; give the same")
    return loaded


def _sidecar(
    config: TrainConfig, model: PreTrainedModel, eos_token_id: int | None
) -> tuple[Sidecar, frozenset[str]]:
    """What the run starts from, and the names of its tensors that are still to be fitted."""
    weights = base_digest(model_directory(config.model))
    settings = config.sidecar_config(trained=True)
    if config.init_sidecar is None:
        # Low-rank projections start from random numbers; every worker draws the same.
        torch.manual_seed(config.seed)
        made = Sidecar.from_base(model, settings, eos_token_id=eos_token_id, base_digest=weights)
        return made, frozenset(filter(is_fitted, made.state_dict()))
    loaded = load_start(config, config.init_sidecar)
    if loaded.header.base_digest not in ("", weights):
        raise SidecarError(
            f"{config.init_sidecar} was trained for base weights {loaded.header.base_digest[:12]}, those of "
            f"{config.model} are {weights[:12]}; give the model it was trained for"
        )
    fresh = Sidecar.from_base(model, settings, eos_token_id=eos_token_id, base_digest=weights)
    known = loaded.state_dict()
    fresh.load_state_dict({**fresh.state_dict(), **known})
    return fresh, frozenset(set(fresh.state_dict()) - set(known))
