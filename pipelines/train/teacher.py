"""What the frozen base sees with every document in full, all in one context."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from c2kv_core import ComposedContext, prefill
from pipelines.train.prepare import Prepared


def full_contexts(
    model: PreTrainedModel, prefix_ids: Sequence[int], rows: Sequence[Prepared]
) -> list[ComposedContext]:
    """The joint context of each row: prefix, then its documents in their order, nothing compressed."""
    return [prefill(model, [*prefix_ids, *row.source_ids]) for row in rows]
