"""The training job: in this process, or on Ray Train workers.

python -m pipelines.train --config FILE.yaml key=value ...
"""

import os
import signal
import threading
import uuid
from types import FrameType
from typing import Any

from c2kv_core.errors import TrainingError
from pipelines.interrupts import sigterm_interrupts
from pipelines.train.attempts import Attempt
from pipelines.train.config import TrainConfig
from pipelines.train.extras import check_extras
from pipelines.train.folder import REPORT, RunFolder
from pipelines.train.ingest import is_taken_in, take_in
from pipelines.train.loop import train_worker
from pipelines.train.progress import READING, TRAINING, OnProgress, Progress, tell_phase
from pipelines.train.reading import check_files
from pipelines.train.setup import load_start
from pipelines.train.world import World


def train(config: TrainConfig, *, progress: OnProgress | None = None) -> dict[str, Any]:
    """Train a sidecar, or go on where the run of this name stopped; a finished run is reported again.

    In this process Ctrl-C and SIGTERM, which machines get before they are taken away, end the step and save it, and end
    what comes before the first step at once, as a second one ends a step; on Ray they end the run at the newest
    checkpoint.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM came.
        InputError: a subclass that says what is wrong with configuration, data, model or sidecar.
        TrainingError: the run cannot go on; what it has saved stays.
    """
    check_extras(config)
    config = config.absolute()
    folder = RunFolder(config)
    taken_in = is_taken_in(folder)
    if not taken_in:
        check_files(config)
        if config.init_sidecar is not None:
            load_start(config, config.init_sidecar)
    folder.open()
    owner = uuid.uuid4().hex
    with folder.writing():
        Attempt.claim(folder.storage, owner=owner)
        folder.storage.delete(REPORT)
    if config.num_workers:
        # Imported late: a run in this process needs no Ray.
        from pipelines.train.ray_run import train_on_ray

        with sigterm_interrupts():
            train_on_ray(config, owner=owner, progress=progress)
    else:
        # Files can be long, and there is no step to finish: here SIGTERM ends it at once.
        if not taken_in:
            tell_phase(progress, READING, steps=config.steps)
        with sigterm_interrupts():
            take_in(config, folder)
        with _Stop(progress) as stop:
            train_worker(config, World(), owner=owner, progress=stop.follow, stop=stop.is_asked_for)
    report: dict[str, Any] | None = folder.get_json(REPORT)
    if report is None:
        raise TrainingError("the run ended without a report; this is a fault of the job")
    return report


class _Stop:
    """Inside, Ctrl-C and SIGTERM let the step that is made be finished and saved; outside the main thread, signals are
    not ours."""

    def __init__(self, progress: OnProgress | None) -> None:
        self._progress, self._phase, self._asked = progress, "", False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "_Stop":
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._note) for one in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def follow(self, progress: Progress) -> None:
        """Pass on how far the run is."""
        self._phase = progress.phase
        if self._progress is not None:
            self._progress(progress)

    def is_asked_for(self) -> bool:
        """Whether the run is to be left after this step."""
        return self._asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked or self._phase != TRAINING:
            raise KeyboardInterrupt
        self._asked = True
        if number == signal.SIGINT:
            # Not through sys.stderr, in which the signal may have come.
            os.write(2, b"finishing the step and saving it; Ctrl-C again stops at once\n")
