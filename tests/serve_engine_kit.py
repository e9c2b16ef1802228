"""What the engine's tests share: an engine over plain generators, and inboxes for its events.

Where a real model adds nothing, turns are plain generators.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from c2kv_core.sampling import SamplingParams
from serve_app.batch_engine import BatchEngine
from serve_app.jobs import LAST, Event, Finished, Job, Step, Turns
from serve_app.places import Limits

DONE = Finished(reason="stop", completion_tokens=1)


def echo(steps: Sequence[Step]) -> Tensor:
    """Logits that say which token was sent."""
    return torch.tensor([[float(step.ids[-1])] for step in steps])


def job(name: str = "", *, allowed_s: float = 600.0, size: int = 1) -> Job:
    """A job whose only content is a name, carried in its stop strings, and a size."""
    return Job(
        fingerprint="",
        namespace="",
        prefix_ids=(),
        documents=(),
        question_ids=(1,),
        max_new_tokens=size,
        sampling=SamplingParams(),
        stop=(name,),
        deadline_s=time.monotonic() + allowed_s,
    )


class Inbox:
    """Gathers one job's events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, LAST):
            self.ended.set()

    def wait(self) -> list[Event]:
        assert self.ended.wait(60), "no end came"
        return self.events


@pytest.fixture
def start() -> Iterator[Callable[..., BatchEngine]]:
    engines: list[BatchEngine] = []

    def make(
        turns: Callable[[Job], Turns],
        step: Callable[[Sequence[Step]], Tensor] = echo,
        **changes: float,
    ) -> BatchEngine:
        settings = {"max_running": 2, "max_waiting": 2, "stall_timeout_s": 60.0, **changes}
        limits = Limits(
            max_running=int(settings["max_running"]),
            max_running_bytes=int(settings.get("max_running_bytes", 100)),
            max_waiting=int(settings["max_waiting"]),
        )
        engines.append(
            BatchEngine(
                turns,
                step,
                lambda job: job.max_new_tokens,
                limits=limits,
                stall_timeout_s=settings["stall_timeout_s"],
                retry_after_s=3,
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


class Gate:
    """Turns that go on until the gate opens, then finish; knows who runs and who was freed."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.turns_taken: list[str] = []
        self.freed: list[str] = []

    def turns(self, job: Job) -> Turns:
        (name,) = job.stop
        return self._turns(name)

    def _turns(self, name: str) -> Turns:
        try:
            while not self.opened.is_set():
                self.turns_taken.append(name)
                time.sleep(0.001)
                yield None
            yield DONE
        finally:
            self.freed.append(name)
