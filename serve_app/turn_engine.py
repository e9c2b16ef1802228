"""An engine of one worker thread: running requests take turns, one bounded piece of model work each."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from c2kv_core.errors import C2KVError
from serve_app.engine import EngineStats
from serve_app.errors import INTERNAL, ApiError, Fault, deadline_exceeded, fault_of, overloaded, unavailable
from serve_app.jobs import Event, Failed, Finished, Job, Turns

logger = logging.getLogger(__name__)

MODEL_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, MemoryError)
"""What libraries raise over one request (no memory, a bad shape). Anything else ends the worker, and so the replica."""

_REPLACEMENT_S = 10
"""Seconds in which Serve replaces a replica, about; clients are told to wait that long."""

_Outcome = Literal["finished", "failed", "cancelled"]


@dataclass(eq=False, kw_only=True)
class _Request:
    """A submitted job; also its ticket."""

    job: Job
    turns: Turns
    """Replaced by an empty iterator at the end, so that whoever keeps the ticket keeps no memory."""
    deliver: Callable[[Event], None]
    forget: Callable[["_Request"], None]
    cancelled: bool = False

    def cancel(self) -> None:
        """See ``Ticket``."""
        self.cancelled = True
        self.forget(self)


class TurnEngine:
    """Implements ``Engine`` with round robin over at most ``max_running`` requests."""

    def __init__(
        self,
        turns: Callable[[Job], Turns],
        *,
        max_running: int,
        max_waiting: int,
        stall_timeout_s: float,
        retry_after_s: int,
    ) -> None:
        """Start the worker thread.

        Args:
            turns: begins an answer; its turns run on the worker thread only.
            max_running: requests that take turns.
            max_waiting: further requests that wait; more are refused.
            stall_timeout_s: seconds after which one unfinished turn counts as a fault.
            retry_after_s: seconds that refused clients are told to wait.
        """
        self._turns = turns
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._stall_timeout_s = stall_timeout_s
        self._retry_after_s = retry_after_s
        self._changed = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._outcomes: Counter[_Outcome] = Counter()
        self._closed = False
        self._turn_started_s: float | None = None
        self._thread = threading.Thread(target=self._work, name="c2kv-engine", daemon=True)
        self._thread.start()

    # ---- any thread

    def submit(self, job: Job, deliver: Callable[[Event], None]) -> _Request:
        """See ``Engine``."""
        request = _Request(job=job, turns=self._turns(job), deliver=deliver, forget=self._forget)
        with self._changed:
            if self._closed or not self._thread.is_alive():
                raise unavailable("this replica is stopping; try again", retry_after_s=self._retry_after_s)
            held = len(self._running) + len(self._waiting)
            if held >= self._max_running + self._max_waiting:
                raise overloaded(
                    f"{held} requests are running or waiting, all that this replica takes; try again later",
                    retry_after_s=self._retry_after_s,
                )
            self._waiting.append(request)
            self._changed.notify()
        return request

    def stats(self) -> EngineStats:
        """See ``Engine``."""
        with self._changed:
            return EngineStats(
                running=len(self._running),
                queued=len(self._waiting),
                finished=self._outcomes["finished"],
                failed=self._outcomes["failed"],
                cancelled=self._outcomes["cancelled"],
            )

    def fault(self) -> str | None:
        """See ``Engine``."""
        if not self._thread.is_alive():
            return "the worker thread has ended"
        started_s = self._turn_started_s
        if started_s is None:
            return None
        elapsed_s = time.monotonic() - started_s
        if elapsed_s > self._stall_timeout_s:
            return f"one turn has taken {elapsed_s:.0f} s, more than stall_timeout_s ({self._stall_timeout_s:.0f})"
        return None

    def close(self) -> None:
        """See ``Engine``."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _forget(self, request: _Request) -> None:
        """Drop a cancelled request that waits; a running one is dropped before its next turn."""
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)
                self._outcomes["cancelled"] += 1
                request.turns = iter(())
            self._changed.notify()

    # ---- worker thread

    def _work(self) -> None:
        try:
            while self._admit():
                for request in list(self._running):
                    self._take_turn(request)
        finally:
            self._fail_all()

    def _admit(self) -> bool:
        """Wait until there is something to do and give free places away; False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._running or self._waiting)
            if self._closed:
                return False
            for request in [r for r in self._waiting if _is_late(r)]:
                self._waiting.remove(request)
                self._end(request, "failed", deadline_exceeded("waiting for a place").fault)
            while self._waiting and len(self._running) < self._max_running:
                self._running.append(self._waiting.popleft())
            return True

    def _take_turn(self, request: _Request) -> None:
        if request.cancelled:
            self._retire(request, "cancelled")
            return
        self._turn_started_s = time.monotonic()
        try:
            if _is_late(request):
                raise deadline_exceeded("the answer was being made")
            event = next(request.turns)
        except ApiError as error:
            self._retire(request, "failed", error.fault)
        except C2KVError as error:
            self._retire(request, "failed", fault_of(error))
        except (*MODEL_FAILURES, StopIteration):  # the latter: turns that ended without ``Finished``
            logger.exception("an answer failed")
            self._retire(request, "failed", INTERNAL)
        else:
            if isinstance(event, Finished):
                self._retire(request, "finished")
            if event is not None:
                request.deliver(event)
        finally:
            self._turn_started_s = None

    def _retire(self, request: _Request, outcome: _Outcome, fault: Fault | None = None) -> None:
        """Give a running request's place away."""
        with self._changed:
            self._running.remove(request)
            self._end(request, outcome, fault)

    def _end(self, request: _Request, outcome: _Outcome, fault: Fault | None = None) -> None:
        """Free a request's memory, count it and tell why it failed, if it did."""
        request.turns = iter(())
        self._outcomes[outcome] += 1
        if fault is not None:
            request.deliver(Failed(fault=fault))

    def _fail_all(self) -> None:
        fault = unavailable("this replica has stopped; try again", retry_after_s=_REPLACEMENT_S).fault
        with self._changed:
            self._closed = True
            left = [*self._running, *self._waiting]
            self._running.clear()
            self._waiting.clear()
            for request in left:
                self._end(request, "failed", fault)


def _is_late(request: _Request) -> bool:
    return time.monotonic() > request.job.deadline_s
