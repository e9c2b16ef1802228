"""A question as token ids: the same segments for every method."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from c2kv_core import ComposedContext, Compressor, hf_adapter, prefill
from c2kv_core.errors import InputError
from pipelines.eval.questions import Question


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a method is given."""

    question: Question
    prefix: ComposedContext | None
    """System message, prefilled; None where the template puts nothing before the documents."""
    documents: tuple[tuple[tuple[int, ...], ...], ...]
    """Token ids of each part of each document, in order. Every method reads these, so splits are the same for all."""
    question_ids: tuple[int, ...]
    """Question and assistant header."""
    answer_ids: tuple[int, ...]
    """First accepted answer and the token that ends it."""

    @property
    def parts(self) -> list[Sequence[int]]:
        """Parts of all documents in order."""
        return [part for document in self.documents for part in document]

    @property
    def source_ids(self) -> list[int]:
        """All document tokens, as full compute sees them."""
        return [token for part in self.parts for token in part]

    @property
    def source_tokens(self) -> int:
        """How many these are."""
        return sum(map(len, self.parts))

    def positions(self, max_new_tokens: int) -> int:
        """Positions that full compute needs, answer included."""
        start = self.prefix.next_position if self.prefix else 0
        return start + self.source_tokens + len(self.question_ids) + max(max_new_tokens, len(self.answer_ids))


class CaseMaker:
    """Renders questions; the prefix is computed once."""

    def __init__(self, compressor: Compressor, *, system: str | None) -> None:
        """Prefill the system message.

        Raises:
            InputError: the tokenizer has no token that ends an answer.
        """
        self._compressor = compressor
        self._end = end_of_answer(compressor)
        ids = compressor.renderer.prefix_ids(system)
        self._prefix = prefill(compressor.model, ids) if ids else None

    def case(self, question: Question) -> Case:
        """The question as ids."""
        return Case(
            question=question,
            prefix=self._prefix,
            documents=tuple(
                tuple(tuple(ids) for ids in self._compressor.part_ids(d.title, d.text))
                for d in question.documents
            ),
            question_ids=tuple(
                self._compressor.renderer.question_ids([{"role": "user", "content": question.text}])
            ),
            answer_ids=(*self._compressor.renderer.answer_ids(question.answers[0]), self._end),
        )


def end_of_answer(compressor: Compressor) -> int:
    """The token that ends an assistant turn: the tokenizer's EOS, else the model's first.

    Raises:
        InputError: neither has one.
    """
    tokenizer: PreTrainedTokenizerFast = compressor.tokenizer
    if isinstance(tokenizer.eos_token_id, int):
        return tokenizer.eos_token_id
    ends = hf_adapter.eos_token_ids(compressor.model)
    if not ends:
        raise InputError(
            f"{compressor.spec.model} names no end-of-answer token; set eos_token in its tokenizer"
        )
    return min(ends)
