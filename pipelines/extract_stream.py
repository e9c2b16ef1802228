"""The Ray Data part of a run: units from the readers through the actors, as they are finished, watched over."""

import queue
import threading
import time
import warnings
from collections.abc import Generator
from typing import Any

from c2kv_core.errors import C2KVError
from c2kv_core.store import Attempts
from pipelines.extract_config import ExtractConfig
from pipelines.extract_source import PendingDocuments, Reading
from pipelines.extract_stage import ExtractStage, StageSettings
from pipelines.plan import ExtractPlan
from pipelines.ray_data import quiet_datasets

READER_CPUS = 0.5
"""Logical CPUs of a task that reads the corpus."""
TICK_S = 0.5
"""How often the driver looks up while nothing comes."""
STOP_S = 30.0
"""How long a run that ends waits for Ray to stop what it began."""


class StalledError(C2KVError):
    """Nothing was finished for too long."""


def finished_units(
    config: ExtractConfig, plan: ExtractPlan, settings: StageSettings, attempts: Attempts
) -> Generator[dict[str, Any] | None, None, None]:
    """Rows of ``OUT_SCHEMA`` as they come, and None every ``TICK_S`` while none does.

    Raises:
        StalledError: none came for ``stall_timeout_s``; says what was being worked on.
        C2KVError: the cluster is too small, or the job stopped.
    """
    check_resources(config)
    arrived: queue.Queue[dict[str, Any] | BaseException | None] = queue.Queue(maxsize=8)
    stop = threading.Event()
    dataset = _dataset(config, plan, settings)
    executors = _executors_of(dataset)
    pump = threading.Thread(target=_pump, args=(dataset, arrived, stop), name="c2kv-units", daemon=True)
    pump.start()
    last_s = time.monotonic()
    try:
        while True:
            try:
                found = arrived.get(timeout=TICK_S)
            except queue.Empty:
                if time.monotonic() - last_s > config.stall_timeout_s:
                    raise StalledError(stall_diagnosis(config, attempts)) from None
                yield None
                continue
            if found is None:
                return
            if isinstance(found, BaseException):
                raise C2KVError(
                    f"the job stopped: {cause_of(found)}; what was published stays, run the same command again to go on"
                ) from found
            last_s = time.monotonic()
            yield found
    finally:
        stop.set()
        _end(executors, pump)


def _executors_of(dataset: Any) -> list[Any]:
    """What runs the dataset, when it does. Ray gives it a name only with the first row, and no public one."""
    made: list[Any] = []
    create = dataset._create_executor

    def remembered() -> Any:
        made.append(create())
        return made[-1]

    dataset._create_executor = remembered
    return made


def _end(executors: list[Any], pump: threading.Thread) -> None:
    """Stop the actors and the thread. One that still asks when Ray is stopped would start it anew, or crash."""
    until_s = time.monotonic() + STOP_S
    while pump.is_alive() and time.monotonic() < until_s:
        for executor in executors:
            executor.shutdown(force=True)
        pump.join(TICK_S)


def _pump(dataset: Any, arrived: "queue.Queue[Any]", stop: threading.Event) -> None:
    """Run the dataset in this thread. Ray has no iterator that gives up waiting."""
    from ray.data.exceptions import ExecutionTimeoutError
    from ray.exceptions import RayError

    def hand_over(value: Any) -> None:
        while not stop.is_set():
            try:
                arrived.put(value, timeout=TICK_S)
                return
            except queue.Full:
                continue

    try:
        for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            for row in batch.to_pylist():
                hand_over(row)
            if stop.is_set():
                return
    except (RayError, ExecutionTimeoutError, C2KVError) as error:
        hand_over(error)
    else:
        hand_over(None)


