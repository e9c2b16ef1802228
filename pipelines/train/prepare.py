"""Samples to token ids. Answers keep their end token and are never cut; a row that is too long is refused."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from c2kv_core.errors import InputError
from c2kv_core.text import ChatRenderer, document_parts
from pipelines.train.row import RowError
from pipelines.train.sampler import Sample

TOO_LONG = "too long"
UNSPLITTABLE = "title or text that leaves no room in a part"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A sample as token ids."""

    sample: Sample
    parts: tuple[tuple[list[int], ...], ...]
    """Of each document, in the sample's order."""
    question_ids: list[int]
    """Question turn and assistant header."""
    answer_ids: list[int]
    """Answer and its end token."""
    retold_ids: list[int]
    """Text of the document that reconstruction asks for, cut at the configured length; empty when off."""

    @property
    def source_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(len(part) for document in self.parts for part in document)

    @property
    def total_tokens(self) -> int:
        """Tokens of documents, question and answer."""
        return self.source_tokens + len(self.question_ids) + len(self.answer_ids)


class Preparer:
    """Renders and tokenises samples for one model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        renderer: ChatRenderer,
        *,
        max_part_tokens: int,
        max_row_tokens: int,
        retold_tokens: int,
    ) -> None:
        """``retold_tokens`` 0 switches reconstruction off.

        Raises:
            InputError: the tokenizer has no end-of-sequence token.
        """
        if tokenizer.eos_token_id is None:
            raise InputError("expected a tokenizer with an end-of-sequence token, which ends every answer")
        self._tokenizer, self._renderer = tokenizer, renderer
        self._max_part_tokens, self._max_row_tokens = max_part_tokens, max_row_tokens
        self._retold_tokens = retold_tokens

    def prepare(self, sample: Sample) -> Prepared:
        """Token ids of a sample.

        Raises:
            RowError: longer than a row may be, or a document that cannot be split.
        """
        try:
            parts = tuple(
                tuple(document_parts(self._renderer, d.title, d.text, max_part_tokens=self._max_part_tokens))
                for d in sample.documents
            )
        except InputError as error:
            raise RowError(UNSPLITTABLE, f"{sample.row.row_id}: {error}") from error
        prepared = Prepared(
            sample=sample,
            parts=parts,
            question_ids=self.question(sample.row.question),
            answer_ids=[*self._renderer.answer_ids(sample.row.answer), int(self._tokenizer.eos_token_id)],
            retold_ids=self._renderer.answer_ids(sample.documents[sample.retold].text)[: self._retold_tokens],
        )
        if prepared.total_tokens > self._max_row_tokens:
            raise RowError(
                TOO_LONG, f"{sample.row.row_id} has {prepared.total_tokens} tokens of {self._max_row_tokens}"
            )
        return prepared

    def question(self, text: str) -> list[int]:
        """Question turn and assistant header."""
        return self._renderer.question_ids([{"role": "user", "content": text}])
