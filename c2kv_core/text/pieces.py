"""Tokenising rendered text: control tokens of the template stay control tokens, those in content become text."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from c2kv_core.errors import TemplateError

_PRIVATE_USE = range(0xE000, 0xF8FF)


@dataclass(frozen=True, kw_only=True)
class Disguise:
    """Marks control strings inside content, so that they survive the template without being taken for its own."""

    pattern: re.Pattern[str]
    marker: str
    """One private-use character that no content holds."""

    def hide(self, content: str) -> str:
        """Content with the marker inside every control string."""
        return self.pattern.sub(lambda found: found[0][0] + self.marker + found[0][1:], content)

    def reveal(self, text: str) -> str:
        """The text as it was."""
        return text.replace(self.marker, "")


class PieceEncoder:
    """Encodes text that a chat template rendered, cut at the template's control tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._control = {token.content: index for index, token in added if token.special}
        longest_first = sorted(self._control, key=len, reverse=True)
        # A tokenizer without control tokens needs a pattern that never matches.
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._anchor = self._first_piece_anchor()
        self._anchor_after_control = "" if self._sets_a_blank_after_controls() else self._anchor

    def disguise(self, contents: Iterable[str]) -> Disguise:
        """A disguise whose marker occurs in none of the contents."""
        used = set().union(*contents)
        free = next((chr(code) for code in _PRIVATE_USE if chr(code) not in used), None)
        if free is None:
            raise TemplateError("the content uses every private-use character; it cannot be rendered safely")
        return Disguise(pattern=self._pattern, marker=free)

    def encode(self, text: str, disguise: Disguise) -> list[int]:
        """Ids of rendered text; nothing is added, BOS comes only from the template."""
        ids: list[int] = []
        end, anchor = 0, self._anchor
        for control in self._pattern.finditer(text):
            ids += self._plain(disguise.reveal(text[end : control.start()]), anchor)
            ids.append(self._control[control[0]])
            end, anchor = control.end(), self._anchor_after_control
        return ids + self._plain(disguise.reveal(text[end:]), anchor)

    def _plain(self, text: str, anchor: str) -> list[int]:
        """Ids of text in which nothing is a control token, as they are after ``anchor``."""
        if not text:
            return []
        before = self._split(anchor)["input_ids"] if anchor else []
        return list(self._split(anchor + text)["input_ids"][len(before) :])

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Character range of each token of plain text."""
        return list(self._split(text, return_offsets_mapping=True)["offset_mapping"])

    def _split(self, text: str, **options: Any) -> Any:
        return self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False, **options
        )

    def _first_piece_anchor(self) -> str:
        """Text set before a piece where the tokenizer would put a blank before the first word of any input.

        SentencePiece tokenizers do that; a line feed never merges with what follows there, so it is encoded in
        front and its ids are dropped.
        """
        tokens = self._tokenizer.convert_ids_to_tokens(self._split("a")["input_ids"])
        return "\n" if tokens and tokens[0].startswith("▁") else ""

    def _sets_a_blank_after_controls(self) -> bool:
        """Whether a word right after a control token gets that blank too, as older conversions do."""
        if not self._anchor or not self._control:
            return False
        control, index = next(iter(self._control.items()))
        ids = self._tokenizer(f"{control}a", add_special_tokens=False)["input_ids"]
        return ids[0] == index and str(self._tokenizer.convert_ids_to_tokens(ids[1])).startswith("▁")
