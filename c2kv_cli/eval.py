"""``c2kv eval``: answers from slots beside full compute and other controls."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from c2kv_cli.options import AsJson, ConfigFile, Overrides, print_json, resolve
from c2kv_cli.progress import progress_bar
from pipelines.eval.config import METHOD_NAMES, EvalConfig

if TYPE_CHECKING:
    from pipelines.eval.progress import Progress
    from pipelines.eval.report import EvalReport, MethodRow

TABLE_WIDTH = 140
"""Columns that the whole table takes."""


def eval_command(
    overrides: Overrides = None,
    config: ConfigFile = None,
    data: Annotated[str | None, typer.Option(help="JSONL(.gz) file of questions with documents.")] = None,
    methods: Annotated[str | None, typer.Option(help=f"Comma-separated: {', '.join(METHOD_NAMES)}.")] = None,
    ratio: Annotated[list[int] | None, typer.Option(help="Source tokens per slot; may be repeated.")] = None,
    limit: Annotated[int | None, typer.Option(help="Take only this many questions, drawn by seed.")] = None,
    model: Annotated[str | None, typer.Option(help="Alias, Hugging Face directory or hub id.")] = None,
    sidecar: Annotated[str | None, typer.Option(help="Sidecar directory or s3:// URI.")] = None,
    predictions: Annotated[str | None, typer.Option(help="JSONL file for every single answer.")] = None,
    as_json: AsJson = False,
) -> None:
    """Answer questions over documents by several methods and compare: F1, likelihood, size."""
    resolved = resolve(
        EvalConfig,
        config,
        overrides,
        data=data,
        methods=None if methods is None else [name.strip() for name in methods.split(",")],
        ratios=ratio,
        limit=limit,
        model=model,
        sidecar=sidecar,
        predictions=predictions,
    )
    # Imported late: torch and transformers take seconds.
    from pipelines.eval.evaluate import evaluate
    from pipelines.eval.progress import EvalLines

    with progress_bar("evaluating") as bar:
        task = bar.add_task("eval", total=None, detail="")

        def follow(progress: "Progress") -> None:
            bar.update(task, completed=progress.done, total=progress.total)

        # A terminal gets a bar, a log gets lines.
        report = evaluate(resolved, progress=EvalLines() if bar.disable else follow)
    if as_json:
        print_json(report.to_dict())
    else:
        _print_table(report)


def _print_table(report: "EvalReport") -> None:
    out = Console(highlight=False, soft_wrap=True)
    # In a narrow terminal or a pipe a long line is easier to read than cut numbers.
    out.width = max(out.width, TABLE_WIDTH)
    count = report.methods[0].questions
    table = Table(title=f"{report.data}: {count} question{'s' * (count != 1)}", title_justify="left")
    table.add_column("method")
    for name in (
        "ratio",
        "F1 [95 %]",
        "minus full [95 %]",
        "EM",
        "recall",
        "answer NLL [95 %]",
        "bytes/token",
        "s",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.methods:
        table.add_row(*_cells(row))
    out.print(table)
    out.print(
        f"{report.model}; sidecar {report.sidecar} ({report.sidecar_directory or 'started from the base'})"
    )
    out.print(f"{report.source_tokens:,.0f} source tokens a question; greedy; seed {report.seed}")
    if report.skipped:
        first = report.skipped[0]
        out.print(f"{len(report.skipped)} questions left out, the first {first['id']}: {first['reason']}")
    if report.sidecar == "untrained" and any(row.method == "c2kv" for row in report.methods):
        out.print("The sidecar is untrained: its slots carry little of the text.")


def _cells(row: "MethodRow") -> list[str]:
    return [
        row.method,
        "" if row.ratio is None else str(row.ratio),
        _with_interval(row.f1, row.f1_low, row.f1_high),
        _with_interval(row.f1_minus_full, row.f1_minus_full_low, row.f1_minus_full_high, sign="+"),
        f"{row.exact_match:.3f}",
        f"{row.answer_recall:.3f}",
        _with_interval(row.answer_nll, row.answer_nll_low, row.answer_nll_high, digits=2),
        f"{row.bytes_per_source_token:,.0f}",
        f"{row.seconds:,.1f}",
    ]


def _with_interval(
    mean: float | None, low: float | None, high: float | None, *, sign: str = "", digits: int = 3
) -> str:
    if mean is None or low is None or high is None:
        return ""
    form = f"{sign}.{digits}f"
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"
