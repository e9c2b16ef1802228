"""``c2kv store``: look at a store, check it, remove from it."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from c2kv_cli.options import AsJson, print_json
from c2kv_core.errors import InputError, StoreError
from c2kv_core.identity import Identity
from c2kv_core.store import (
    DeadLetters,
    GcReport,
    IndexRow,
    KVStore,
    Totals,
    history,
    promote,
    promoted_namespaces,
)

app = typer.Typer(help="List, show, verify and clean up a store.", no_args_is_help=True)

Uri = Annotated[str, typer.Argument(help="Directory or s3:// URI of the store.")]
Namespace = Annotated[str | None, typer.Option(help="Only this tenant.")]
Fingerprint = Annotated[str | None, typer.Option(help="Only this fingerprint, or its beginning.")]

TABLE_COLUMNS = 160
"""Characters that a line of a table may have, however narrow the terminal."""


@app.command("ls")
def ls(
    uri: Uri,
    namespace: Namespace = None,
    fingerprint: Fingerprint = None,
    documents: Annotated[
        bool, typer.Option("--documents", help="List documents: namespace, fingerprint, tokens, id.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Totals by namespace and fingerprint; with --documents, the documents themselves."""
    store = KVStore.open(uri)
    totals = [t for t in store.totals(namespace=namespace) if t.fingerprint.startswith(fingerprint or "")]
    groups = [_described(store, group) for group in totals]
    shown = store.rows(namespace=namespace) if documents else []
    rows = [row for row in shown if row.fingerprint.startswith(fingerprint or "")]
    if not totals and (namespace or fingerprint):
        raise InputError(
            f"nothing in {uri} is of {_filters(namespace, fingerprint)}; `c2kv store ls {uri}` lists all"
        )
    if as_json:
        listed = {"records": [row.to_dict() for row in rows]} if documents else {}
        print_json({"uri": uri, "groups": groups, "documents": sum(t.documents for t in totals), **listed})
        return
    if documents:
        typer.echo("namespace\tfingerprint\ttokens\tid")
        for row in rows:
            # An id may hold anything; what would move the cursor is shown escaped.
            name = row.doc_id if row.doc_id.isprintable() else repr(row.doc_id)
            typer.echo(f"{row.namespace}\t{row.fingerprint[:12]}\t{row.source_tokens}\t{name}")
        return
    columns = (
        "namespace",
        "fingerprint",
        "sidecar",
        "k",
        "slot",
        "docs",
        "parts",
        "slots",
        "tokens",
        "MiB",
        "B/token",
    )
    table = Table(*columns, box=None)
    for g in groups:
        table.add_row(
            g["namespace"],
            g["fingerprint"][:12],
            (g["sidecar"] or "?")[:12],
            str(g["ratio"] or "?"),
            g["codec"] or "?",
            f"{g['documents']:,}",
            f"{g['parts']:,}",
            f"{g['slots']:,}",
            f"{g['source_tokens']:,}",
            f"{g['bytes'] / 2**20:,.1f}",
            f"{g['bytes_per_source_token']:,.0f}",
        )
    out = Console()
    # A terminal wraps what is too long; a cut fingerprint could not be copied.
    out.width = max(out.width, TABLE_COLUMNS)
    out.print(table)


