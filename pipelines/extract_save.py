"""The record of a run, stored beside the index: configuration, report for machines, report for people."""

import json

from c2kv_core.config import to_yaml
from c2kv_core.store import open_storage, require_store
from c2kv_core.store.failures import as_store_error
from pipelines.extract_config import ExtractConfig
from pipelines.extract_report import ExtractReport

SHOWN = 20
"""Rows of a table for people."""


def save_run(config: ExtractConfig, report: ExtractReport) -> None:
    """Write ``runs/<run>/`` into the store.

    Raises:
        StoreError: the store is gone, or I/O error.
    """
    storage = open_storage(config.store)
    # Where the store was removed, a folder with a report would stand in the way of the next.
    require_store(storage)
    files = {
        "config.yaml": to_yaml(config),
        "report.json": json.dumps(report.to_dict(), indent=2),
        "report.md": as_markdown(report),
    }
    with as_store_error(f"write runs/{report.run}/"):
        for name, text in files.items():
            storage.put(f"runs/{report.run}/{name}", text.encode())


def as_markdown(report: ExtractReport) -> str:
    """The report for people."""
    lines = [
        f"# {report.run}",
        "",
        f"{report.state}. Store {report.store}, namespace {report.namespace}.",
        "",
    ]
    lines += _table(
        ("what", "figure"), [(name, value) for name, value in _figures(report) if value is not None]
    )
    lines += ["", "## Actors", ""]
    lines += _table(
        ("actor", "units", "source tokens", "busy s", "tokens/s"),
        [
            (name, f"{w.units:,}", f"{w.source_tokens:,}", f"{w.busy_s:,.1f}", f"{w.tokens_per_s:,.0f}")
            for name, w in sorted(report.actors.items())[:SHOWN]
        ],
    )
    lines += ["", "## Slowest documents", ""]
    lines += _table(
        ("document", "seconds", "tokens"),
        [(s.doc_id, f"{s.seconds:,.2f}", f"{s.source_tokens:,}") for s in report.slowest],
    )
    lines += ["", "## Failures", ""]
    lines += _table(
        ("document", "kind", "reason"), [(f.doc_id, f.kind, f.reason) for f in report.failed[:SHOWN]]
    )
    if report.failed_documents > SHOWN:
        lines += ["", f"{report.failed_documents:,} in all; `c2kv store failures` lists them."]
    return "\n".join(lines) + "\n"


def _figures(report: ExtractReport) -> list[tuple[str, str | None]]:
    cost = report.cost_per_million_tokens
    return [
        ("documents", f"{report.documents:,}"),
        ("extracted", f"{report.extracted:,} ({report.new:,} new and {report.changed:,} changed planned)"),
        ("unchanged", f"{report.unchanged:,}, of these {report.relabelled:,} with new metadata"),
        ("without text", f"{report.skipped_documents:,}"),
        (
            "failed",
            f"{report.failed_documents:,}, and {report.failed_before:,} left alone that failed before",
        ),
        ("vanished during the run", f"{report.vanished:,}"),
        ("removed", f"{report.removed:,}"),
        # Of a run that was stopped, what it did not come to is no riddle.
        ("unaccounted" if report.state == "done" else "not finished", f"{report.unaccounted:,}"),
        (
            "stored and not in the corpus",
            None if report.not_in_corpus is None else f"{report.not_in_corpus:,}",
        ),
        (
            f"beyond the model's {report.positions:,} positions",
            f"{report.beyond_context_documents:,}" if report.beyond_context_documents else None,
        ),
        ("source tokens", f"{report.source_tokens:,}, of these {report.reused_tokens:,} reused"),
        ("computed tokens", f"{report.computed_tokens:,}, {report.padding_waste:.1%} of them padding"),
        ("parts, slots", f"{report.parts:,}, {report.slots:,}"),
        ("stored", f"{report.stored_bytes / 2**20:,.1f} MiB in {report.commits:,} commits"),
        ("quality", report.quality or None),
        ("time", f"{report.elapsed_s:,.1f} s, {report.tokens_per_s:,.0f} tokens/s"),
        (
            "steady state",
            f"{report.steady_s:,.1f} s, {report.steady_tokens_per_s:,.0f} tokens/s"
            if report.was_steady
            else None,
        ),
        ("CPU, GPU", f"{report.cpu_s:,.1f} s, {report.gpu_s:,.1f} s"),
        ("cost a million source tokens", None if cost is None else f"{cost:,.4f}"),
    ]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return ["none"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    # Ids and reasons may hold what would break a table.
    return lines + [f"| {' | '.join(_plain(value) for value in row)} |" for row in rows]


def _plain(value: str) -> str:
    shown = value if value.isprintable() else repr(value)
    return shown.replace("|", "\\|")
