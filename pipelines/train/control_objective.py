"""The loss of a control: the base itself, with low-rank deltas, answers over documents in full or over none.

Shape legend: B rows, C context tokens (padded), T tokens of a row's questions and answers (padded), D hidden.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core import Sidecar, hf_adapter
from c2kv_core.compose import check_positions
from pipelines.control import Control
from pipelines.train.asks import pack_ids, padded, predictions
from pipelines.train.config import TrainConfig
from pipelines.train.loss import answer_losses
from pipelines.train.objective import Losses, row_means, row_sizes
from pipelines.train.prepare import Prepared


class ControlObjective:
    """Cross-entropy on answers; gradients reach the deltas only. Passages are left out: a sidecar's task alone."""

    def __init__(
        self, config: TrainConfig, model: PreTrainedModel, sidecar: Sidecar, *, prefix_ids: list[int]
    ) -> None:
        """``sidecar`` holds the deltas; ``config`` names a control."""
        assert config.control is not None, "a control's objective is made for a control"
        self.control = Control(documents=config.control, sidecar=sidecar)
        self._config, self._model, self._prefix_ids = config, model, prefix_ids

    def losses(self, rows: Sequence[Prepared]) -> Losses:
        """Losses of one micro-batch."""
        rows = [_questions_only(row) for row in rows]
        answer_A = self._answer_losses(rows)
        sums = row_sizes(rows, taught=False)
        total = torch.stack(row_means(answer_A, rows)).sum()
        sums["answer"] = float(total.detach())
        return Losses(loss=total / self._config.batch_rows, sums=sums)

    def held_out(self, rows: Sequence[Prepared]) -> dict[str, float]:
        """Sums over rows."""
        return {"control": float(self._answer_losses(rows).sum())}

    def _answer_losses(self, rows: Sequence[Prepared]) -> Tensor:
        wanted = predictions([row.asked for row in rows], questions=False, device=self._model.device)
        contexts = [self._context(row) for row in rows]
        offsets_B = torch.tensor([len(ids) for ids in contexts], device=self._model.device)
        with self.control.beside(self._model):
            hidden_BTD = joint_states(self._model, contexts, rows)
        states = hidden_BTD[wanted.rows, offsets_B[wanted.rows] + wanted.places]
        return answer_losses(hf_adapter.logits(self._model, states), wanted, sum(len(r.asked) for r in rows))

    def _context(self, row: Prepared) -> list[int]:
        if self.control.documents == "none":
            return self._prefix_ids
        return [*self._prefix_ids, *row.source_ids]


def joint_states(model: PreTrainedModel, contexts: Sequence[list[int]], rows: Sequence[Prepared]) -> Tensor:
    """Final hidden states (B, C + T, D) of each context with its row's questions, each alone after it."""
    ids, steps, groups = [], [], []
    for context, row in zip(contexts, rows, strict=True):
        packed = pack_ids(row.asked)
        check_positions(model, len(context) + max(packed.steps) + 1)
        ids.append([*context, *packed.ids])
        steps.append([*range(len(context)), *(len(context) + step for step in packed.steps)])
        groups.append([0] * len(context) + packed.numbers)
    ids_BT, positions, groups_BT = (padded(x, model.device) for x in (ids, steps, groups))
    # Group 0 is the context, which all later tokens see; padding stands to the right, seen by no real token.
    same = groups_BT[:, :, None] == groups_BT[:, None]
    mask = (same | (groups_BT == 0)[:, None]).tril()[:, None]
    return hf_adapter.run_model(model, ids_BT, positions=positions, cache=_PassThrough(), mask=mask)


class _PassThrough:
    """A cache that keeps nothing."""

    def update(self, keys: Tensor, values: Tensor, layer: int, **extra: object) -> tuple[Tensor, Tensor]:
        return keys, values


def _questions_only(row: Prepared) -> Prepared:
    return replace(row, asked=tuple(a for a in row.asked if not a.passage))
