"""How far an evaluation is: told to whoever watches, and as lines for logs."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from pipelines.lines import Lines, time_to_go

LOADING = "loading the model"
ASKING = "evaluating"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What is being done, and after how many questions."""

    phase: str
    done: int = 0
    """Questions finished, by all methods."""
    total: int | None = None
    """None before the file is read."""


OnProgress = Callable[[Progress], None]


class EvalLines:
    """Writes a line to stderr when a phase begins, and every so often while questions are asked."""

    def __init__(self) -> None:
        self._lines = Lines()
        self._began_s = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if not progress.done:
            self._began_s = time.monotonic()
        last = progress.done > 0 and progress.done == progress.total
        self._lines.say(progress.phase, lambda: self._line(progress), last=last)

    def _line(self, progress: Progress) -> str:
        if progress.total is None:
            return f"{progress.phase} ..."
        line = f"{progress.phase}: {progress.done:,} of {progress.total:,} questions"
        if not 0 < progress.done < progress.total:
            return line
        left = progress.total - progress.done
        return f"{line}, {time_to_go(self._began_s, made=progress.done, left=left)}"
