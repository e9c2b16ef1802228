"""The training job: in this process, or on Ray Train workers.

python -m pipelines.train --config FILE.yaml key=value ...
"""

import uuid
from typing import Any

from c2kv_core.errors import TrainingError
from pipelines.train.attempts import Attempt
from pipelines.train.config import TrainConfig
from pipelines.train.folder import REPORT, RunFolder
from pipelines.train.loop import OnProgress, train_worker
from pipelines.train.world import World


def train(config: TrainConfig, *, progress: OnProgress | None = None) -> dict[str, Any]:
    """Train a sidecar, or go on where the run of this name stopped; a finished run is reported again.

    Raises:
        InputError: a subclass that says what is wrong with configuration, data, model or sidecar.
        TrainingError: the run cannot go on; what it has saved stays.
    """
    folder = RunFolder(config)
    folder.open()
    owner = uuid.uuid4().hex
    with folder.writing():
        Attempt.claim(folder.storage, owner=owner)
        folder.storage.delete(REPORT)
    if config.num_workers:
        # Imported late: a run in this process needs no Ray.
        from pipelines.train.ray_run import train_on_ray

        train_on_ray(config, owner=owner, progress=progress)
    else:
        train_worker(config, World(), owner=owner, progress=progress)
    report: dict[str, Any] | None = folder.get_json(REPORT)
    if report is None:
        raise TrainingError("the run ended without a report; this is a fault of the job")
    return report
