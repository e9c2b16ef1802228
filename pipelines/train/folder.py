"""The run folder: where a run's files are, and that its configuration stays the same when it goes on."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import yaml

from c2kv_core.config import parse_config, to_yaml
from c2kv_core.errors import ConfigError, TrainingError
from c2kv_core.store import open_storage
from c2kv_core.store.storage import Storage
from pipelines.train.config import TrainConfig

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
DEV = "dev.jsonl"
REPORT = "report.json"
PROGRESS = "progress.json"
STOPPED = "stopped.json"
SIDECAR = "sidecar"
CONTROL = "control"
CURVES = "curves.png"
TENSORBOARD = "tensorboard"

MAY_CHANGE = frozenset(
    {
        "data_dir",
        "output",
        "device",
        "num_workers",
        "shard_base",
        "num_cpus_per_worker",
        "num_gpus_per_worker",
        "threads_per_worker",
        "max_failures",
        "checkpoint_every_steps",
        "keep_checkpoints",
        "micro_batch_rows",
        "micro_batch_tokens",
        "gradient_checkpointing",
        "export_dtype",
        "tensorboard",
        "curves",
    }
)
"""Settings that a run may go on with when they differ: they decide where and how it computes, not what."""


class RunFolder:
    """Files of one run below the output directory."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.location = f"{config.output.rstrip('/')}/{config.run}"
        self.storage: Storage = open_storage(self.location)

    def open(self) -> None:
        """Start the run, or check that it is the one that stopped.

        Raises:
            ConfigError: the folder's run has another configuration.
            TrainingError: the folder cannot be written.
        """
        with writing(self.location):
            if self.storage.create(CONFIG, to_yaml(self.config).encode()):
                return
            saved = parse_config(
                TrainConfig,
                yaml.safe_load(bytes(self.storage.get(CONFIG))),
                source=f"{self.location}/{CONFIG}",
            )
        before, now = (config.absolute().model_dump(mode="json") for config in (saved, self.config))
        begun = any(self.storage.list_files("checkpoints/"))
        unless = "" if begun else f", or remove {self.location}, which holds no checkpoint"
        for name in now:
            if name not in MAY_CHANGE and before[name] != now[name]:
                raise ConfigError(
                    f"the run {self.config.run!r} in {self.config.output} has {name} {json.dumps(before[name])}, got "
                    f"{json.dumps(now[name])}; give the same to go on, or another run name to start anew{unless}"
                )

    def reading(self) -> AbstractContextManager[None]:
        """As ``writing``, where nothing is written.

        Raises:
            TrainingError: names the folder and the system's reason.
        """
        return _telling(
            f"cannot read the run folder {self.location}", "run the same command again when it can be reached"
        )

    def writing(self) -> AbstractContextManager[None]:
        """Failures of the file system within a ``with`` block as one line.

        Raises:
            TrainingError: names the folder and the system's reason.
        """
        return writing(self.location)

    def put_json(self, path: str, content: Any) -> None:
        """Write a readable JSON file, atomically."""
        with writing(self.location):
            self.storage.put(path, (json.dumps(content, indent=2) + "\n").encode())

    def get_json(self, path: str) -> Any:
        """What ``put_json`` wrote; None where there is nothing."""
        try:
            return json.loads(bytes(self.storage.get(path)))
        except FileNotFoundError:
            return None


def writing(location: str) -> AbstractContextManager[None]:
    """Failures of the file system as one line.

    Raises:
        TrainingError: names the folder and the system's reason.
    """
    return _telling(
        f"cannot write the run folder {location}",
        "make room or choose another output, then run the same command to go on from the last checkpoint",
    )


@contextmanager
def _telling(failure: str, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(f"{failure}: {error.strerror or error}; {advice}") from error


__all__ = ["MAY_CHANGE", "RunFolder", "writing"]
