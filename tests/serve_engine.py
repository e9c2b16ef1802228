"""The engine: places, memory, batches, cancelling, deadlines."""

import threading
from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

from c2kv_core.errors import ContextLengthError
from serve_app.batch_engine import FAILED_IN_ROW, BatchEngine
from serve_app.errors import ApiError
from serve_app.jobs import Failed, Job, Step, Text, Turns
from tests.serve_engine_kit import DONE, Gate, Inbox, echo, job
from tests.serve_support import wait_until

pytest_plugins = ["tests.serve_support", "tests.serve_engine_kit"]


def test_requests_that_are_being_prepared_take_turns(start: Callable[..., BatchEngine]) -> None:
    order: list[str] = []

    def turns(job: Job) -> Turns:
        for _ in range(3):
            order.append(job.stop[0])
            yield None
        yield DONE

    engine = start(turns, max_running=2)
    inboxes = [Inbox(), Inbox()]
    # Both must wait when the worker looks, so that neither has a turn ahead of the other.
    with engine._changed:
        for name, inbox in zip("ab", inboxes, strict=True):
            engine.submit(job(name), inbox)
    for inbox in inboxes:
        inbox.wait()
    assert order == list("ababab")


def counting(job: Job) -> Turns:
    """Three tokens, each the logit of the one before, after as many pieces of preparation as its name says."""
    for _ in range(int(job.stop[0] or 0)):
        yield None
    token = job.max_new_tokens
    for _ in range(3):
        logits = yield Step(decoder=None, ids=(token,))  # type: ignore[arg-type]
        assert logits is not None
        token = int(logits[0]) + 1
        yield Text(text=f"{token} ")
    yield DONE


def test_answers_that_have_begun_step_together(start: Callable[..., BatchEngine]) -> None:
    batches: list[list[int]] = []

    def step(steps: Sequence[Step]) -> Tensor:
        batches.append(sorted(step.ids[-1] for step in steps))
        return echo(steps)

    engine = start(counting, step)
    inboxes = [Inbox(), Inbox()]
    with engine._changed:  # both are there when the worker looks
        engine.submit(job("0", size=10), inboxes[0])
        engine.submit(job("2", size=20), inboxes[1])
    assert [inbox.wait() for inbox in inboxes] == [
        [*(Text(text=f"{n} ") for n in (11, 12, 13)), DONE],
        [*(Text(text=f"{n} ") for n in (21, 22, 23)), DONE],
    ]
    # The first goes on while the second is prepared; then one step serves both; the second ends alone.
    assert batches == [[10], [11], [12], [20], [21], [22]] or batches[-1] == [22]
    assert [10] in batches and len(batches) < 7


def test_questions_are_read_in_the_steps_of_others_up_to_a_bound(start: Callable[..., BatchEngine]) -> None:
    def reading(job: Job) -> Turns:
        """A question of chunks whose sizes its name gives, then tokens as many as its size says."""
        for size in map(int, job.stop[0].split()):
            yield Step(decoder=None, ids=(int(job.deadline_s),) * size)  # type: ignore[arg-type]
        for _ in range(job.max_new_tokens):
            yield Step(decoder=None, ids=(0,))  # type: ignore[arg-type]
        yield DONE

    batches: list[list[int]] = []

    def step(steps: Sequence[Step]) -> Tensor:
        batches.append([len(step.ids) for step in steps])
        return echo(steps)

    engine = start(reading, step, max_running=4)
    inboxes = [Inbox() for _ in range(4)]
    with engine._changed:  # all are there when the worker looks
        for name, size, inbox in zip(("2", "512 512 9", "40", "50"), (12, 1, 1, 1), inboxes, strict=True):
            engine.submit(job(name, size=size), inbox)
    for inbox in inboxes:
        assert inbox.wait() == [DONE]
    chunks = [[size for size in batch if size > 1] for batch in batches]
    assert all(sum(sizes) <= 512 for sizes in chunks)
    # The short questions do not wait for the end of the long one, and share a step with what fits.
    assert chunks[:4] == [[2], [512], [512], [40, 9, 50]]
    assert all(1 in batch for batch in batches[1:4])


