"""A run on Ray Train: workers, their replacement when lost, and what the driver shows meanwhile."""

import logging
import os
import signal
import tempfile
import threading
import time
from dataclasses import replace
from typing import Any

from c2kv_core.errors import C2KVError, NonFiniteLossError, TrainingError
from pipelines.ray_session import MIN_LOGICAL_CPUS, ray_session
from pipelines.train.config import TrainConfig
from pipelines.train.folder import PROGRESS, STOPPED, RunFolder
from pipelines.train.ingest import is_taken_in, take_in
from pipelines.train.loop import train_worker
from pipelines.train.progress import (
    READING,
    STARTING_RAY,
    TRAINING,
    WRITING,
    OnProgress,
    Progress,
    tell_phase,
)
from pipelines.train.shard import shard_base
from pipelines.train.trainer import StepRecord
from pipelines.train.world import ProcessGroup

POLL_S = 1.0
"""Seconds between looks at the progress that the leading worker writes."""


def train_on_ray(config: TrainConfig, *, owner: str, progress: OnProgress | None) -> None:
    """Train on ``config.num_workers`` workers; lost ones are replaced ``max_failures`` times.

    Raises:
        C2KVError: what a worker raised, or that too many workers were lost.
    """
    folder = RunFolder(config)
    with folder.writing():
        for name in (STOPPED, PROGRESS):
            folder.storage.delete(name)
    cpus = int(config.num_workers * config.num_cpus_per_worker) + 1

    tell_phase(progress, STARTING_RAY, steps=config.steps)
    with ray_session(num_cpus=max(MIN_LOGICAL_CPUS, cpus)):
        _check_resources(config)
        if not is_taken_in(folder):
            tell_phase(progress, READING, steps=config.steps)
            take_in(config, folder, on_ray=True)
        with _Follow(folder, progress):
            _fit(config, owner)
    stopped = folder.get_json(STOPPED)
    if stopped is not None:
        raise NonFiniteLossError(stopped["message"])


def _fit(config: TrainConfig, owner: str) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

    logging.getLogger("ray.train").setLevel(logging.ERROR)
    resources = {"CPU": config.num_cpus_per_worker}
    if config.num_gpus_per_worker:
        resources["GPU"] = config.num_gpus_per_worker
    gpu = config.num_gpus_per_worker > 0
    trainer = TorchTrainer(
        _work,
        train_loop_config={"config": config.model_dump(mode="json"), "owner": owner},
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=config.num_workers, use_gpu=gpu, resources_per_worker=resources
        ),
        # Ray keeps no checkpoints of ours; its own notes stand beside them where that is a directory.
        run_config=RunConfig(
            name="train",
            storage_path=_notes_path(config),
            failure_config=FailureConfig(max_failures=config.max_failures),
        ),
    )
    interrupts = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit()
    except SystemExit:
        # Ray's handler of Ctrl-C stops the workers in order, but then says that all went well.
        raise KeyboardInterrupt from None
    except WorkerGroupError as error:
        raise _worker_fault(error.worker_failures) from error
    except TrainingFailedError as error:
        raise TrainingError(f"the run stopped: {_last_line(error)}; run the same command to go on") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupts)


def _notes_path(config: TrainConfig) -> str:
    uri = RunFolder(config).storage.uri
    return tempfile.mkdtemp(prefix="c2kv-ray-train-") if "://" in uri else f"{uri}/ray"


def _work(settings: dict[str, Any]) -> None:
    """What every Ray Train worker runs."""
    import ray.train.torch

    config = TrainConfig.model_validate(settings["config"])
    device = ray.train.torch.get_device()
    world = ProcessGroup(device)
    try:
        train_worker(
            config,
            world,
            owner=settings["owner"],
            device=device,
            shard=shard_base if config.shard_base else None,
            progress=_ProgressFile(RunFolder(config)),
        )
    except NonFiniteLossError as error:
        # All workers see the same loss and end here. Raising would make Ray try the same rows again.
        if world.leads:
            RunFolder(config).put_json(STOPPED, {"message": str(error)})


def _worker_fault(failures: dict[int, Any]) -> C2KVError:
    for _, failure in sorted(failures.items()):
        cause: Any = failure
        while cause is not None:
            if isinstance(cause, C2KVError):
                return cause
            cause = getattr(cause, "cause", None) or cause.__cause__
    rank, first = min(failures.items())
    return TrainingError(
        f"worker {rank} stopped: {_last_line(first)}; the run goes on from its last checkpoint with the same command"
    )


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def _check_resources(config: TrainConfig) -> None:
    """Workers must fit, or Ray Train would wait for ever."""
    import ray

    have = ray.cluster_resources()  # type: ignore[no-untyped-call]
    for name, each in (("CPU", config.num_cpus_per_worker), ("GPU", config.num_gpus_per_worker)):
        need = config.num_workers * each
        if need > have.get(name, 0.0):
            raise TrainingError(
                f"{config.num_workers} workers need {need:g} {name}, the cluster has {have.get(name, 0.0):g}; "
                f"lower num_workers or num_{name.lower()}s_per_worker"
            )


class _ProgressFile:
    """Writes the leader's progress into the run folder, at most once in ``POLL_S``."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._last = folder, 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        in_between = progress.record is not None and progress.step < progress.steps
        if in_between and now - self._last < POLL_S:
            return
        self._last = now
        record = vars(progress.record) if progress.record else None
        self._folder.put_json(PROGRESS, {**vars(progress), "record": record, "process": os.getpid()})


class _Follow:
    """Reads the leader's progress in a thread and passes it on."""

    def __init__(self, folder: RunFolder, progress: OnProgress | None) -> None:
        self._folder, self._progress = folder, progress
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> None:
        if self._progress is not None:
            self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._progress is not None:
            self._thread.join()

    def _loop(self) -> None:
        seen = ("", 0)
        while not self._ended.wait(POLL_S):
            seen = self._look(seen)
        # The last steps may have come since.
        self._look(seen)

    def _look(self, seen: tuple[str, int]) -> tuple[str, int]:
        """Pass on what is new; gives the phase and step that were seen last."""
        assert self._progress is not None, "started only then"
        found = self._folder.get_json(PROGRESS)
        if found is not None and (found["phase"], found["step"]) != seen:
            seen = found["phase"], found["step"]
            record = StepRecord(**found["record"]) if found["record"] else None
            told = Progress(
                phase=found["phase"],
                step=found["step"],
                steps=found["steps"],
                record=record,
                best_score=found["best_score"],
            )
            if told.phase == WRITING and record is not None:
                # The last step may have been told and replaced between two looks.
                self._progress(replace(told, phase=TRAINING))
            self._progress(told)
        return seen
