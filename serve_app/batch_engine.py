"""An engine of one worker thread: answers are decoded together, a token each a round, and join and leave between.

A round is: give free places away, let one request that is still being prepared do one bounded piece of model work
(compress a part, place documents), then one step in one batch: a token of every answer that has begun, and of questions
that are to be read 512 tokens at most, for the weights are read only once for both. So a long preparation holds the
others up by one piece at a time, and none waits for another's end.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from c2kv_core.compose import PREFILL_CHUNK_TOKENS
from c2kv_core.errors import C2KVError
from serve_app.engine import EngineStats
from serve_app.errors import (
    INTERNAL,
    ApiError,
    Fault,
    bad_request,
    deadline_exceeded,
    fault_of,
    overloaded,
    unavailable,
)
from serve_app.jobs import LAST, Event, Failed, Step, Turns, Work
from serve_app.places import Limits, Places

logger = logging.getLogger(__name__)

MODEL_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, MemoryError)
"""What libraries raise over one request (no memory, a bad shape). Anything else ends the worker, and so the replica."""

FAILED_IN_ROW = 8
"""Steps of single answers that fail one after the other before it is no answer's fault: after an error of its own a
device fails all."""
_REPLACEMENT_S = 10
"""Seconds in which Serve replaces a replica, about; clients are told to wait that long."""

_Outcome = Literal["finished", "failed", "cancelled"]


@dataclass(eq=False, kw_only=True)
class _Request:
    """A submitted job; also its ticket."""

    job: Work
    size_bytes: int
    turns: Turns | None
    """None at the end, so that whoever keeps the ticket keeps no memory."""
    deliver: Callable[[Event], None]
    forget: Callable[["_Request"], None]
    step: Step | None = None
    """What it waits for; None while it is being prepared."""
    cancelled: bool = False

    def cancel(self) -> None:
        """See ``Ticket``."""
        self.cancelled = True
        self.forget(self)


class BatchEngine:
    """Implements ``Engine`` by continuous batching."""

    def __init__(
        self,
        turns: Callable[[Work], Turns],
        step: Callable[[Sequence[Step]], Tensor],
        size_bytes: Callable[[Work], int],
        *,
        limits: Limits,
        stall_timeout_s: float,
        retry_after_s: int,
        on_batch: Callable[[int], None] | None = None,
        begin: Callable[[], None] | None = None,
    ) -> None:
        """Start the worker thread.

        Args:
            turns: begins an answer; its turns run on the worker thread only.
            step: logits (B, V) of B answers, on the worker thread only.
            size_bytes: memory that a job's answer holds at most.
            limits: who may run and wait.
            stall_timeout_s: seconds after which one unfinished piece of work counts as a fault.
            retry_after_s: seconds that refused clients are told to wait.
            on_batch: is told how many answers each decode step served, on the worker thread.
            begin: is called on the worker thread before all else.
        """
        self._turns = turns
        self._step = step
        self._size_bytes = size_bytes
        self._limits = limits
        self._stall_timeout_s = stall_timeout_s
        self._retry_after_s = retry_after_s
        self._on_batch = on_batch or (lambda answers: None)
        self._begin = begin or (lambda: None)
        self._changed = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._places = Places(limits)
        self._outcomes: Counter[_Outcome] = Counter()
        self._closed = False
        self._busy_since_s: float | None = None
        self._failed_in_row = 0
        self._thread = threading.Thread(target=self._work, name="c2kv-engine", daemon=True)
        self._thread.start()

    # ---- any thread

    def submit(self, job: Work, deliver: Callable[[Event], None]) -> _Request:
        """See ``Engine``."""
        size_bytes = self._size_bytes(job)
        if size_bytes > self._limits.max_running_bytes:
            raise bad_request(
                f"the context needs {size_bytes / 2**20:,.0f} MiB, this server has "
                f"{self._limits.max_running_bytes / 2**20:,.0f} for all that it runs; use fewer or shorter documents",
                code="context_length_exceeded",
                param="messages",
            )
        request = _Request(
            job=job, size_bytes=size_bytes, turns=self._turns(job), deliver=deliver, forget=self._forget
        )
        with self._changed:
            if self._closed or not self._thread.is_alive():
                raise unavailable("this replica is stopping; try again", retry_after_s=self._retry_after_s)
            held = len(self._running) + len(self._waiting)
            if held >= self._limits.max_running + self._limits.max_waiting:
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
                running_bytes=self._places.used_bytes,
                finished=self._outcomes["finished"],
                failed=self._outcomes["failed"],
                cancelled=self._outcomes["cancelled"],
            )

    def fault(self) -> str | None:
        """See ``Engine``."""
        if not self._thread.is_alive():
            return "the worker thread has ended"
        if self._failed_in_row >= FAILED_IN_ROW:
            return f"the last {self._failed_in_row} steps failed, each over another answer"
        since_s = self._busy_since_s
        if since_s is None:
            return None
        elapsed_s = time.monotonic() - since_s
        if elapsed_s > self._stall_timeout_s:
            limit = f"stall_timeout_s ({self._stall_timeout_s:.0f})"
            return f"one piece of work has taken {elapsed_s:.0f} s, more than {limit}"
        return None

    def close(self) -> None:
        """See ``Engine``."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _forget(self, request: _Request) -> None:
        """Drop a cancelled request that waits; a running one is dropped in the next round."""
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)
                self._outcomes["cancelled"] += 1
                request.turns = None
            self._changed.notify()

    # ---- worker thread

    def _work(self) -> None:
        try:
            self._begin()
            while self._admit():
                self._drop_lost()
                preparing = next((request for request in self._running if request.step is None), None)
                if preparing is not None:
                    with self._changed:
                        # To the end of the line: others that are being prepared come first next time.
                        self._running.remove(preparing)
                        self._running.append(preparing)
                    self._go_on(preparing, None)
                self._decode(self._batch())
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
            # In order: a large request at the head waits for room, and is not overtaken for ever.
            while self._waiting and self._places.take(self._waiting[0].size_bytes):
                self._running.append(self._waiting.popleft())
            return True

    def _drop_lost(self) -> None:
        for request in list(self._running):
            if request.cancelled:
                self._retire(request, "cancelled")
            elif _is_late(request):
                self._retire(request, "failed", deadline_exceeded("the answer was being made").fault)

    def _batch(self) -> list[_Request]:
        """Whose step is taken now: all that decode, and readers of questions while they fit into one piece of work."""
        decoding = [r for r in self._running if r.step is not None and len(r.step.ids) == 1]
        reading: list[_Request] = []
        tokens = 0
        for request in self._running:
            if request.step is None or len(request.step.ids) == 1:
                continue
            tokens += len(request.step.ids)
            if reading and tokens > PREFILL_CHUNK_TOKENS:
                break
            reading.append(request)
        with self._changed:
            for request in reading:  # to the end of the line, so that a long question lets others read
                self._running.remove(request)
                self._running.append(request)
        return decoding + reading

    def _decode(self, requests: Sequence[_Request]) -> None:
        """One step of each of these answers."""
        steps = [request.step for request in requests if request.step is not None]
        if not steps:
            return
        self._busy_since_s = time.monotonic()
        try:
            logits_BV = self._step(steps)
        except MODEL_FAILURES:
            if len(requests) == 1:
                logger.exception("an answer failed")
                self._failed_in_row += 1
                self._retire(requests[0], "failed", INTERNAL)
                return
            # One may have spoilt it for all; alone, only that one fails.
            logger.exception("a batch of %d failed; its answers are tried one by one", len(requests))
            for request in requests:
                self._decode([request])
            return
        finally:
            self._busy_since_s = None
        self._failed_in_row = 0
        self._on_batch(len(steps))
        for request, logits_V in zip(requests, logits_BV, strict=True):
            self._go_on(request, logits_V)

    def _go_on(self, request: _Request, logits_V: Tensor | None) -> None:
        """Let a request work until it waits for a token, has done a piece of preparation, or has ended."""
        assert request.turns is not None, "running requests have turns"
        request.step = None
        self._busy_since_s = time.monotonic()
        try:
            told = request.turns.send(logits_V)
            while told is not None and not isinstance(told, (Step, *LAST)):
                request.deliver(told)
                told = request.turns.send(None)
        except ApiError as error:
            self._retire(request, "failed", error.fault)
        except C2KVError as error:
            self._retire(request, "failed", fault_of(error))
        except (*MODEL_FAILURES, StopIteration):  # the latter: turns that ended without a last event
            logger.exception("an answer failed")
            self._retire(request, "failed", INTERNAL)
        else:
            if told is None or isinstance(told, Step):
                request.step = told
            else:
                self._retire(request, "finished")
                request.deliver(told)
        finally:
            self._busy_since_s = None

    def _retire(self, request: _Request, outcome: _Outcome, fault: Fault | None = None) -> None:
        """Give a running request's place away."""
        with self._changed:
            self._running.remove(request)
            self._places.give_back(request.size_bytes)
            self._end(request, outcome, fault)

    def _end(self, request: _Request, outcome: _Outcome, fault: Fault | None = None) -> None:
        """Free a request's memory, count it and tell why it failed, if it did."""
        if request.turns is not None:
            request.turns.close()
        request.turns = request.step = None
        self._outcomes[outcome] += 1
        if fault is not None:
            request.deliver(Failed(fault=fault))

    def _fail_all(self) -> None:
        fault = unavailable("this replica has stopped; try again", retry_after_s=_REPLACEMENT_S).fault
        with self._changed:
            self._closed = True
            left = [*self._running, *self._waiting]
            for request in self._running:
                self._places.give_back(request.size_bytes)
            self._running.clear()
            self._waiting.clear()
            for request in left:
                self._end(request, "failed", fault)


def _is_late(request: _Request) -> bool:
    return time.monotonic() > request.job.deadline_s
