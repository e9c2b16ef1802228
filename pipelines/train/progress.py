"""How far a run is: told to whoever watches, and as lines for logs."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from pipelines.lines import Lines, time_to_go
from pipelines.train.trainer import StepRecord

STARTING_RAY = "starting Ray"
READING = "reading the data files"
LOADING = "loading the model"
FITTING = "fitting the selection"
MEASURING = "measuring the start on held-out rows"
TRAINING = "training"
WRITING = "writing the result"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What is being done, and after how many steps."""

    phase: str
    steps: int
    """Of the whole run."""
    step: int = 0
    """Finished ones, as far as is known: 0 before training goes on."""
    record: StepRecord | None = None
    """Of the last step; None outside of training and at its start."""
    best_score: float | None = None
    """Best held-out loss so far."""

    @property
    def detail(self) -> str:
        """The last step's numbers; without them the phase."""
        if self.record is None:
            return self.phase
        speed = self.record.source_tokens / self.record.elapsed_s
        told = [f"loss {self.record.loss:.3f}", f"{speed:,.0f} tokens/s"]
        if self.record.mfu is not None:
            told.append(f"MFU {self.record.mfu:.0%}")
        if self.best_score is not None:
            told.append(f"best held-out {self.best_score:.3f}")
        return ", ".join(told)


OnProgress = Callable[[Progress], None]


def tell_phase(progress: OnProgress | None, phase: str, *, steps: int) -> None:
    """Say what begins, if anybody watches."""
    if progress is not None:
        progress(Progress(phase=phase, steps=steps))


class TrainingLines:
    """Writes a line to stderr when a phase begins, and every so often while steps are made."""

    def __init__(self) -> None:
        self._lines = Lines()
        self._first_step, self._began_s = 0, 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.record is None:
            self._first_step, self._began_s = progress.step, time.monotonic()
        last = progress.record is not None and progress.step == progress.steps
        self._lines.say(progress.phase, lambda: self._line(progress), last=last)

    def _line(self, progress: Progress) -> str:
        if progress.phase != TRAINING:
            return f"{progress.phase} ..."
        at = f"{TRAINING}: step {progress.step:,} of {progress.steps:,}"
        made, left = progress.step - self._first_step, progress.steps - progress.step
        if progress.record is None or not made:
            return at
        return f"{at}, {progress.detail}" + (
            f", {time_to_go(self._began_s, made=made, left=left)}" if left else ""
        )
