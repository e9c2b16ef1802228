"""What a command says when Ctrl-C or SIGTERM ends it."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def when_interrupted(advice: str) -> Iterator[None]:
    """Inside, an interruption ends the command with ``interrupted; advice``."""
    try:
        yield
    except KeyboardInterrupt:
        # Typer makes an exit code of a KeyboardInterrupt, but leaves this one to us with what it says.
        raise typer.Abort(f"interrupted; {advice}") from None
