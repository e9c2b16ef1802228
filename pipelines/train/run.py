"""The training job: in this process, or on Ray Train workers.

python -m pipelines.train --config FILE.yaml key=value ...
"""

from typing import Any

from c2kv_core.errors import TrainingError
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
    train_worker(config, World(), progress=progress)
    report: dict[str, Any] | None = RunFolder(config).get_json(REPORT)
    if report is None:
        raise TrainingError("the run ended without a report; this is a fault of the job")
    return report
