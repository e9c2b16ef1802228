"""What changes during a run and is saved with every checkpoint, and how it goes into tensors and JSON."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipelines.train.trainer import StepRecord, Trainer

_RNG = "rng/torch"


@dataclass(kw_only=True)
class Best:
    """The best sidecar so far."""

    step: int
    score: float
    """Mean answer cross-entropy over held-out files and ratios."""
    path: str
    """Its tensors, below the run folder."""


@dataclass(kw_only=True)
class RunState:
    """Counts of a run. The position in the data is the step: rows follow from it."""

    step: int = 0
    """Finished optimizer steps."""
    rows: int = 0
    source_tokens: int = 0
    answer_tokens: int = 0
    dropped: int = 0
    """Rows replaced because they could not be used."""
    seconds: float = 0.0
    """Wall time of all steps."""
    best: Best | None = None
    references: dict[str, Any] = field(default_factory=dict)
    """Held-out reference lines, computed once."""

    def count(self, record: StepRecord) -> None:
        """Add a finished step."""
        self.step = record.step
        self.rows += record.rows
        self.source_tokens += record.source_tokens
        self.answer_tokens += record.answer_tokens
        self.dropped += record.dropped
        self.seconds += record.elapsed_s

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunState":
        """What ``to_dict`` gave."""
        best = values.get("best")
        return cls(**{**values, "best": Best(**best) if best else None})


def state_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Weights, optimizer state and random state."""
    weights = {f"weight/{name}": p for name, p in trainer.weights.named.items()}
    moments = {f"optimizer/{name}": t for name, t in trainer.optimizer.tensors().items()}
    # Nothing in a step draws from it today; a run that goes on should not depend on that.
    return {**weights, **moments, _RNG: torch.get_rng_state()}


def restore(trainer: Trainer, tensors: dict[str, Tensor]) -> None:
    """Put a trainer where ``state_tensors`` found it."""
    trainer.weights.load(_below(tensors, "weight/"))
    trainer.optimizer.load(_below(tensors, "optimizer/"))
    torch.set_rng_state(tensors[_RNG])


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
