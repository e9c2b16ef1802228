"""Answer ids back to text, as they come, with stop strings."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

_INCOMPLETE = "\ufffd"
"""What decoders give for bytes that are no character, or not yet."""


class TextStream:
    """Turns token ids into text that may be shown at once.

    Incomplete characters are held back, and so is text that may be the beginning of a stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._stop = [s for s in stop if s]
        self._window: list[int] = []
        self._complete = 0
        self._decoded = ""
        self._shown = 0
        self.stopped = False
        """True once a stop string was met; nothing more is shown."""

    def push(self, token: int) -> str:
        """Text that ``token`` completes; empty while it is held back."""
        if self.stopped:
            return ""
        self._window.append(token)
        new = self._new_text()
        if new and not new.endswith(_INCOMPLETE):
            self._decoded += new
            # Tokens decode differently at a start: the last complete ones stay as context.
            self._window = self._window[self._complete :]
            self._complete = len(self._window)
        return self._show(held=self._longest_partial_stop())

    def finish(self) -> str:
        """Whatever is still held back when the answer ends."""
        if self.stopped:
            return ""
        # Bytes that never became a character show as the decoder's replacement character, as in a whole decode.
        self._decoded += self._new_text()
        return self._show(held=0)

    @property
    def text(self) -> str:
        """All text shown so far."""
        return self._decoded[: self._shown]

    def _new_text(self) -> str:
        """Text of the window beyond its complete tokens, whose text is out already."""
        known = self._tokenizer.decode(self._window[: self._complete], skip_special_tokens=True)
        return str(self._tokenizer.decode(self._window, skip_special_tokens=True)[len(known) :])

    def _show(self, *, held: int) -> str:
        end = len(self._decoded) - held
        # A stop string can start no earlier than what is not shown yet.
        found = [at for s in self._stop if (at := self._decoded.find(s, self._shown)) >= 0]
        if found:
            self.stopped = True
            end = min(found)
        piece = self._decoded[self._shown : end]
        self._shown = max(end, self._shown)
        return piece

    def _longest_partial_stop(self) -> int:
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._decoded) - self._shown), 0, -1):
                if self._decoded.endswith(stop[:size]):
                    longest = max(longest, size)
                    break
        return longest
