"""What the frozen base predicts with every document in full, all in one context."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core import hf_adapter
from c2kv_core.compose import check_positions
from pipelines.train.asks import Predictions, padded_ids
from pipelines.train.prepare import Prepared


class _PassThrough:
    """A cache that keeps nothing."""

    def update(self, keys: Tensor, values: Tensor, layer: int, **extra: object) -> tuple[Tensor, Tensor]:
        return keys, values


@torch.no_grad()
def teacher_states(
    model: PreTrainedModel, prefix_ids: Sequence[int], rows: Sequence[Prepared], wanted: Predictions
) -> Tensor:
    """Final hidden states (P, D) that predict the wanted tokens."""
    before = [[*prefix_ids, *(i for d in row.parts for part in d for i in part)] for row in rows]
    whole = [ids + row.question_ids + row.answer_ids[:-1] for ids, row in zip(before, rows, strict=True)]
    check_positions(model, max(map(len, whole)))
    ids_BT = padded_ids(whole, model.device)
    positions = torch.arange(ids_BT.shape[1], device=model.device).expand_as(ids_BT)
    # Padding stands to the right, so plain causal attention keeps it from every real token.
    hidden_BTD = hf_adapter.run_model(model, ids_BT, positions=positions, cache=_PassThrough(), mask=None)
    offsets = torch.tensor([len(ids) for ids in before], device=model.device)
    return hidden_BTD[wanted.rows, offsets[wanted.rows] + wanted.places]