def _dataset(config: ExtractConfig, plan: ExtractPlan, settings: StageSettings) -> Any:
    import ray
    from ray.data import ActorPoolStrategy

    reading = Reading(
        columns=config.columns,
        limit=config.limit,
        shard_tokens=config.shard_tokens,
        max_documents=config.documents_per_shard,
    )
    least = config.min_actors or config.actors
    with quiet_datasets(**_data_settings(config)), warnings.catch_warnings():
        # Ray 2.60 has no other name for an actor's restarts yet.
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        source = PendingDocuments(plan.files, plan.pending, reading)
        readers = min(config.readers, len(source.get_read_tasks(config.readers)))
        units = ray.data.read_datasource(source, num_cpus=READER_CPUS, concurrency=readers)
        return units.map_batches(
            ExtractStage,
            fn_constructor_args=(settings,),
            batch_size=1,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(
                min_size=least,
                max_size=config.actors,
                # Those it works on and the next.
                max_tasks_in_flight_per_actor=config.units_at_once + 1,
                max_concurrent_calls_per_actor=config.units_at_once,
                enable_true_multi_threading=config.units_at_once > 1,
            ),
            num_cpus=config.num_cpus_per_actor,
            num_gpus=config.num_gpus_per_actor,
            # For ever, because a pool does not replace an actor that has died for good and then waits for it. What
            # ends it is storage: there a document's attempts are counted, and it is left out when they are enough.
            max_restarts=-1,
            max_task_retries=-1,
        )


def _data_settings(config: ExtractConfig) -> dict[str, Any]:
    return {
        # Behind our own, so that a run that nobody looks after ends as well.
        "execution_no_progress_timeout_s": 1.5 * config.stall_timeout_s + 30.0,
        # A row is a unit and is to be a block: blocks are what is given to an actor, and what is computed again.
        "target_max_block_size": 1,
    }


def cause_of(error: BaseException) -> str:
    """What happened, on one line: the project's own error where Ray's report has one, else the report's end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Ray Data wraps what a task or an actor raised, and puts advice on its retries behind it.
    own = [line.partition(": ")[2] for line in lines if line.startswith(f"{C2KVError.__module__}.")]
    return (own or lines or [type(error).__name__])[-1]


def check_resources(config: ExtractConfig) -> None:
    """Actors and one reader must fit, or the job would wait for ever.

    Raises:
        C2KVError: they do not; gives the numbers.
    """
    import ray

    have = ray.cluster_resources()  # type: ignore[no-untyped-call]
    actors = config.min_actors or config.actors
    need = {
        "CPU": actors * config.num_cpus_per_actor + READER_CPUS,
        "GPU": actors * config.num_gpus_per_actor,
    }
    for name, amount in need.items():
        if amount > have.get(name, 0.0):
            raise C2KVError(
                f"{actors} actors and the reader need {amount:g} {name}, the cluster has "
                f"{have.get(name, 0.0):g}; lower actors or num_{name.lower()}s_per_actor"
            )


def stall_diagnosis(config: ExtractConfig, attempts: Attempts) -> str:
    """What a run that does not go on is doing, as far as storage and the cluster tell.

    Raises:
        StoreError: storage cannot be read.
    """
    import ray

    free = ray.available_resources()  # type: ignore[no-untyped-call]
    have = ray.cluster_resources()  # type: ignore[no-untyped-call]
    resources = ", ".join(
        f"{free.get(name, 0.0):g} of {have[name]:g} {name} free" for name in ("CPU", "GPU") if name in have
    )
    running = attempts.running()
    if running:
        oldest = running[0]
        names = ", ".join(repr(doc_id) for doc_id, _ in oldest.documents[:3])
        work = f"{len(running)} units are being worked on, the oldest since {oldest.started_at} ({names} ...)"
    else:
        work = "no actor works on anything: actors may not have started, or wait for the readers"
    lost = sum(not node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call]
    return (
        f"no unit was finished for stall_timeout_s ({config.stall_timeout_s:g} s): {work}; {resources}; {lost} nodes "
        "lost. What was published stays, run the same command again to go on; raise stall_timeout_s if documents take "
        "longer"
    )
