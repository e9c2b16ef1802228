"""``c2kv extract``: a corpus into a store."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from c2kv_cli.interrupted import when_interrupted
from c2kv_cli.options import AsJson, ConfigFile, Overrides, print_json, resolve
from c2kv_cli.progress import progress_bar
from c2kv_core.errors import C2KVError, InputError
from pipelines.extract_config import ExtractConfig

if TYPE_CHECKING:
    from pipelines.extract import Progress as RunProgress
    from pipelines.extract_estimate import DryRun
    from pipelines.extract_report import ExtractReport

SHOWN_SKIPS = 5


def extract(
    overrides: Overrides = None,
    config: ConfigFile = None,
    corpus: Annotated[
        str | None,
        typer.Option(help="JSONL, CSV or Parquet file, a folder of files or a Delta table; local or s3://."),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Directory or s3:// URI of the store; made when absent.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Alias, Hugging Face directory or hub id.")] = None,
    sidecar: Annotated[str | None, typer.Option(help="Sidecar directory or s3:// URI.")] = None,
    ratio: Annotated[list[int] | None, typer.Option(help="Source tokens per slot; may be repeated.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Tenant the documents belong to.")] = None,
    limit: Annotated[int | None, typer.Option(help="Take only this many documents.")] = None,
    mode: Annotated[
        str | None, typer.Option(help="sync: new and changed documents; add: only new ones.")
    ] = None,
    delete_missing: Annotated[
        bool, typer.Option("--delete-missing", help="Remove documents that are no longer in the corpus.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try documents again that failed in an earlier run.")
    ] = False,
    only_plan: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done, how long and how big.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Turn the documents of a corpus into compressed slots in a store; only new and changed ones."""
    resolved = resolve(
        ExtractConfig,
        config,
        overrides,
        corpus=corpus,
        store=store,
        model=model,
        sidecar=sidecar,
        ratios=ratio,
        namespace=namespace,
        limit=limit,
        mode=mode,
        delete_missing=delete_missing or None,
        retry_failed=retry_failed or None,
        dry_run=only_plan or None,
    )
    # Imported late: torch and transformers take seconds.
    from pipelines.extract import extract as run_extract
    from pipelines.extract_estimate import dry_run
    from pipelines.extract_lines import ProgressLines

    if resolved.dry_run:
        plan = dry_run(resolved)
        _print_plan(plan, as_json)
        if plan.refusal is not None:
            raise InputError(plan.refusal)
        return
    goes_on = "what is finished is published, and the same command does the rest"
    with when_interrupted(goes_on), progress_bar("extracting") as bar:
        # A terminal gets a bar, a log gets lines.
        follow = ProgressLines(resolved.progress_s) if bar.disable else Follow(bar)
        report = run_extract(resolved, progress=follow)
    if as_json:
        print_json(report.to_dict())
    else:
        _print_summary(report)
    if report.complaint is not None:
        raise C2KVError(report.complaint)


def _print_plan(plan: "DryRun", as_json: bool) -> None:
    if as_json:
        print_json(plan.to_dict())
        return
    out = Console(highlight=False, soft_wrap=True)
    about = "" if plan.tokens_are_counted else "about "
    rows = {
        "documents": f"{plan.documents:,} ({plan.new:,} new, {plan.changed:,} changed, {plan.unchanged:,} unchanged, "
        f"{plan.empty:,} without text, {plan.failed_before:,} failed before)",
        "to extract": f"{about}{plan.source_tokens:,} tokens of {plan.source_bytes:,} bytes",
        "to store": f"{about}{plan.stored_bytes / 2**20:,.1f} MiB",
        "to remove": f"{plan.missing:,} documents; {plan.relabelled:,} with new metadata",
        "time": f"{plan.seconds:,.0f} s at {plan.tokens_per_s:,.0f} tokens/s of an earlier run, start-up left out"
        if plan.seconds is not None
        else "unknown: no run like this one has finished in this store",
    }
    if plan.cost is not None:
        rows["cost"] = f"{plan.cost:,.2f}"
    for name, value in rows.items():
        out.print(f"{name:>14}  {value}")
    _print_beyond(out, plan.beyond_context, plan.positions)
    if not plan.missing:
        _print_gone(out, plan.not_in_corpus)


def _print_beyond(out: Console, documents: int, positions: int) -> None:
    if documents:
        out.print(
            f"Longer than the model's {positions:,} positions, so that no question can use them: {documents:,} "
            "of the documents; cut them into several."
        )


def _print_gone(out: Console, documents: int | None) -> None:
    if documents:
        out.print(
            f"Stored and not in this corpus: {documents:,} of the documents; --delete-missing removes such."
        )


class Follow:
    """Moves the bar with the counts of the job."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("extract", total=None, detail="starting")

    def __call__(self, progress: "RunProgress") -> None:
        failed = f", {progress.failed:,} failed" if progress.failed else ""
        detail = f"{progress.tokens_per_s:,.0f} tokens/s{failed}" if progress.done else progress.phase
        self._bar.update(self._task, completed=progress.done, total=progress.pending or None, detail=detail)


def _print_summary(report: "ExtractReport") -> None:
    out = Console(highlight=False, soft_wrap=True)
    rows = {
        "documents": f"{report.documents:,} ({report.extracted:,} extracted, {report.unchanged:,} unchanged, "
        f"{report.skipped_documents:,} skipped, {report.failed_documents:,} failed, "
        f"{report.failed_before:,} failed before, {report.vanished:,} vanished)"
    }
    if report.extracted:
        ratios = ", ".join(map(str, report.fingerprints))
        rows |= {
            "source tokens": f"{report.source_tokens:,}",
            "slots": f"{report.slots:,} at ratio {ratios} in {report.parts:,} parts",
            "stored": f"{report.stored_bytes / 2**20:,.1f} MiB in {report.store}, namespace {report.namespace}",
            "speed": f"{report.tokens_per_s:,.0f} tokens/s over {report.elapsed_s:.1f} s, start-up included",
            "padding": f"{report.padding_waste:.1%} of {report.computed_tokens:,} tokens computed",
            "report": f"{report.store.rstrip('/')}/runs/{report.run}/report.md",
            "fingerprint": ", ".join(report.fingerprints.values()),
        }
    for name, value in rows.items():
        out.print(f"{name:>14}  {value}")
    for skip in report.skipped[:SHOWN_SKIPS]:
        out.print(f"{'skipped':>14}  {skip.doc_id}: {skip.reason}")
    if report.skipped_documents > SHOWN_SKIPS:
        out.print(f"{'':>14}  and {report.skipped_documents - SHOWN_SKIPS} more")
    if report.relabelled or report.removed:
        out.print(f"{'upkeep':>14}  {report.relabelled:,} with new metadata, {report.removed:,} removed")
    _print_beyond(out, report.beyond_context_documents, report.positions)
    if not report.removed:
        _print_gone(out, report.not_in_corpus)
    if report.failed_before:
        out.print("Documents that failed before were left alone; --retry-failed tries them again.")
    if report.extracted and report.sidecar == "untrained":
        out.print("The sidecar is untrained: its slots carry little of the text.")
