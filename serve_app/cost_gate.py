"""Whether a stored document is sooner had from the store or, once more, from its text.

A slow link can make reading slots take longer than computing them. What reads and compressions took is measured as they
happen; a document is expected to take what a line through the recent measurements says.
"""

import threading
import time

_FADE = 0.9
"""Weight of the past at each new measurement: the last ten or so count."""
_LEAST_MEASUREMENTS = 3
_LOOK_AGAIN_S = 10.0
"""Seconds after which one document is read though reading is slow: or nobody would see that it no longer is."""


class _Line:
    """Least squares of seconds over an amount, of measurements that fade."""

    def __init__(self) -> None:
        self.count = 0
        self._w = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, amount: float, taken_s: float) -> None:
        self.count += 1
        self._w, self._x, self._y = (_FADE * total for total in (self._w, self._x, self._y))
        self._xx, self._xy = _FADE * self._xx, _FADE * self._xy
        self._w += 1
        self._x += amount
        self._y += taken_s
        self._xx += amount * amount
        self._xy += amount * taken_s

    def at(self, amount: float) -> float:
        """Expected seconds."""
        spread = self._w * self._xx - self._x * self._x
        if spread > 1e-9 * self._w * self._xx:
            slope = (self._w * self._xy - self._x * self._y) / spread
            start_s = (self._y - slope * self._x) / self._w
            if slope >= 0 and start_s >= 0:
                return start_s + slope * amount
        # All of one size, or no line makes sense: in proportion.
        return amount * self._y / self._x if self._x else 0.0


class CostGate:
    """Learns what reads and compressions take. Safe to share between threads."""

    def __init__(self, *, factor: float) -> None:
        """Nothing is known at the start, and everything is read.

        Args:
            factor: how many times as long as making the slots anew reading them must be expected to take for a
                document to be made anew; 0 reads always.
        """
        self._factor = factor
        self._lock = threading.Lock()
        self._reading, self._making = _Line(), _Line()
        self._refused_s = float("-inf")
        """When reading was last let through, or first refused, by the monotonic clock."""
        self._refusing = False

    def has_read(self, size_bytes: int, taken_s: float) -> None:
        """Learn from a read of the store, verification included."""
        with self._lock:
            self._reading.add(size_bytes, taken_s)

    def has_made(self, tokens: int, taken_s: float) -> None:
        """Learn from a compression of ``tokens`` source tokens."""
        with self._lock:
            self._making.add(tokens, taken_s)

    def refusal(self, size_bytes: int, tokens: int) -> str | None:
        """Why a record of this size is better not read, in words; None when it is to be read."""
        with self._lock:
            if not self._factor or min(self._reading.count, self._making.count) < _LEAST_MEASUREMENTS:
                return None
            read_s, make_s = self._reading.at(size_bytes), self._making.at(tokens)
            now_s = time.monotonic()
            if read_s <= self._factor * make_s:
                self._refusing = False
                return None
            if self._refusing and now_s - self._refused_s >= _LOOK_AGAIN_S:
                self._refused_s = now_s
                return None
            if not self._refusing:
                self._refusing, self._refused_s = True, now_s
        return f"reading its slots was expected to take {read_s:.2f} s, making them {make_s:.2f} s"
