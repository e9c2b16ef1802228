"""The loss of a micro-batch: slots, composed contexts, answers, and what the options add."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core import ComposedContext, Extractor, compose, hf_adapter
from pipelines.train.asks import Ask, Predictions, ask_states, predictions
from pipelines.train.config import TrainConfig
from pipelines.train.loss import answer_losses, divergences
from pipelines.train.prepare import Prepared
from pipelines.train.slots import View, row_views
from pipelines.train.teacher import full_contexts

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
    ) -> None:
        """Args:
        config: weights of the losses, rows of a step.
        extractor: model and sidecar.
        prefix_ids: tokens before the first document.
        prefix: their context; None where there are none.
        """
        self._config, self.extractor, self._model = config, extractor, extractor.model
        self._prefix_ids, self._prefix = prefix_ids, prefix

    def losses(self, rows: Sequence[Prepared]) -> Losses:
        """Losses of one micro-batch."""
        views = self.views(rows)
        count = self._config.views_per_row
        # View by view, so that a teacher row's predictions line up with those of each of its views.
        asks = [self._ask(row, views[i][v]) for v in range(count) for i, row in enumerate(rows)]
        sums = row_sizes(rows, taught=self._config.distillation.weight > 0)
        sums["slots"] = float(
            sum({id(d): d.num_slots for row in views for view in row for d in view}.values())
        )
        loss = self._answers(asks, rows, sums)
        return Losses(loss=loss / self._config.batch_rows, sums=sums)

    def views(self, rows: Sequence[Prepared]) -> list[list[View]]:
        """Slots of the rows of a micro-batch, a list of views a row."""
        shared = self._config.all_ratios() if self._config.shard_base else None
        return row_views(self.extractor, rows, in_step=shared)

    def held_out(self, rows: Sequence[Prepared]) -> dict[str, float]:
        """Answer losses by ratio, summed over rows that have one view a ratio."""
        views = self.views(rows)
        found = {}
        for place, ratio in enumerate(self._config.all_ratios()):
            asks = [self._ask(row, views[i][place]) for i, row in enumerate(rows)]
            found[str(ratio)] = float(ask_losses(self._model, asks).sum())
        return found

    def _ask(self, row: Prepared, view: View) -> Ask:
        context = compose(self._model, self._prefix, view, gaps=_part_gaps(row))
        if row.sample.gaps:
            context = replace(context, next_position=context.next_position + row.sample.gaps[-1])
        return Ask(context=context, asked=row.asked)

    def _wanted(self, asked: Sequence[Ask]) -> Predictions:
        distillation = self._config.distillation
        wide = distillation.weight > 0 and distillation.positions == "question_and_answer"
        return predictions([a.asked for a in asked], questions=wide, device=self._model.device)

    def _answers(self, asks: list[Ask], rows: Sequence[Prepared], sums: Sums) -> Tensor:
        count, distillation = self._config.views_per_row, self._config.distillation
        wanted = self._wanted(asks)
        weights_A = self._weights(rows)
        logits = ask_logits(self._model, asks, wanted, recompute=self._config.gradient_checkpointing)
        answer_A = answer_losses(logits, wanted, len(weights_A))
        total = (answer_A * weights_A).sum()
        self._record(sums, answer_A.detach(), rows)
        if distillation.weight:
            spread = self._teacher_logits(rows, sums).repeat(count, 1)
            kl_A = divergences(logits, spread, wanted, len(weights_A), temperature=distillation.temperature)
            kl = (kl_A * weights_A).sum()
            sums["distillation"] += float(kl.detach())
            total = total + distillation.weight * kl
        return total

    def _weights(self, rows: Sequence[Prepared]) -> Tensor:
        """(A,) of each question of each view: a row's questions together count 1, its passages what is configured."""
        one_view = []
        for row in rows:
            passages = sum(a.passage for a in row.asked)
            shares = {False: 1 / (len(row.asked) - passages)}
            shares[True] = self._config.reconstruction.weight / passages if passages else 0.0
            one_view += [shares[a.passage] for a in row.asked]
        count = self._config.views_per_row
        return torch.tensor(one_view * count, device=self._model.device) / count

    def _record(self, sums: Sums, answer_A: Tensor, rows: Sequence[Prepared]) -> None:
        """Means over a row's questions, and over its passages; a row of mixed ratios counts for each by its share."""
        count = self._config.views_per_row
        for view, losses_A in enumerate(answer_A.view(count, -1)):
            for row, mean in zip(rows, row_means(losses_A, rows), strict=True):
                answer, chosen = float(mean), row.sample.ratios[view]
                sums["answer"] += answer / count
                for ratio in chosen:
                    sums[f"answer_at_{ratio}"] += answer / len(chosen)
                    sums[f"share_at_{ratio}"] += 1 / len(chosen)
            if self._config.reconstruction.weight:
                sums["reconstruction"] += float(sum(row_means(losses_A, rows, passages=True))) / count

    @torch.no_grad()
    def _teacher_logits(self, rows: Sequence[Prepared], sums: Sums) -> Tensor:
        """(P, V) of one view's predictions, over the full joint contexts."""
        contexts = full_contexts(self._model, self._prefix_ids, rows)
        asks = [Ask(context=c, asked=row.asked) for c, row in zip(contexts, rows, strict=True)]
        wanted = self._wanted(asks)
        logits = ask_logits(self._model, asks, wanted)
        answer_A = answer_losses(logits, wanted, sum(len(row.asked) for row in rows))
        sums["full_compute"] += float(sum(row_means(answer_A, rows)))
        return logits


