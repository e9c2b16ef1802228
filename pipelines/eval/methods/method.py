"""What a method is: a way to turn a case into contexts that the question is then asked over."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel

from c2kv_core import ComposedContext, Compressor
from pipelines.eval.case import Case
from pipelines.eval.config import EvalConfig


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What methods are built from."""

    config: EvalConfig
    compressor: Compressor

    @property
    def ratios(self) -> tuple[int, ...]:
        """Ratios of the run, each once."""
        return self.compressor.spec.ratios


@dataclass(frozen=True, kw_only=True)
class MethodContext:
    """What the question sees, for one row of the table."""

    ratio: int | None
    """Source tokens per cache entry; None where that is no setting of the method."""
    context: ComposedContext | None
    """Prefix and documents; None where there is neither."""
    entries: int
    """Cache entries of the documents, a layer."""
    stored_bytes: int | None = None
    """Bytes of these where they are stored otherwise than as entries of the slot dtype."""
    model: PreTrainedModel | None = None
    """What answers; None is the base."""


class Method(Protocol):
    """One way to put documents before a question."""

    def contexts(self, case: Case) -> Sequence[MethodContext]:
        """One for each row, always the same ratios in the same order."""
        ...
