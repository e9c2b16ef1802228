"""Fencing: every start of a run's workers is an attempt with a number, and only the latest may commit.

``attempts/<n>.claim`` takes the number (created once, by whoever comes first). ``attempts/<n>.json`` then lists the
complete checkpoints that the attempt found. A checkpoint of an earlier attempt that is not on that list was committed
by a process that had been replaced already: it is never resumed from, however it got there.
"""

import json
import re
import time
from collections.abc import Iterable

from c2kv_core.errors import StaleAttemptError
from c2kv_core.store.storage import Storage

_CLAIM = re.compile(r"attempts/(\d{6})\.claim$")
_LIST = re.compile(r"attempts/(\d{6})\.json$")


class Attempt:
    """One claimed number."""

    def __init__(self, storage: Storage, number: int) -> None:
        self._storage, self.number = storage, number

    @classmethod
    def claim(cls, storage: Storage) -> "Attempt":
        """Take the next number; earlier attempts are stale from now on."""
        number = latest(storage) + 1
        note = json.dumps({"claimed_at_s": time.time()}).encode()
        while not storage.create(f"attempts/{number:06d}.claim", note):
            number += 1
        return cls(storage, number)

    def require_latest(self) -> None:
        """Refuse to go on once a later attempt has claimed the run.

        Raises:
            StaleAttemptError: names both numbers.
        """
        newest = latest(self._storage)
        if newest > self.number:
            raise StaleAttemptError(
                f"attempt {self.number} at this run was replaced by attempt {newest}; it commits nothing more"
            )

    def record(self, checkpoints: Iterable[str]) -> None:
        """Write down the complete checkpoints found after claiming."""
        content = json.dumps({"checkpoints": sorted(checkpoints)}).encode()
        self._storage.put(f"attempts/{self.number:06d}.json", content)


def latest(storage: Storage) -> int:
    """Highest claimed number; 0 where there is none."""
    found = (_CLAIM.search(file.path) for file in storage.list_files("attempts/"))
    return max((int(match[1]) for match in found if match), default=0)


def trusted(storage: Storage, checkpoints: dict[str, int]) -> set[str]:
    """Of complete checkpoints, given with their attempts, those that no later attempt has missed."""
    kept = set(checkpoints)
    for file in storage.list_files("attempts/"):
        match = _LIST.search(file.path)
        if match:
            listed = set(json.loads(bytes(storage.get(file.path)))["checkpoints"])
            kept -= {name for name in kept if checkpoints[name] < int(match[1]) and name not in listed}
    return kept
