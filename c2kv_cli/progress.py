"""The progress bar of every command: on stderr, gone at the end, and none where that is not a terminal."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def progress_bar(doing: str) -> Progress:
    """A bar headed by what is being done; its tasks carry a field ``detail``, shown beside the counts."""
    console = Console(stderr=True)
    return Progress(
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        # A file would get an empty line instead of a bar.
        disable=not console.is_terminal,
    )
