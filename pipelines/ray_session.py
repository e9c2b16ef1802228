"""Starting or joining Ray for one command."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from c2kv_core.cores import usable_cores
from c2kv_core.errors import InputError

OBJECT_STORE_BYTES = 300 * 2**20
"""Object store of a Ray started here. Slots never pass through it; only small rows do."""
MIN_LOGICAL_CPUS = 4
"""With fewer, the actors of a streaming job can hold every CPU and its reads never start."""

WORKER_PORTS = range(10_002, 20_000)
"""Where Ray's workers listen."""

SERVE_VARIABLES = {
    # Serve's replicas talk gRPC with each other instead of through Ray's objects, and on one event loop instead of
    # three: their code never blocks it, and an event of a stream costs about half.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""Ray reads these when a process starts, so on a cluster they belong into its nodes' environment."""


@contextmanager
def ray_session(
    *, num_cpus: int | None = None, log_to_driver: bool = False, metrics_port: int | None = None
) -> Iterator[bool]:
    """Ray for the time of a ``with`` block.

    Joins the cluster of ``RAY_ADDRESS`` (set inside a submitted job), or one this process has joined already;
    otherwise starts one on this machine and stops it at the end. Gives whether it started one. What Ray prints goes to
    stderr: stdout is for results. A handler of SIGTERM that was in place stays in place.

    Args:
        num_cpus: logical CPUs of a cluster started here; at least 4 by default.
        log_to_driver: show what actors print.
        metrics_port: where a node started here gives its Prometheus metrics; any free port by default.

    Raises:
        InputError: a metrics port for a cluster that is joined.
    """
    # Explicit, because the defaults send usage data and depend on a leftover token file.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    joins = bool(os.environ.get("RAY_ADDRESS"))
    if joins and metrics_port is not None:
        raise InputError(
            f"expected no metrics port for a Ray that runs already, got {metrics_port}; give it to its nodes: "
            "`ray start --metrics-export-port`"
        )
    if not joins:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        # Remarks of Ray's own processes about normal things; its log files keep what matters. Ray tells of this setting
        # in a line of its own, as it starts; without it, its errors about ended workers would be shown instead.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        for name, value in SERVE_VARIABLES.items():
            os.environ.setdefault(name, value)
    # Imported late: the variables above are read at import.
    import ray

    if ray.is_initialized():
        with redirect_stdout(sys.stderr):
            yield False
        return
    # Around all of it: Ray also tells what it has to tell when it stops.
    with redirect_stdout(sys.stderr):
        try:
            with _sigterm_kept():
                if joins:
                    ray.init(log_to_driver=log_to_driver)
                else:
                    _start(num_cpus, log_to_driver, metrics_port)
            yield not joins
        finally:
            ray.shutdown()


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """While Ray starts it takes SIGTERM: first to exit, then, in C++, to print its stack and abort."""
    before = signal.getsignal(signal.SIGTERM)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(num_cpus: int | None, log_to_driver: bool, metrics_port: int | None) -> None:
    import ray

    ray.init(
        address="local",
        num_cpus=num_cpus or max(MIN_LOGICAL_CPUS, usable_cores()),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=log_to_driver,
        logging_level=logging.ERROR,
        _metrics_export_port=metrics_port,
        _system_config={"metrics_report_interval_ms": 60_000},
    )


@dataclass(frozen=True, kw_only=True)
class NodePlaces:
    """Where one finds out how a node of Ray fares."""

    metrics_url: str
    """Of its Prometheus metrics."""
    logs: Path
    """Folder of the log files of all that runs there."""


def places_of_this_node() -> NodePlaces:
    """Those of the node this process runs on. Ray must be initialised."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    (node,) = [each for each in nodes if each["NodeID"] == own]
    return NodePlaces(
        metrics_url=f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics",
        logs=Path(node["RayletSocketName"]).parent.parent / "logs",
    )