def test_a_batch_that_fails_is_tried_one_by_one(start: Callable[..., BatchEngine]) -> None:
    def step(steps: Sequence[Step]) -> Tensor:
        if any(step.ids[-1] == 20 for step in steps):
            raise RuntimeError("out of memory")
        return echo(steps)

    engine = start(counting, step)
    good, bad = Inbox(), Inbox()
    with engine._changed:
        engine.submit(job("0", size=10), good)
        engine.submit(job("0", size=20), bad)
    assert isinstance(bad.wait()[-1], Failed)
    assert good.wait()[-1] == DONE
    assert (engine.stats().finished, engine.stats().failed, engine.stats().running_bytes) == (1, 1, 0)


def test_a_model_that_fails_every_answer_is_a_fault(start: Callable[..., BatchEngine]) -> None:
    broken = threading.Event()

    def step(steps: Sequence[Step]) -> Tensor:
        if broken.is_set():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return echo(steps)

    engine = start(counting, step)
    broken.set()
    for left in reversed(range(FAILED_IN_ROW)):
        assert engine.fault() is None
        inbox = Inbox()
        engine.submit(job("0"), inbox)
        assert isinstance(inbox.wait()[-1], Failed)
        if left == 1:  # one that succeeds shows that the model is well
            broken.clear()
            inbox = Inbox()
            engine.submit(job("0"), inbox)
            assert inbox.wait()[-1] == DONE
            broken.set()
    for _ in range(FAILED_IN_ROW - 1):
        assert engine.fault() is None
        inbox = Inbox()
        engine.submit(job("0"), inbox)
        inbox.wait()
    assert "8 steps failed" in (engine.fault() or "")


def test_requests_wait_until_their_memory_is_free(start: Callable[..., BatchEngine]) -> None:
    gate = Gate()
    engine = start(gate.turns, max_running=3, max_running_bytes=10)
    large, small, last = Inbox(), Inbox(), Inbox()
    engine.submit(job("large", size=8), large)
    engine.submit(job("small", size=5), small)
    ticket = engine.submit(job("tiny", size=1), last)  # would fit, and does not overtake
    wait_until(lambda: engine.stats().running == 1, what="a running request")
    assert (engine.stats().queued, engine.stats().running_bytes) == (2, 8)
    with pytest.raises(ApiError, match="the context needs") as refused:
        engine.submit(job("huge", size=11), Inbox())
    assert (refused.value.fault.status, refused.value.fault.code) == (400, "context_length_exceeded")
    gate.opened.set()
    for inbox in (large, small, last):
        assert inbox.wait() == [DONE]
    ticket.cancel()
    assert (engine.stats().running_bytes, engine.stats().finished) == (0, 3)


def test_no_more_run_than_there_are_places(start: Callable[..., BatchEngine]) -> None:
    gate = Gate()
    engine = start(gate.turns, max_running=2, max_waiting=2)
    inboxes = {name: Inbox() for name in "abcd"}
    for name, inbox in inboxes.items():
        engine.submit(job(name), inbox)
    wait_until(lambda: engine.stats().running == 2, what="two running requests")
    assert engine.stats().queued == 2
    assert set(gate.turns_taken) <= {"a", "b"}
    gate.opened.set()
    for inbox in inboxes.values():
        assert inbox.wait() == [DONE]
    assert (engine.stats().running, engine.stats().queued, engine.stats().finished) == (0, 0, 4)


def test_requests_beyond_all_places_are_refused(start: Callable[..., BatchEngine]) -> None:
    gate = Gate()
    engine = start(gate.turns, max_running=1, max_waiting=1)
    kept = [Inbox(), Inbox()]
    for inbox in kept:
        engine.submit(job(), inbox)
    with pytest.raises(ApiError) as refused:
        engine.submit(job(), Inbox())
    fault = refused.value.fault
    assert (fault.status, fault.code, fault.headers) == (503, "overloaded", {"Retry-After": "3"})
    gate.opened.set()
    for inbox in kept:
        inbox.wait()
    engine.submit(job(), Inbox())  # there is room again


