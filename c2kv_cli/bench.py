"""``c2kv bench``: speed and memory as ratios to a baseline of the same run."""

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from c2kv_cli.options import AsJson, ConfigFile, Overrides, keys_of, print_json, resolve
from c2kv_core.errors import C2KVError
from pipelines.bench.config import BenchExtractConfig, BenchServeConfig, BenchStoreConfig
from pipelines.ray_session import ray_session

# What measures is imported late: torch and transformers take seconds.
if TYPE_CHECKING:
    from pipelines.bench.report import BenchReport
    from pipelines.bench.serve import Place

app = typer.Typer(help="Speed and memory as ratios to a baseline of the same run.", no_args_is_help=True)


@app.callback()
def _benches() -> None:
    """Speed and memory as ratios to a baseline of the same run."""


@app.command("extract", epilog=keys_of(BenchExtractConfig))
def extract(overrides: Overrides = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Extraction beside the base model's plain prefill; peak memory by length."""
    settings = resolve(BenchExtractConfig, config, overrides)
    from pipelines.bench.extract import bench_extract

    _finish(bench_extract(settings), as_json)


@app.command("store", epilog=keys_of(BenchStoreConfig))
def store(overrides: Overrides = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Verified reads and writes beside plain ones of the same bytes, locally and on S3; look-ups by index size."""
    settings = resolve(BenchStoreConfig, config, overrides)
    from pipelines.bench.store import bench_store

    _finish(bench_store(settings), as_json)


@app.command("serve", epilog=keys_of(BenchServeConfig))
def serve(overrides: Overrides = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """TTFT and throughput from slots in memory, on disk and on S3, beside full prefill and a cached full prefix."""
    settings = resolve(BenchServeConfig, config, overrides)
    from pipelines.bench.serve import bench_serve

    with ray_session() as started_ray, tempfile.TemporaryDirectory(prefix="c2kv-bench-") as folder:
        report = bench_serve(settings, lambda place: _server(settings, place, folder, started_ray))
    _finish(report, as_json)


@contextmanager
def _server(config: BenchServeConfig, place: "Place", folder: str, started_ray: bool) -> Iterator[str]:
    """One replica over a store of its own; only for ``memory`` does it keep slots that it has used."""
    from c2kv_core.spec import CompressorSpec
    from c2kv_core.store import KVStore, open_storage
    from pipelines.bench.load import TIMEOUT_S
    from serve_app.config import ServeConfig
    from serve_app.launch import free_port, start

    store = f"{folder}/store" if place != "s3" else f"{config.s3}/bench-{uuid.uuid4().hex}"
    spec = CompressorSpec(model=config.model, sidecar=config.sidecar, ratios=(config.ratio,))
    KVStore.open(store, identity=spec.identities()[config.ratio], create=True)
    served = ServeConfig(
        store=store,
        model=config.model,
        sidecar=config.sidecar,
        ratio=config.ratio,
        torch_threads=config.threads,
        memory_cache_bytes=2**30 if place == "memory" else 0,
        prefix_cache_bytes=2**30,
        max_running_bytes=6 * 2**30,
        max_request_s=TIMEOUT_S,
    )
    running = start(served, port=free_port())
    try:
        yield running.url
    finally:
        running.stop()
        if place == "s3":
            storage = open_storage(store)
            for file in list(storage.list_files("")):
                storage.delete(file.path)


def _finish(report: "BenchReport", as_json: bool) -> None:
    if as_json:
        print_json(report.to_dict())
    else:
        out = Console(highlight=False, soft_wrap=True)
        width = max(map(len, [*report.ratios, *report.figures]))
        for name, ratio in report.ratios.items():
            bar = "at least" if ratio.higher_is_better else "at most"
            out.print(f"{name:>{width}}  {ratio.value:.3f}  ({bar} {ratio.limit:g}; over {ratio.baseline})")
        for name, value in report.figures.items():
            out.print(f"{name:>{width}}  {_rounded(value)}")
        out.print(f"{'machine':>{width}}  {_rounded(report.to_dict()['machine'])}")
    # On a busy machine, or with small settings, ratios say little: the bars are for a quiet one and the defaults.
    missed = [name for name, ratio in report.ratios.items() if not ratio.holds]
    if missed:
        raise C2KVError(f"{', '.join(missed)} missed the bar on this machine in this run")


def _rounded(value: Any) -> str:
    """For people: four digits, pairs side by side."""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_rounded(inner)}" for name, inner in value.items() if inner is not None)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
