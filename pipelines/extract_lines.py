"""Progress as lines of text, for logs of jobs."""

import sys
import time

from pipelines.extract import Progress


class ProgressLines:
    """Writes a line to stderr when a phase begins, and every so often within it."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._phase: str | None = None
        self._last_s = 0.0

    def __call__(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if progress.phase == self._phase and now_s - self._last_s < self._every_s:
            return
        self._phase, self._last_s = progress.phase, now_s
        sys.stderr.write(line_of(progress) + "\n")
        sys.stderr.flush()


def line_of(progress: Progress) -> str:
    """One line: what is being done, and how far it is."""
    if not progress.done:
        counted = f" ({progress.pending:,} documents to extract)" if progress.pending else ""
        return f"{progress.phase}{counted} ..."
    speed = f", {progress.tokens_per_s:,.0f} tokens/s" if progress.tokens_per_s >= 0.5 else ""
    left = ""
    if progress.eta_s is not None and progress.done < progress.pending:
        left = f", {_duration(progress.eta_s)} to go"
    counted = f"{progress.done:,} of {progress.pending:,} documents, {progress.failed:,} failed"
    return f"{progress.phase}: {counted}{speed}{left}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