def test_cancelled_request_is_freed_and_its_place_given_away(start: Callable[..., BatchEngine]) -> None:
    gate = Gate()
    engine = start(gate.turns, max_running=1)
    ticket, waiting = engine.submit(job("a"), Inbox()), Inbox()
    engine.submit(job("b"), waiting)
    wait_until(lambda: "a" in gate.turns_taken, what="the first turn")
    ticket.cancel()
    ticket.cancel()
    wait_until(lambda: "b" in gate.turns_taken, what="the other's first turn")
    assert gate.freed == ["a"]
    gate.opened.set()
    assert waiting.wait() == [DONE]
    stats = engine.stats()
    assert (stats.running, stats.queued, stats.finished, stats.cancelled) == (0, 0, 1, 1)


def test_cancelled_request_that_waits_is_gone_at_once(start: Callable[..., BatchEngine]) -> None:
    gate = Gate()
    engine = start(gate.turns, max_running=1)
    engine.submit(job("a"), Inbox())
    wait_until(lambda: engine.stats().running == 1, what="a running request")
    engine.submit(job("b"), Inbox()).cancel()
    assert (engine.stats().queued, engine.stats().cancelled) == (0, 1)
    assert "b" not in gate.turns_taken
    gate.opened.set()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextLengthError("too long"), 400, "context_length_exceeded"),
        (RuntimeError("out of memory"), 500, "internal_error"),
        (KeyError("x"), 500, "internal_error"),
    ],
)
def test_failure_of_one_request_ends_only_that(
    start: Callable[..., BatchEngine], error: Exception, status: int, code: str
) -> None:
    def turns(job: Job) -> Turns:
        yield None
        if job.stop == ("bad",):
            raise error
        yield DONE

    engine = start(turns)
    bad, good = Inbox(), Inbox()
    engine.submit(job("bad"), bad)
    engine.submit(job("good"), good)
    (failed,) = bad.wait()
    assert isinstance(failed, Failed)
    assert (failed.fault.status, failed.fault.code) == (status, code)
    assert good.wait() == [DONE]
    assert engine.fault() is None
    assert (engine.stats().running, engine.stats().failed) == (0, 1)


def test_failures_tell_clients_nothing_of_the_inside(start: Callable[..., BatchEngine]) -> None:
    def turns(job: Job) -> Turns:
        yield None
        raise RuntimeError("secret path")

    inbox = Inbox()
    start(turns).submit(job(), inbox)
    (failed,) = inbox.wait()
    assert isinstance(failed, Failed) and "secret" not in failed.fault.message


def test_turns_that_end_without_a_finish_fail(start: Callable[..., BatchEngine]) -> None:
    def half(job: Job) -> Turns:
        yield Text(text="half")

    inbox = Inbox()
    start(half).submit(job(), inbox)
    assert isinstance(inbox.wait()[-1], Failed)


def test_deadline_ends_running_and_waiting_requests(start: Callable[..., BatchEngine]) -> None:
    gate = Gate()
    engine = start(gate.turns, max_running=1)
    running, waiting = Inbox(), Inbox()
    engine.submit(job("a", allowed_s=0.2), running)
    engine.submit(job("b", allowed_s=0.1), waiting)
    for inbox in (running, waiting):
        (failed,) = inbox.wait()
        assert isinstance(failed, Failed) and failed.fault.status == 504
    assert (engine.stats().running, engine.stats().queued) == (0, 0)


def test_stuck_turn_is_a_fault(start: Callable[..., BatchEngine]) -> None:
    release = threading.Event()

    def turns(job: Job) -> Turns:
        release.wait()
        yield DONE

    engine = start(turns, stall_timeout_s=0.05)
    assert engine.fault() is None
    inbox = Inbox()
    engine.submit(job(), inbox)
    wait_until(lambda: engine.fault() is not None, what="the fault")
    assert "stall_timeout_s" in str(engine.fault())
    release.set()
    inbox.wait()
    wait_until(lambda: engine.fault() is None, what="recovery")
