"""Who may run: a number of places and a number of bytes, given away in the order of arrival."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an engine holds at most."""

    max_running: int
    """Requests that run."""
    max_running_bytes: int
    """Keys and values of all that run, in bytes."""
    max_waiting: int
    """Further requests that wait; more are refused."""


class Places:
    """Counts what is given away. Not safe to share between threads: its owner holds a lock."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running = 0
        self.used_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Give a place to a request of this size, if there is one."""
        fits = self.used_bytes + size_bytes <= self.limits.max_running_bytes
        if self.running == self.limits.max_running or not fits:
            return False
        self.running += 1
        self.used_bytes += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """Take a place back."""
        self.running -= 1
        self.used_bytes -= size_bytes
