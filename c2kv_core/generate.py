"""Answer token ids over a composed context, one at a time, by the pure base model."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core import hf_adapter
from c2kv_core.cache import ContextCache
from c2kv_core.compose import (
    PREFILL_CHUNK_TOKENS,
    ComposedContext,
    check_ids,
    check_positions,
    rotated_layers,
)
from c2kv_core.decode_batch import step_together
from c2kv_core.decode_cache import DecodeCache
from c2kv_core.document import CompressedDocument
from c2kv_core.errors import InputError
from c2kv_core.sampling import Sampler, SamplingParams


class Decoder:
    """The state of one answer: documents placed, question prefilled once, then a token a step.

    The context it starts from is copied, not changed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        context: ComposedContext | None,
        question_ids: Sequence[int],
        *,
        max_new_tokens: int,
        more_entries: int = 0,
        more_positions: int = 0,
    ) -> None:
        """Reserve room for question and answer.

        Args:
            model: the frozen base.
            context: what stands before all else; None at the start.
            question_ids: question and assistant header, at least one token.
            max_new_tokens: most tokens of the answer.
            more_entries: keys and values a layer of what is placed between context and question, by ``place`` or as
                ordinary tokens.
            more_positions: its source tokens.

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
        self.question_chunks = tuple(
            tuple(question_ids[start : start + PREFILL_CHUNK_TOKENS])
            for start in range(0, len(question_ids), PREFILL_CHUNK_TOKENS)
        )
        """The question in pieces, to be read in this order before the first ``step``."""
        self.position = context.next_position if context else 0
        """Of the token that comes next."""
        # The last token drawn is never fed back, so it needs no position.
        own = len(question_ids) + max_new_tokens - 1
        check_positions(model, self.position + more_positions + own)
        cache = context.cache if context else _empty_cache(model)
        self.cache = DecodeCache(cache, extra_tokens=more_entries + own)
        """Context, question and answer so far."""

    @torch.no_grad()
    def place(self, documents: Sequence[CompressedDocument]) -> None:
        """Put documents behind what is there, as ``compose`` does, in the room that ``more_entries`` reserved.

        Raises:
            InputError: a document of another geometry.
            ContextLengthError: more positions than the model has.
        """
        if not documents:
            return
        layers, position = rotated_layers(self._model, documents, self.position)
        self.rewind()
        for layer, placed in enumerate(layers):
            self.cache.place(placed.keys, placed.values, layer, by_head=placed.by_head)
        self.cache.commit()
        self.position = position

    @torch.no_grad()
    def prefill_question(self) -> Tensor:
        """Logits (vocabulary,) of the first answer token."""
        *_, logits_V = [step_together(self._model, [self], [chunk])[0] for chunk in self.question_chunks]
        return logits_V

    @torch.no_grad()
    def step(self, token: int) -> Tensor:
        """Logits (vocabulary,) of the token after ``token``."""
        return step_together(self._model, [self], [[token]])[0]

    def advance(self, tokens: int) -> None:
        """Count tokens whose keys and values have been put into ``cache``."""
        self.position += tokens
        self.cache.commit()

    def rewind(self) -> None:
        """Drop from ``cache`` what a step that failed has left there, uncounted by ``advance``."""
        self.cache.rewind()


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
