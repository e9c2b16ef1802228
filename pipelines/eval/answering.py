"""One question over one context: the greedy answer, and how likely the accepted one is there.

Shape legend: T answer tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from c2kv_core import ComposedContext, generate, hf_adapter, prefill
from c2kv_core.cache import AppendCache
from c2kv_core.compose import token_states


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What the model said."""

    token_ids: tuple[int, ...]
    """Greedy answer without its end."""
    nll: float
    """Mean negative log-likelihood, nats a token, of the accepted answer and its end token."""


def answer(
    model: PreTrainedModel,
    context: ComposedContext | None,
    question_ids: Sequence[int],
    answer_ids: Sequence[int],
    *,
    max_new_tokens: int,
) -> Answered:
    """Answer a question of at least two tokens over a context; it is prefilled once for both results."""
    # The last question token is left to each, since its prediction is the first that counts.
    asked = prefill(model, question_ids[:-1], context)
    last = question_ids[-1]
    said = generate(model, asked, [last], max_new_tokens=max_new_tokens)
    return Answered(token_ids=tuple(said), nll=answer_nll(model, asked, last, answer_ids))


@torch.no_grad()
def answer_nll(
    model: PreTrainedModel, asked: ComposedContext, last_question_id: int, answer_ids: Sequence[int]
) -> float:
    """Teacher-forced: sum of -log p(token | all before it) over the answer's tokens, by their number."""
    fed = torch.tensor([[last_question_id, *answer_ids[:-1]]], device=model.device)
    hidden = token_states(model, fed, AppendCache(asked.cache), start=asked.next_position)
    logits_TV = hf_adapter.logits(model, hidden[0]).float()
    return float(F.cross_entropy(logits_TV, torch.tensor(answer_ids, device=model.device)))
