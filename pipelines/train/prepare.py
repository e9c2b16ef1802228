"""Samples to token ids. Answers keep their end token and are never cut; a row that is too long is refused."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from c2kv_core.errors import InputError
from c2kv_core.text import ChatRenderer, document_parts
from pipelines.train.config import Reconstruction
from pipelines.train.row import Passage, RowError, TrainRow
from pipelines.train.sampler import Sample

TOO_LONG = "too long"
UNSPLITTABLE = "title or text that leaves no room in a part"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question and the answer to be learned."""

    question_ids: list[int]
    """Question turn and assistant header."""
    answer_ids: list[int]
    """Answer and its end token; of a passage only its tokens."""
    passage: bool = False
    """Whether reconstruction asks."""

    @property
    def ids(self) -> list[int]:
        """Question and answer."""
        return self.question_ids + self.answer_ids


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A sample as token ids."""

    sample: Sample
    parts: tuple[tuple[list[int], ...], ...]
    """Of each document, in the sample's order."""
    asked: tuple[Asked, ...]
    """The row's own question, others that its documents answer, then passages."""

    @property
    def source_ids(self) -> list[int]:
        """Tokens of all documents, in order."""
        return [token for document in self.parts for part in document for token in part]

    @property
    def source_tokens(self) -> int:
        """How many these are."""
        return sum(len(part) for document in self.parts for part in document)

    @property
    def asked_tokens(self) -> int:
        """Tokens of all questions and answers."""
        return sum(len(a.ids) for a in self.asked)

    @property
    def total_tokens(self) -> int:
        """Tokens of documents and of the longest question with its answer: the positions that the row takes
        beside its gaps."""
        return self.source_tokens + max(len(a.ids) for a in self.asked)


class Preparer:
    """Renders and tokenises samples for one model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        renderer: ChatRenderer,
        *,
        max_part_tokens: int,
        max_row_tokens: int,
        reconstruction: Reconstruction | None = None,
    ) -> None:
        """Limits in tokens; how passages are asked for, where samples have any.

        Raises:
            InputError: the tokenizer has no end-of-sequence token.
        """
        if tokenizer.eos_token_id is None:
            raise InputError("expected a tokenizer with an end-of-sequence token, which ends every answer")
        self._tokenizer, self.renderer = tokenizer, renderer
        self._max_part_tokens = max_part_tokens
        self.max_row_tokens = max_row_tokens
        """Most tokens of a row, without the prefix."""
        self._reconstruction = reconstruction or Reconstruction()

    def prepare(self, sample: Sample) -> Prepared:
        """Token ids of a sample.

        Raises:
            RowError: longer than a row may be, or a document that cannot be split.
        """
        try:
            parts = tuple(
                tuple(document_parts(self.renderer, d.title, d.text, max_part_tokens=self._max_part_tokens))
                for d in sample.documents
            )
        except InputError as error:
            raise RowError(UNSPLITTABLE, f"{sample.row.row_id}: {error}") from error
        prepared = Prepared(
            sample=sample,
            parts=parts,
            asked=(
                *(self._asked(row) for row in (sample.row, *sample.others)),
                *map(self._passage, sample.passages, sample.places),
            ),
        )
        if prepared.total_tokens > self.max_row_tokens:
            raise RowError(
                TOO_LONG,
                f"{sample.row.row_id} has {prepared.total_tokens} tokens, beside prefix and gaps there is room for "
                f"{self.max_row_tokens}",
            )
        return prepared

    def _asked(self, row: TrainRow) -> Asked:
        answer_ids = [*self.renderer.answer_ids(row.answer), int(self._tokenizer.eos_token_id)]
        return Asked(question_ids=self._question(row.question), answer_ids=answer_ids)

    def _passage(self, document: Passage, place: float) -> Asked:
        """A passage starts within a text that has at least one word after the cue; a one-word text has no cue."""
        settings = self._reconstruction
        words = document.text.split()
        cue = min(settings.cue_words, len(words) - 1)
        # A token is at most a few words long, so twice as many words as tokens are enough to cut from.
        start = int(place * max(len(words) - cue - settings.max_tokens // 2, 1))
        said = words[start : start + cue]
        wanted = " ".join(words[start + cue : start + cue + 2 * settings.max_tokens])
        return Asked(
            question_ids=self._question(" ".join([settings.prompt, *said])),
            answer_ids=self.renderer.answer_ids(wanted)[: settings.max_tokens],
            passage=True,
        )

    def _question(self, text: str) -> list[int]:
        """Question turn and assistant header."""
        return self.renderer.question_ids([{"role": "user", "content": text}])
