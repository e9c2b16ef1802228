"""Progress as lines of text, for logs of jobs: one when a phase begins, then one every so often."""

import sys
import time
from collections.abc import Callable

LINE_EVERY_S = 10.0
"""Seconds between two lines of one phase, where nothing else is asked for."""


class Lines:
    """Writes to stderr."""

    def __init__(self, every_s: float = LINE_EVERY_S) -> None:
        """Seconds between two lines of one phase."""
        self._every_s = every_s
        self._phase: str | None = None
        self._last_s = 0.0

    def say(self, phase: str, line: Callable[[], str], *, last: bool = False) -> None:
        """Write the line where it is time for one, or it is the last of its phase."""
        now_s = time.monotonic()
        if phase == self._phase and now_s - self._last_s < self._every_s and not last:
            return
        self._phase, self._last_s = phase, now_s
        sys.stderr.write(line() + "\n")
        sys.stderr.flush()


def time_to_go(began_s: float, *, made: int, left: int) -> str:
    """What is left at the pace so far, ``began_s`` of the monotonic clock; ``made`` is 1 or more."""
    return f"{duration((time.monotonic() - began_s) / made * left)} to go"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
