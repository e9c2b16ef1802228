"""What an evaluation found, for people and machines."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.eval.bootstrap import Bootstrap
from pipelines.eval.metrics import Score

BASELINE = "full"
"""Method that differences are taken against."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One question by one method at one ratio."""

    question_id: str
    method: str
    ratio: int | None
    prediction: str
    answers: tuple[str, ...]
    score: Score
    nll: float
    """Nats a token."""
    source_tokens: int
    cache_bytes: int
    """Of the documents' keys and values, in the slot dtype."""
    elapsed_s: float
    """Context, answer and likelihood; a pass that several ratios share is counted in equal parts."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, flat."""
        fields = asdict(self)
        marks = fields.pop("score")
        return {**fields, **marks}


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """A row of the table: means over the questions, with 95 % intervals."""

    method: str
    ratio: int | None
    f1: float
    f1_low: float
    f1_high: float
    f1_minus_full: float | None
    """Paired difference; None without a row of full compute, and for that row itself."""
    f1_minus_full_low: float | None
    f1_minus_full_high: float | None
    exact_match: float
    answer_recall: float
    answer_nll: float
    answer_nll_low: float
    answer_nll_high: float
    bytes_per_source_token: float
    """All cache bytes over all source tokens."""
    questions: int
    seconds: float
    """Over all questions."""


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """The whole run."""

    methods: tuple[MethodRow, ...]
    data: str
    model: str
    """What the weights are."""
    sidecar: str
    """``trained`` or ``untrained``."""
    sidecar_directory: str | None
    seed: int
    source_tokens: float
    """Mean a question, turns included."""
    skipped: tuple[dict[str, str], ...]
    """Questions that no method was asked: id and reason."""
    elapsed_s: float
    """Loading not included."""
    config: dict[str, Any]
    """The resolved configuration."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def method_rows(
    outcomes: dict[tuple[str, int | None], list[Outcome]], bootstrap: Bootstrap
) -> tuple[MethodRow, ...]:
    """The table; outcomes of every method are of the same questions in the same order."""
    baseline = outcomes.get((BASELINE, None))
    return tuple(
        _row(found, None if method == BASELINE else baseline, bootstrap)
        for (method, _), found in outcomes.items()
    )


def _row(found: Sequence[Outcome], baseline: Sequence[Outcome] | None, bootstrap: Bootstrap) -> MethodRow:
    f1 = bootstrap.interval([o.score.f1 for o in found])
    nll = bootstrap.interval([o.nll for o in found])
    difference = None
    if baseline is not None:
        pairs = zip(found, baseline, strict=True)
        difference = bootstrap.interval([o.score.f1 - full.score.f1 for o, full in pairs])
    count = len(found)
    return MethodRow(
        method=found[0].method,
        ratio=found[0].ratio,
        f1=f1.mean,
        f1_low=f1.low,
        f1_high=f1.high,
        f1_minus_full=difference.mean if difference else None,
        f1_minus_full_low=difference.low if difference else None,
        f1_minus_full_high=difference.high if difference else None,
        exact_match=sum(o.score.exact_match for o in found) / count,
        answer_recall=sum(o.score.answer_recall for o in found) / count,
        answer_nll=nll.mean,
        answer_nll_low=nll.low,
        answer_nll_high=nll.high,
        bytes_per_source_token=sum(o.cache_bytes for o in found) / sum(o.source_tokens for o in found),
        questions=count,
        seconds=sum(o.elapsed_s for o in found),
    )
