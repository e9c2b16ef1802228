"""The loss of a micro-batch: slots, composed contexts, answers, and what the options add."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from c2kv_core import ComposedContext, Extractor, compose, hf_adapter
from pipelines.train.asks import Ask, ask_states, predictions
from pipelines.train.config import TrainConfig
from pipelines.train.loss import answer_losses, divergences
from pipelines.train.prepare import Prepared
from pipelines.train.slots import View, row_views
from pipelines.train.teacher import teacher_states

Sums = defaultdict[str, float]
"""Sums over rows, by name."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """A micro-batch's share of the step's loss, and sums for the curves."""

    loss: Tensor
    """Scalar; the shares of a step's micro-batches over all workers add up to its loss."""
    sums: Sums
    """``rows``, ``source_tokens`` and other sizes, and sums over rows of each loss by name."""


class Objective:
    """Computes losses; gradients reach the sidecar only."""

    def __init__(
        self,
        config: TrainConfig,
        extractor: Extractor,
        *,
        prefix_ids: list[int],
        prefix: ComposedContext | None,
        retell_ids: list[int],
    ) -> None:
        """Args:
        config: weights of the losses, rows of a step.
        extractor: model and sidecar.
        prefix_ids: tokens before the first document.
        prefix: their context; None where there are none.
        retell_ids: question that asks for a document's text.
        """
        self._config, self.extractor, self._model = config, extractor, extractor.model
        self._prefix_ids, self._prefix, self._retell_ids = prefix_ids, prefix, retell_ids

    def losses(self, rows: Sequence[Prepared]) -> Losses:
        """Losses of one micro-batch."""
        views = self.views(rows)
        count = self._config.views_per_row
        # View by view, so that a teacher row's predictions line up with those of each of its views.
        asks = [self._ask(row, views[i][v]) for v in range(count) for i, row in enumerate(rows)]
        sums = _sizes(rows, distilled=self._config.distillation.weight > 0)
        sums["slots"] = float(sum(d.num_slots for row in views for view in row for d in view))
        loss = self._answers(asks, rows, sums)
        if self._config.reconstruction.weight:
            loss = loss + self._retellings(rows, views, sums)
        return Losses(loss=loss / self._config.batch_rows, sums=sums)

    def views(self, rows: Sequence[Prepared]) -> list[list[View]]:
        """Slots of the rows of a micro-batch, a list of views a row."""
        shared = self._config.all_ratios() if self._config.shard_base else None
        return row_views(self.extractor, rows, in_step=shared)

    def _ask(self, row: Prepared, view: View) -> Ask:
        context = compose(self._model, self._prefix, view)
        return Ask(context=context, question_ids=row.question_ids, answer_ids=row.answer_ids)

    def _answers(self, asks: list[Ask], rows: Sequence[Prepared], sums: Sums) -> Tensor:
        distillation = self._config.distillation
        count = self._config.views_per_row
        wide = distillation.weight > 0 and distillation.positions == "question_and_answer"
        pairs = [(a.question_ids, a.answer_ids) for a in asks]
        wanted = predictions(pairs, questions=wide, device=self._model.device)
        states = ask_states(self._model, asks, recompute=self._config.gradient_checkpointing)
        logits = hf_adapter.logits(self._model, states[wanted.rows, wanted.places])
        answer_A = answer_losses(logits, wanted, len(asks))
        _add_by_ratio(sums, answer_A.detach().view(count, len(rows)), rows)
        total = answer_A.sum() / count
        sums["answer"] += float(total.detach())
        if distillation.weight:
            teacher = self._teacher_logits(rows, wide, sums)
            spread = teacher.repeat(count, 1)
            kl_A = divergences(logits, spread, wanted, len(asks), temperature=distillation.temperature)
            sums["distillation"] += float(kl_A.detach().sum()) / count
            total = total + distillation.weight * kl_A.sum() / count
        return total

    @torch.no_grad()
    def _teacher_logits(self, rows: Sequence[Prepared], wide: bool, sums: Sums) -> Tensor:
        pairs = [(row.question_ids, row.answer_ids) for row in rows]
        wanted = predictions(pairs, questions=wide, device=self._model.device)
        logits = hf_adapter.logits(self._model, teacher_states(self._model, self._prefix_ids, rows, wanted))
        sums["full_compute"] += float(answer_losses(logits, wanted, len(rows)).sum())
        return logits

    def _retellings(self, rows: Sequence[Prepared], views: list[list[View]], sums: Sums) -> Tensor:
        asks = []
        for row, (first, *_) in zip(rows, views, strict=True):
            start = sum(len(document) for document in row.parts[: row.sample.retold])
            parts = first[start : start + 1]
            context = compose(self._model, self._prefix, parts)
            asks.append(Ask(context=context, question_ids=self._retell_ids, answer_ids=row.retold_ids))
        pairs = [(a.question_ids, a.answer_ids) for a in asks]
        wanted = predictions(pairs, questions=False, device=self._model.device)
        states = ask_states(self._model, asks, recompute=self._config.gradient_checkpointing)
        logits = hf_adapter.logits(self._model, states[wanted.rows, wanted.places])
        total = answer_losses(logits, wanted, len(asks)).sum()
        sums["reconstruction"] += float(total.detach())
        return self._config.reconstruction.weight * total


def _sizes(rows: Sequence[Prepared], *, distilled: bool) -> Sums:
    sizes: Sums = defaultdict(float)
    sizes["rows"] = len(rows)
    sizes["source_tokens"] = sum(row.source_tokens for row in rows)
    sizes["answer_tokens"] = sum(len(row.answer_ids) for row in rows)
    asked = sum(len(row.question_ids) + len(row.answer_ids) for row in rows)
    sizes["asked_tokens"] = asked * len(rows[0].sample.ratios)
    sizes["taught_tokens"] = sum(row.total_tokens for row in rows) if distilled else 0
    return sizes


def _add_by_ratio(sums: Sums, answer_VR: Tensor, rows: Sequence[Prepared]) -> None:
    """A row of mixed ratios counts for each of them by its share of the documents."""
    for losses, view in zip(answer_VR.tolist(), range(len(answer_VR)), strict=True):
        for loss, row in zip(losses, rows, strict=True):
            chosen = row.sample.ratios[view]
            for ratio in chosen:
                sums[f"answer_at_{ratio}"] += loss / len(chosen)
                sums[f"share_at_{ratio}"] += 1 / len(chosen)
