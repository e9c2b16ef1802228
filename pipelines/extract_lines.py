"""Lines of an extraction's progress."""

from pipelines.extract import Progress
from pipelines.lines import Lines, duration


class ProgressLines:
    """Writes a line to stderr when a phase begins, and every so often within it."""

    def __init__(self, every_s: float) -> None:
        self._lines = Lines(every_s)

    def __call__(self, progress: Progress) -> None:
        self._lines.say(progress.phase, lambda: line_of(progress))


def line_of(progress: Progress) -> str:
    """One line: what is being done, and how far it is."""
    if not progress.done:
        counted = f" ({progress.pending:,} documents to extract)" if progress.pending else ""
        return f"{progress.phase}{counted} ..."
    speed = f", {progress.tokens_per_s:,.0f} tokens/s" if progress.tokens_per_s >= 0.5 else ""
    left = ""
    if progress.eta_s is not None and progress.done < progress.pending:
        left = f", {duration(progress.eta_s)} to go"
    counted = f"{progress.done:,} of {progress.pending:,} documents, {progress.failed:,} failed"
    return f"{progress.phase}: {counted}{speed}{left}"
