"""Long documents in parts: cut at paragraph, else sentence, else token ends."""

import re
from bisect import bisect_left
from dataclasses import dataclass

from c2kv_core.errors import InputError
from c2kv_core.text.rendering import ChatRenderer

SPLITTER_VERSION = 1
"""Raised when the rules below change: it is part of the fingerprint."""

_PARAGRAPH_END = re.compile(r"\n\s*\n")
_BLANKS = re.compile(r"\s*")
_SENTENCE_END = re.compile(r"[.!?…؟][\"'”’)\]]*\s|[。！？][」』”）]*|[।॥]\s*")


def document_parts(renderer: ChatRenderer, title: str, text: str, *, max_part_tokens: int) -> list[list[int]]:
    """Token ids of each part of a document, in order; one part where it fits.

    A part holds at most ``max_part_tokens`` tokens, its turn and repeated title included. Nothing but blanks at the
    cuts is left out.

    Raises:
        InputError: the document has no text, or the limit leaves no room for text.
    """
    if not text.strip():
        raise InputError("the document has no text")
    whole = renderer.document_ids(title, text)
    if len(whole) <= max_part_tokens:
        return [whole]
    overhead = len(renderer.document_ids(title, "")) if title.strip() else 0
    if overhead > max_part_tokens // 2:
        # A title of that length is text like any other; repeating it would leave no room.
        title, text = "", f"{title}\n\n{text}"
    return _Splitter(renderer, title, text, max_part_tokens).parts()


@dataclass
class _Splitter:
    renderer: ChatRenderer
    title: str
    text: str
    max_part_tokens: int

    def __post_init__(self) -> None:
        offsets = self.renderer.offsets(self.text)
        self.starts = [start for start, _ in offsets]
        self.ends = [end for _, end in offsets]
        self.overhead = len(self.renderer.document_ids(self.title, "x"))

    def parts(self) -> list[list[int]]:
        made: list[list[int]] = []
        char = self._skip_blanks(0)
        while char < len(self.text):
            ids, end = self._next_part(char)
            made.append(ids)
            char = self._skip_blanks(end)
        return made

    def _skip_blanks(self, char: int) -> int:
        # A part that starts with blanks could hold nothing else.
        found = _BLANKS.match(self.text, char)
        return found.end() if found else char

    def _next_part(self, char: int) -> tuple[list[int], int]:
        """Ids of the part that starts at a character, and where the next starts."""
        budget = self.max_part_tokens - self.overhead
        while budget > 0:
            cut = self._cut(char, budget)
            ids = self.renderer.document_ids(self.title, self.text[char:cut])
            excess = len(ids) - self.max_part_tokens
            if excess <= 0:
                return ids, cut
            # A cut can tokenise a little longer than its share of the whole.
            budget -= excess
        raise InputError(
            f"max_part_tokens {self.max_part_tokens} leaves no room for text beside the turn and title "
            f"({self.overhead} tokens); raise it"
        )

    def _cut(self, char: int, budget: int) -> int:
        first = bisect_left(self.starts, char)
        last = first + budget
        if last >= len(self.ends):
            return len(self.text)
        end = max(self.ends[last - 1], char + 1)
        # An early cut makes a short part: only the second half of the window is searched.
        middle = char + (end - char) // 2
        for pattern in (_PARAGRAPH_END, _SENTENCE_END):
            ends = [found.end() for found in pattern.finditer(self.text, middle, end)]
            if ends:
                return ends[-1]
        return end
