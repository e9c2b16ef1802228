"""Fencing: every start of a run's workers is an attempt with a number, and only the latest may commit.

``attempts/<n>.claim`` takes the number (created once, by whoever comes first) and names its owner: the driver, whose
workers may claim again after they were replaced, but not once another driver has. ``attempts/<n>.json`` then lists the
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
    def claim(cls, storage: Storage, *, owner: str, renew: bool = False) -> "Attempt":
        """Take the next number; earlier attempts are stale from now on.

        Args:
            storage: of the run folder.
            owner: the driver that starts the attempt.
            renew: only go on as the owner of the latest attempt, as workers do that replace lost ones.

        Raises:
            StaleAttemptError: ``renew``, and another driver has taken over.
        """
        note = json.dumps({"owner": owner, "claimed_at_s": time.time()}).encode()
        while True:
            newest = latest(storage)
            if renew and newest and _owner(storage, newest) != owner:
                raise StaleAttemptError(
                    f"another driver has taken over this run with attempt {newest}; stop one of the two"
                )
            if storage.create(f"attempts/{newest + 1:06d}.claim", note):
                return cls(storage, newest + 1)

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

    def starts(self) -> int:
        """How often workers began or went on with the run; the driver's claim before theirs is none."""
        return sum(1 for file in self._storage.list_files("attempts/") if _LIST.search(file.path))


def latest(storage: Storage) -> int:
    """Highest claimed number; 0 where there is none."""
    found = (_CLAIM.search(file.path) for file in storage.list_files("attempts/"))
    return max((int(match[1]) for match in found if match), default=0)


def _owner(storage: Storage, number: int) -> str:
    return str(json.loads(bytes(storage.get(f"attempts/{number:06d}.claim")))["owner"])


def trusted(storage: Storage, checkpoints: dict[str, int]) -> set[str]:
    """Of complete checkpoints, given with their attempts, those that no later attempt has missed."""
    kept = set(checkpoints)
    for file in storage.list_files("attempts/"):
        match = _LIST.search(file.path)
        if match:
            listed = set(json.loads(bytes(storage.get(file.path)))["checkpoints"])
            kept -= {name for name in kept if checkpoints[name] < int(match[1]) and name not in listed}
    return kept
