"""The training job: in this process, or on Ray Train workers.

python -m pipelines.train --config FILE.yaml key=value ...
"""

import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from pipelines.train.progress import READING, OnProgress, Progress
from pipelines.train.reading import check_files
from pipelines.train.world import World


def train(config: TrainConfig, *, progress: OnProgress | None = None) -> dict[str, Any]:
    """Train a sidecar, or go on where the run of this name stopped; a finished run is reported again.

    In this process SIGTERM, which machines get before they are taken away, ends the step and saves it, and ends the
    reading of data files at once; on Ray it ends the run at the newest checkpoint.

    Raises:
        KeyboardInterrupt: SIGTERM came.
        InputError: a subclass that says what is wrong with configuration, data, model or sidecar.
        TrainingError: the run cannot go on; what it has saved stays.
    """
    check_extras(config)
    folder = RunFolder(config)
    taken_in = is_taken_in(folder)
    if not taken_in:
        check_files(config)
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
        if progress is not None and not taken_in:
            progress(Progress(phase=READING, steps=config.steps))
        with sigterm_interrupts():
            take_in(config, folder)
        with _told_to_stop() as stop:
            train_worker(config, World(), owner=owner, progress=progress, stop=stop)
    report: dict[str, Any] | None = folder.get_json(REPORT)
    if report is None:
        raise TrainingError("the run ended without a report; this is a fault of the job")
    return report


@contextmanager
def _told_to_stop() -> Iterator[Callable[[], bool]]:
    """Inside, SIGTERM only makes what this gives true; outside the main thread, signals are not ours."""
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield told.is_set
        return

    def note(number: int, frame: FrameType | None) -> None:
        told.set()

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield told.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
