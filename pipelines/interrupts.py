"""SIGTERM, which machines and clusters send before they take a process away, ends a job as Ctrl-C does."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt; outside the main thread, signals are not ours."""
    before = signal.getsignal(signal.SIGTERM)
    take_sigterm()
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def take_sigterm() -> None:
    """Again, where a library has put its own handler in place: Ray does so when it starts."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
