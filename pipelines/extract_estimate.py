"""A dry run: what a run would do, and about how long it would take and how much it would store."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from c2kv_core import CompressorSpec
from c2kv_core.errors import InputError
from c2kv_core.models import load_tokenizer, model_directory, parse_dtype
from c2kv_core.store import open_storage
from c2kv_core.store.failures import as_store_error
from c2kv_core.text import ChatRenderer, document_parts
from pipelines.corpus.scan import placed_rows
from pipelines.extract_config import ExtractConfig
from pipelines.extract_plan import PlannedRun, plan_run
from pipelines.plan import ExtractPlan

SAMPLE_DOCUMENTS = 64
"""So many of the documents to extract are tokenised, to learn how many bytes a token has."""
SAMPLE_BYTES = 2**20
"""... or fewer, when they are long."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a run would do."""

    documents: int
    new: int
    changed: int
    unchanged: int
    relabelled: int
    empty: int
    failed_before: int
    missing: int
    """Documents that would be removed."""
    refusal: str | None
    """Why the run would refuse to remove them."""
    not_in_corpus: int | None
    """See ``ExtractReport``."""
    positions: int
    """See ``ExtractReport``."""
    beyond_context: int
    """Of the sample, documents with more source tokens than that."""
    source_bytes: int
    """Of the texts to extract."""
    source_tokens: int
    """Estimated from a sample of these."""
    tokens_are_counted: bool
    """Whether the sample was all of them."""
    stored_bytes: int
    """Keys and values over all ratios."""
    tokens_per_s: float | None
    """Of the last run with the same model, device and actors; None when there was none."""
    seconds: float | None
    """At that speed, start-up left out."""
    cost: float | None
    """At ``price_per_hour`` for each actor."""
    plan_bytes: int
    """Memory of the plan while a run goes on."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"dry_run": True, **asdict(self)}


def dry_run(config: ExtractConfig) -> DryRun:
    """Plan a run and estimate it; writes nothing and loads no weights.

    Raises:
        InputError: a subclass that says what is wrong with corpus, model, sidecar, ratio or store.
        StoreError: the store cannot be read.
    """
    planned = plan_run(config)
    plan = planned.plan
    positions = config.spec().max_positions()
    tokens, counted, beyond = _tokens(config, plan, positions)
    speed = last_speed(config, planned)
    seconds = None if not speed else tokens / speed
    price = config.price_per_hour
    return DryRun(
        documents=plan.documents,
        new=plan.new,
        changed=plan.changed,
        unchanged=plan.unchanged,
        relabelled=len(plan.relabelled),
        empty=plan.empty,
        failed_before=planned.failed_before,
        missing=len(planned.missing),
        refusal=planned.refusal,
        not_in_corpus=plan.gone,
        positions=positions,
        beyond_context=beyond,
        source_bytes=plan.pending_bytes,
        source_tokens=tokens,
        tokens_are_counted=counted,
        stored_bytes=_stored_bytes(config, tokens),
        tokens_per_s=speed,
        seconds=seconds,
        cost=None if price is None or seconds is None else price * config.actors * seconds / 3600,
        plan_bytes=plan.pending.nbytes + plan.all_keys.nbytes,
    )


def last_speed(config: ExtractConfig, planned: PlannedRun) -> float | None:
    """Tokens a second of the newest run of the same fingerprints, device and actors that was long enough to tell.

    Raises:
        StoreError: the store cannot be read.
    """
    storage = open_storage(config.store)
    wanted = set(planned.fingerprints.values())
    with as_store_error("read runs/"):
        reports = sorted(
            (f.path for f in storage.list_files("runs/") if f.path.endswith("/report.json")), reverse=True
        )
        for path in reports:
            try:
                report = json.loads(storage.get(path).to_pybytes())
                same = (
                    set(report["fingerprints"].values()) == wanted and report["hardware"] == config.hardware
                )
                if same and report["usual_tokens_per_s"]:
                    return float(report["usual_tokens_per_s"])
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # the report of another release
    return None


def _tokens(config: ExtractConfig, plan: ExtractPlan, positions: int) -> tuple[int, bool, int]:
    """Source tokens of the documents to extract, whether all were counted, and how many exceed the positions."""
    if not len(plan.pending):
        return 0, True, 0
    spec = config.spec()
    renderer = ChatRenderer(load_tokenizer(model_directory(spec.model)))
    limit = _max_part_tokens(spec)
    counted = counted_bytes = documents = beyond = 0
    for title, text in islice(_pending_texts(config, plan), SAMPLE_DOCUMENTS):
        try:
            tokens = sum(map(len, document_parts(renderer, title, text, max_part_tokens=limit)))
        except InputError:
            continue  # it would fail in the run as well
        counted += tokens
        beyond += tokens > positions
        counted_bytes += len(title.encode()) + len(text.encode())
        documents += 1
        if counted_bytes > SAMPLE_BYTES:
            break
    if documents == len(plan.pending):
        return counted, True, beyond
    estimated = round(counted * plan.pending_bytes / counted_bytes) if counted_bytes else 0
    return estimated, False, beyond


def _pending_texts(config: ExtractConfig, plan: ExtractPlan) -> Iterator[tuple[str, str]]:
    for _, _, row in islice(placed_rows(plan.files, config.columns), config.limit):
        if plan.pending.place(row.document.doc_id) is not None:
            yield row.document.title, row.document.text


def _max_part_tokens(spec: CompressorSpec) -> int:
    sidecar = spec.load_sidecar()
    return (sidecar.config if sidecar is not None else spec.untrained_config()).max_part_tokens


def _stored_bytes(config: ExtractConfig, tokens: int) -> int:
    """Keys and values; heads and padding are a few hundred bytes a document more."""
    element_bytes = 1 if config.quantisation == "int8" else parse_dtype(config.slot_dtype).itemsize
    total = 0
    for ratio, identity in config.spec().identities().items():
        shape = identity.geometry
        total += -(-tokens // ratio) * shape.layers * shape.kv_heads * shape.head_dim * 2 * element_bytes
    return total
