"""Answer token ids over a composed context, one at a time, by the pure base model."""

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core import hf_adapter
from c2kv_core.cache import ContextCache, DecodeCache
from c2kv_core.compose import PREFILL_CHUNK_TOKENS, ComposedContext, check_ids, check_positions, token_states
from c2kv_core.errors import InputError
from c2kv_core.sampling import Sampler, SamplingParams


class Decoder:
    """The state of one answer: question prefilled once, then a token a step. The context is copied, not changed."""

    def __init__(
        self,
        model: PreTrainedModel,
        context: ComposedContext | None,
        question_ids: Sequence[int],
        *,
        max_new_tokens: int,
    ) -> None:
        """Reserve room for question and answer.

        Raises:
            InputError: no question token, one without an embedding, or a limit below 1.
            ContextLengthError: context, question and answer exceed the model's positions.
        """
        if not question_ids:
            raise InputError("expected at least one question token, got none")
        check_ids(model, question_ids)
        if max_new_tokens < 1:
            raise InputError(f"expected max_new_tokens of 1 or more, got {max_new_tokens}")
        self._model = model
        self._question = deque(
            question_ids[start : start + PREFILL_CHUNK_TOKENS]
            for start in range(0, len(question_ids), PREFILL_CHUNK_TOKENS)
        )
        self.position = context.next_position if context else 0
        """Of the token that comes next."""
        # The last token drawn is never fed back, so it needs no position.
        check_positions(model, self.position + len(question_ids) + max_new_tokens - 1)
        cache = context.cache if context else _empty_cache(model)
        self._entries = cache.num_entries
        self.cache = DecodeCache(cache, extra_tokens=len(question_ids) + max_new_tokens - 1)
        """Context, question and answer so far."""

    @torch.no_grad()
    def prefill_question(self) -> Tensor:
        """Logits (vocabulary,) of the first answer token."""
        while (logits_V := self.prefill_chunk()) is None:
            pass
        return logits_V

    @torch.no_grad()
    def prefill_chunk(self) -> Tensor | None:
        """Read on in the question, at most ``PREFILL_CHUNK_TOKENS``; with its end, the first answer token's logits."""
        hidden_TD = self._feed(self._question.popleft())
        return None if self._question else hf_adapter.logits(self._model, hidden_TD[-1])

    @torch.no_grad()
    def step(self, token: int) -> Tensor:
        """Logits (vocabulary,) of the token after ``token``."""
        return hf_adapter.logits(self._model, self._feed([token])[-1])

    def advance(self, tokens: int) -> None:
        """Count tokens whose keys and values have been put into ``cache``."""
        self.position += tokens
        self._entries += tokens

    def rewind(self) -> None:
        """Drop from ``cache`` what a step that failed has left there, uncounted by ``advance``."""
        self.cache.keep(self._entries)

    def _feed(self, ids: Sequence[int]) -> Tensor:
        self.rewind()
        ids_BT = torch.as_tensor(ids, dtype=torch.int64, device=self._model.device)[None]
        hidden_BTD = token_states(self._model, ids_BT, self.cache, start=self.position, past=self._entries)
        self.advance(len(ids))
        return hidden_BTD[0]


def generate(
    model: PreTrainedModel,
    context: ComposedContext | None,
    question_ids: Sequence[int],
    *,
    max_new_tokens: int = 256,
    sampling: SamplingParams | None = None,
    eos_token_ids: frozenset[int] | None = None,
) -> Iterator[int]:
    """Answer token ids, one at a time, ending before an end-of-answer token or at ``max_new_tokens``.

    Args:
        model: the frozen base.
        context: prefix and documents; it is never changed. None answers the question alone.
        question_ids: question and assistant header, at least one token.
        max_new_tokens: most tokens to give.
        sampling: greedy by default.
        eos_token_ids: ids that end the answer; the model's own by default.

    Raises:
        InputError: no question token, one without an embedding, or a limit below 1.
        ContextLengthError: context, question and answer exceed the model's positions.
    """
    stop = hf_adapter.eos_token_ids(model) if eos_token_ids is None else eos_token_ids
    decoder = Decoder(model, context, question_ids, max_new_tokens=max_new_tokens)
    sampler = Sampler(sampling or SamplingParams())
    return _draw(decoder, sampler, stop, max_new_tokens)


def _draw(decoder: Decoder, sampler: Sampler, stop: frozenset[int], limit: int) -> Iterator[int]:
    logits_V = decoder.prefill_question()
    for count in range(1, limit + 1):
        token = sampler.draw(logits_V)
        if token in stop:
            return
        yield token
        if count < limit:
            logits_V = decoder.step(token)


def _empty_cache(model: PreTrainedModel) -> ContextCache:
    shape = hf_adapter.geometry(model.config)
    empty = torch.empty(1, shape.kv_heads, 0, shape.head_dim, dtype=model.dtype, device=model.device)
    return ContextCache(keys=(empty,) * shape.layers, values=(empty,) * shape.layers)