def _part_gaps(row: Prepared) -> list[int]:
    """Positions left free before each part: those of a document follow each other."""
    before = row.sample.gaps[:-1] or (0,) * len(row.parts)
    return [
        gap if part == 0 else 0
        for gap, parts in zip(before, row.parts, strict=True)
        for part in range(len(parts))
    ]


def ask_logits(
    model: PreTrainedModel, asks: Sequence[Ask], wanted: Predictions, *, recompute: bool = False
) -> Tensor:
    """(P, V) of the predictions, over the asks' contexts."""
    states = ask_states(model, asks, recompute=recompute)
    return hf_adapter.logits(model, states[wanted.rows, wanted.places])


@torch.no_grad()
def ask_losses(model: PreTrainedModel, asks: Sequence[Ask]) -> Tensor:
    """(A,) cross-entropy on the answer of every question."""
    wanted = predictions([a.asked for a in asks], questions=False, device=model.device)
    return answer_losses(ask_logits(model, asks, wanted), wanted, sum(len(a.asked) for a in asks))


def row_means(losses_A: Tensor, rows: Sequence[Prepared], *, passages: bool = False) -> list[Tensor]:
    """Mean of each row's questions, or of its passages."""
    means, start = [], 0
    for row in rows:
        mine = [start + i for i, a in enumerate(row.asked) if a.passage == passages]
        means.append(losses_A[mine].mean())
        start += len(row.asked)
    return means


def row_sizes(rows: Sequence[Prepared], *, taught: bool) -> Sums:
    """Counts for the curves."""
    sizes: Sums = defaultdict(float)
    views = len(rows[0].sample.ratios)
    sizes["rows"] = len(rows)
    # Of rows that share documents each is extracted once.
    parts = {id(part): len(part) for row in rows for document in row.parts for part in document}
    sizes["source_tokens"] = sum(parts.values())
    sizes["answer_tokens"] = sum(len(a.answer_ids) for row in rows for a in row.asked if not a.passage)
    sizes["asked_tokens"] = sum(row.asked_tokens for row in rows) * views
    sizes["taught_tokens"] = sum(row.source_tokens + row.asked_tokens for row in rows) if taught else 0
    return sizes
