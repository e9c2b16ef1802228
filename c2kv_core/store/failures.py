"""Turns what libraries raise at run time into the project's own error."""

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from deltalake.exceptions import DeltaError

from c2kv_core.errors import StoreError

ARROW_ERRORS: tuple[type[BaseException], ...] = (pa.lib.ArrowException, OSError)
"""What pyarrow raises over bytes it cannot read."""


@contextmanager
def as_store_error(doing: str) -> Iterator[None]:
    """Run a block; I/O, Arrow and Delta errors leave it as one StoreError line.

    Args:
        doing: what the block does, as in "cannot <doing>: disk full".
    """
    try:
        yield
    except (pa.lib.ArrowException, DeltaError, OSError) as error:
        raise StoreError(f"cannot {doing}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """An error's message on one line, for errors of libraries that write several."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