@app.command("served")
def served(uri: Uri, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """What was made the served fingerprint of each namespace, when, by whom and why; the last one counts."""
    names = promoted_namespaces(uri) if namespace is None else [namespace]
    histories = {name: history(uri, name) for name in names}
    if as_json:
        print_json({"uri": uri, "namespaces": {n: [asdict(e) for e in h] for n, h in histories.items()}})
        return
    if not any(histories.values()):
        where = uri if namespace is None else repr(namespace)
        typer.echo(f"nothing was promoted in {where}: servers go by their own configuration")
    else:
        typer.echo("namespace\tversion\tfingerprint\tsince\tby\treason")
    for name, entries in histories.items():
        for entry in entries:
            fields = (name, str(entry.version), entry.fingerprint[:12], entry.at, entry.by, entry.reason)
            typer.echo("\t".join(fields))


@app.command("promote")
def promote_fingerprint(
    uri: Uri,
    fingerprint: Annotated[str, typer.Argument(help="Fingerprint, or its beginning.")],
    namespace: Annotated[str, typer.Option(help="Tenant.")] = "default",
    reason: Annotated[str, typer.Option(help="For the history.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make a fingerprint the one that servers of a namespace go over to, without a restart."""
    groups = KVStore.open(uri).totals(namespace=namespace)
    matching = sorted({g.fingerprint for g in groups if g.fingerprint.startswith(fingerprint)})
    if len(matching) != 1:
        raise InputError(
            f"expected the beginning of one fingerprint of namespace {namespace!r}, {fingerprint!r} is that of "
            f"{len(matching)}; `c2kv store ls {uri}` lists them"
        )
    entry = promote(uri, namespace, matching[0], reason=reason)
    if as_json:
        print_json(asdict(entry))
    else:
        typer.echo(
            f"{namespace!r} is served by {entry.fingerprint[:12]} since {entry.at} (version {entry.version})"
        )


@app.command("show")
def show(
    uri: Uri,
    doc_id: Annotated[
        str, typer.Argument(help="Document id, as `c2kv store ls URI --documents` lists them.")
    ],
    namespace: Annotated[str, typer.Option(help="Tenant.")] = "default",
    as_json: AsJson = False,
) -> None:
    """Everything recorded of one document, at each fingerprint."""
    store = KVStore.open(uri)
    rows = store.rows_of([doc_id], namespace=namespace)
    if not rows:
        raise InputError(f"no document {doc_id!r} in namespace {namespace!r} of {uri}")
    text = store.text([doc_id], namespace=namespace).get(doc_id)
    report: dict[str, Any] = {
        "id": doc_id,
        "namespace": namespace,
        "title": text.title if text else None,
        "text_characters": len(text.text) if text else None,
        "metadata": json.loads(text.metadata) if text and text.metadata else None,
        "records": [_with_identity(store, row) for row in rows],
    }
    if as_json:
        print_json(report)
        return
    typer.echo(f"{doc_id}  {report['title'] or ''}")
    if report["metadata"] is not None:
        typer.echo(f"  {'metadata':>14}  {json.dumps(report['metadata'])}")
    for record in report["records"]:
        for name, value in record.items():
            typer.echo(f"  {name:>14}  {value}")


@app.command("failures")
def failures(uri: Uri, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """Documents that could not be extracted, and why; `c2kv extract --retry-failed` tries them again."""
    letters = DeadLetters.open(uri).rows(namespace=namespace)
    if as_json:
        listed = [
            {
                **asdict(one),
                "first_failed_at": one.first_failed_at.isoformat(),
                "last_failed_at": one.last_failed_at.isoformat(),
            }
            for one in letters
        ]
        print_json({"uri": uri, "failures": listed})
        return
    if letters:
        typer.echo("namespace\tfingerprint\tkind\tattempts\tid\treason")
    for one in letters:
        name = one.doc_id if one.doc_id.isprintable() else repr(one.doc_id)
        typer.echo(
            f"{one.namespace}\t{one.fingerprint[:12]}\t{one.kind}\t{one.attempts}\t{name}\t{one.reason}"
        )


@app.command("verify")
def verify(
    uri: Uri,
    namespace: Namespace = None,
    sample: Annotated[float, typer.Option(help="Share of the records to read, above 0 up to 1.")] = 1.0,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Drop damaged records, so that the next extraction makes them again."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read and check records; exit code 1 when anything is wrong, also when it was repaired."""
    report = KVStore.open(uri).verify(namespace=namespace, fraction=sample, repair=repair)
    if not report.documents and namespace is not None:
        raise InputError(
            f"nothing in {uri} is of {_filters(namespace, None)}; `c2kv store ls {uri}` lists all"
        )
    if as_json:
        print_json(report.to_dict())
    else:
        out = Console(highlight=False, soft_wrap=True)
        verdict = "all sound" if report.ok else f"{len(report.problems)} damaged"
        out.print(f"{report.documents:,} records, {report.bytes / 2**20:,.1f} MiB read, {verdict}")
        for problem in report.problems:
            row = problem.row
            out.print(f"  {row.namespace}/{row.doc_id}: {problem.reason}: {problem.detail}", markup=False)
    if not report.ok:
        todo = f"`c2kv store verify {uri} --repair` drops them, then `c2kv extract` makes them again"
        if report.dropped is not None:
            todo = f"{report.dropped} were dropped and noted under quarantine/; run `c2kv extract` to make them again"
        raise StoreError(f"{len(report.problems)} of {report.documents} records are damaged; {todo}")


@app.command("rm")
def rm(
    uri: Uri,
    doc_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Document ids.")],
    namespace: Annotated[str, typer.Option(help="Tenant.")] = "default",
    as_json: AsJson = False,
) -> None:
    """Remove documents at every fingerprint, and their texts; `gc` frees their bytes after its retention."""
    store = KVStore.open(uri)
    known = {row.doc_id for row in store.rows_of(doc_ids, namespace=namespace)}
    missing = [doc_id for doc_id in dict.fromkeys(doc_ids) if doc_id not in known]
    removed = store.delete(doc_ids, namespace=namespace)
    if as_json:
        print_json({"removed": removed, "missing": missing})
    else:
        typer.echo(f"{removed} {'record' if removed == 1 else 'records'} removed")
        if removed:
            typer.echo(
                "their bytes go with the first `c2kv store gc` a day from now; at once, while nothing writes: "
                f"`c2kv store gc {uri} --retention-s 0`",
                err=True,
            )
    if missing:
        raise InputError(f"not in namespace {namespace!r} of {uri}: {', '.join(map(repr, missing))}")


@app.command("gc")
def gc(
    uri: Uri,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    retention_s: Annotated[
        float,
        typer.Option(
            help="Keep unneeded files younger than this, seconds. 0 only while nothing writes there."
        ),
    ] = 86_400.0,
    as_json: AsJson = False,
) -> None:
    """Remove what no live document needs: shards, dead records inside shards, old files of the tables."""
    report = KVStore.open(uri).gc(dry_run=dry_run, retention_s=retention_s)
    if as_json:
        print_json(asdict(report))
    else:
        _print_gc(report, retention_s)
    if report.unreadable:
        raise StoreError(
            f"{len(report.unreadable)} shards keep the bytes of removed documents, because a live record in them is "
            "damaged; run `c2kv store verify --repair`, then this again"
        )


def _print_gc(report: GcReport, retention_s: float) -> None:
    would = "would be " if report.dry_run else ""
    files = len(report.removed) + len(report.table_files)
    freed = (report.removed_bytes - report.written_bytes) / 2**20
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"{files} files {would}removed, {freed:,.1f} MiB {would}freed")
    if report.rewritten:
        out.print(
            f"{len(report.rewritten)} of them were shards that {would}written anew without "
            f"{report.erased_bytes / 2**20:,.1f} MiB of records that are no longer live"
        )
    if report.kept_young:
        out.print(
            f"{report.kept_young} files with {report.kept_young_bytes / 2**20:,.1f} MiB that nothing needs are younger "
            f"than the retention of {retention_s:,.0f} s and stay"
        )
    out.print(f"{report.live_shards} shards hold live documents")


def _described(store: KVStore, totals: Totals) -> dict[str, Any]:
    identity = store.identity_of(totals.fingerprint)
    return {
        **asdict(totals),
        "sidecar": None if identity is None else identity.sidecar_digest,
        "ratio": None if identity is None else identity.ratio,
        "codec": None if identity is None else _codec(identity),
        "bytes_per_source_token": totals.bytes / max(1, totals.source_tokens),
    }


def _codec(identity: Identity) -> str:
    """How slots are stored, in a word."""
    return identity.slot_dtype if identity.quantisation == "none" else identity.quantisation


def _with_identity(store: KVStore, row: IndexRow) -> dict[str, Any]:
    identity = store.identity_of(row.fingerprint)
    named = {} if identity is None else {"ratio": identity.ratio, "codec": _codec(identity)}
    return {**row.to_dict(), **named}


def _filters(namespace: str | None, fingerprint: str | None) -> str:
    wanted = {"namespace": namespace, "fingerprint": fingerprint}
    return " and ".join(f"{name} {value!r}" for name, value in wanted.items() if value is not None)
