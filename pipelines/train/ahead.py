"""The next step's rows, drawn and tokenised while this step computes: a GPU does not wait for a tokenizer."""

from concurrent.futures import Future, ThreadPoolExecutor

from pipelines.train.stream import RowStream, StepRows


class RowsAhead:
    """Rows of steps asked for in order; one step is prepared ahead, in a thread of its own."""

    def __init__(self, stream: RowStream, *, rank: int, world: int, last_step: int) -> None:
        self._stream, self._rank, self._world, self._last = stream, rank, world, last_step
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="c2kv-rows")
        self._next: tuple[int, Future[StepRows]] | None = None

    def take(self, step: int) -> StepRows:
        """Rows of a step (from 1): what ``RowStream.step`` gives, and what it raises."""
        prepared, self._next = self._next, None
        if prepared is None or prepared[0] != step:
            prepared = (step, self._begin(step))
        rows = prepared[1].result()
        if step < self._last:
            self._next = (step + 1, self._begin(step + 1))
        return rows

    def _begin(self, step: int) -> "Future[StepRows]":
        return self._pool.submit(self._stream.step, step, rank=self._rank, world=self._world)
