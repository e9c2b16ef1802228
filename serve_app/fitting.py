"""Refusing text that no context can hold, before it is tokenised as a whole."""

import threading
from collections.abc import Sequence

from c2kv_core.errors import ContextLengthError
from c2kv_core.text import ChatRenderer
from serve_app.errors import ApiError, Fault

PIECE_CHARACTERS = 16_384
"""Text is measured in pieces of this length; others may encode in between. Less is not measured at all."""
_CERTAIN = 2
"""Cuts between pieces can add tokens, far fewer than this factor."""


class Fitting:
    """Measures long texts piece by piece. Safe to share between threads.

    All encoding of a replica goes through one lock, so a text of megabytes would hold up every other request for half
    a minute, only to be refused for its length in the end.
    """

    def __init__(self, renderer: ChatRenderer, *, positions: int, tokenizer_lock: threading.Lock) -> None:
        """Bind a tokenizer.

        Args:
            renderer: encodes.
            positions: that the model has.
            tokenizer_lock: held while encoding a piece.
        """
        self._renderer = renderer
        self._positions = positions
        self._tokenizer_lock = tokenizer_lock

    def check(self, *texts: str) -> None:
        """Refuse texts that together are certainly too long; the work this takes is bounded by the positions.

        Raises:
            ContextLengthError: names what the model has.
        """
        least = self._least_tokens(texts, self._positions)
        if least > self._positions:
            raise ContextLengthError(
                f"this model has {self._positions} positions; a text of {sum(map(len, texts))} characters has at least "
                f"{least} tokens; use fewer or shorter documents"
            )

    def check_document(self, *texts: str, max_tokens: int) -> None:
        """Refuse texts that together are certainly too long to be stored.

        Raises:
            ApiError: 413.
        """
        least = self._least_tokens(texts, max_tokens)
        if least > max_tokens:
            message = f"expected a document of at most {max_tokens} tokens, got at least {least}; divide it"
            raise ApiError(Fault(status=413, code="document_too_long", message=message, param="text"))

    def _least_tokens(self, texts: Sequence[str], limit: int) -> int:
        """Tokens that texts have at least; counted no further than is needed to know that they exceed a limit."""
        if len(texts) > limit:  # of messages, each takes a token at least
            return len(texts)
        if sum(map(len, texts)) <= PIECE_CHARACTERS:
            return 0
        tokens = 0
        for text in texts:
            for start in range(0, len(text), PIECE_CHARACTERS):
                with self._tokenizer_lock:
                    tokens += len(self._renderer.offsets(text[start : start + PIECE_CHARACTERS]))
                if tokens > _CERTAIN * limit:
                    return tokens // _CERTAIN
        return tokens // _CERTAIN
