"""``c2kv bench``: speed and memory as ratios to a baseline of the same run."""

from typing import Any

import typer
from rich.console import Console

from c2kv_cli.options import AsJson, ConfigFile, Overrides, keys_of, print_json, resolve
from c2kv_core.errors import C2KVError
from pipelines.bench.extract import BenchExtractConfig, bench_extract
from pipelines.bench.report import BenchReport
from pipelines.bench.store import BenchStoreConfig, bench_store

app = typer.Typer(help="Speed and memory as ratios to a baseline of the same run.", no_args_is_help=True)


@app.callback()
def _benches() -> None:
    """Speed and memory as ratios to a baseline of the same run."""


@app.command("extract", epilog=keys_of(BenchExtractConfig))
def extract(overrides: Overrides = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Extraction beside the base model's plain prefill; peak memory by length."""
    _finish(bench_extract(resolve(BenchExtractConfig, config, overrides)), as_json)


@app.command("store", epilog=keys_of(BenchStoreConfig))
def store(overrides: Overrides = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Verified reads and writes beside plain ones of the same bytes, locally and on S3; look-ups by index size."""
    _finish(bench_store(resolve(BenchStoreConfig, config, overrides)), as_json)


def _finish(report: BenchReport, as_json: bool) -> None:
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
