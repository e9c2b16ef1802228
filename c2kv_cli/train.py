"""``c2kv train``: a sidecar from rows of documents, questions and answers."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from c2kv_cli.interrupted import when_interrupted
from c2kv_cli.options import AsJson, ConfigFile, Overrides, print_json, resolve
from c2kv_cli.progress import progress_bar
from pipelines.train.config import TrainConfig

if TYPE_CHECKING:
    from pipelines.train.progress import Progress as RunProgress


def train(
    overrides: Overrides = None,
    config: ConfigFile = None,
    data: Annotated[list[str] | None, typer.Option(help="Rows to train on, a file; may be repeated.")] = None,
    dev: Annotated[list[str] | None, typer.Option(help="Held-out rows, a file; may be repeated.")] = None,
    model: Annotated[str | None, typer.Option(help="Alias, Hugging Face directory or hub id.")] = None,
    ratio: Annotated[list[int] | None, typer.Option(help="Source tokens per slot; may be repeated.")] = None,
    output: Annotated[str | None, typer.Option(help="Directory or s3:// URI that holds run folders.")] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run; the same name goes on with it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a sidecar for a frozen model, or go on where the run of this name stopped."""
    resolved = resolve(
        TrainConfig,
        config,
        overrides,
        data=data,
        dev=dev,
        model=model,
        ratios=ratio,
        output=output,
        run=run,
    )
    # Imported late: torch and transformers take seconds.
    from pipelines.train.progress import TrainingLines
    from pipelines.train.run import train as run_train

    goes_on = "the same command goes on from the newest checkpoint, where there is one"
    with when_interrupted(goes_on), progress_bar("training") as bar:
        # A terminal gets a bar, a log gets lines.
        report = run_train(resolved, progress=TrainingLines() if bar.disable else _Follow(bar))
    if as_json:
        print_json(report)
    else:
        _print_summary(report)


class _Follow:
    """Moves the bar with the steps of the run."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("train", total=None, detail="starting")

    def __call__(self, progress: "RunProgress") -> None:
        self._bar.update(self._task, completed=progress.step, total=progress.steps, detail=progress.detail)


def _print_summary(report: dict[str, Any]) -> None:
    out = Console(highlight=False, soft_wrap=True)
    if not report["attempt_steps"]:
        out.print("Nothing was left to train: this run had all its steps. Its result was written again.")
    rows = {
        "steps": f"{report['step']:,}, {report['rows']:,} rows, {report['source_tokens']:,} source tokens",
        "last loss": f"{report['last']['loss']:.4f}, answers {report['last']['answer']:.4f} nats a token",
    }
    if report["best"]:
        rows["held-out"] = (
            f"{report['best']['score']:.4f} at step {report['best']['step']:,}, which is exported"
        )
    left_out = {**report["rows_left_out"]}
    if report["dropped"]:
        left_out["replaced while drawing"] = report["dropped"]
    if left_out:
        rows["rows left out"] = ", ".join(f"{reason}: {count:,}" for reason, count in left_out.items())
    made = "sidecar" if "sidecar" in report else "control"
    rows[made] = report[made]
    rows["run folder"] = report["folder"]
    for name, value in rows.items():
        out.print(f"{name:>14}  {value}")
