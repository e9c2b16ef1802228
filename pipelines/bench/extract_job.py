"""``c2kv bench extract``, second half: the whole Ray job beside the bare loop, its driver's memory, its linearity."""

import json
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import psutil
import torch

from c2kv_core import Compressor, SourceDocument
from c2kv_core.store import KVStore, Ledger, open_storage
from c2kv_core.store.index import Index
from c2kv_core.store.manifest import DEFAULT_BUCKETS
from c2kv_core.text import content_hash
from pipelines.bench.memory import peak_bytes
from pipelines.bench.report import BenchReport, Ratio
from pipelines.bench.store import INDEX_NAMESPACE, made_up_index
from pipelines.extract import extract
from pipelines.extract_config import ExtractConfig
from pipelines.extract_units import UnitDocument
from pipelines.extract_work import Tally, Work
from pipelines.plan import plan_extraction, stored_contents

JOB_LIMIT = 0.9
"""Bar of job_over_loop."""
DRIVER_LIMIT = 1.1
"""Bar of the driver's memory over the largest corpus, against the smallest: flat, but for a few bytes a document."""
LINEAR_LIMIT = 1.2
"""Bar of the time per token of four times the documents."""
CORPUS = "corpus.jsonl"
_WORDS = [
    "the",
    "of",
    "and",
    "a",
    "lake",
    "oak",
    "river",
    "stone",
    "tower",
    "light",
    "house",
    "road",
    "letter",
    "winter",
    "garden",
    "bridge",
    "captain",
    "market",
]


def measure_job(report: BenchReport, base: ExtractConfig, *, documents: int, words: int) -> None:
    """``job_over_loop``: source tokens a second of the Ray job once units come, over a loop over ``Extractor``.

    The loop runs before and after the job, in this process, over the token ids of the same documents.
    """
    with tempfile.TemporaryDirectory(prefix="c2kv-bench-") as folder:
        sources = _sources(documents, words)
        config = base.model_copy(
            update={"corpus": str(_write(Path(folder), sources)), "store": f"{folder}/store"}
        )
        compressor = Compressor.load(config.spec())
        ids = [part for s in sources for part in compressor.part_ids(s.title, s.text)]
        tokens = sum(map(len, ids))
        threads = torch.get_num_threads()
        torch.set_num_threads(config.threads() or threads)
        try:
            _loop(compressor, ids[:1], config)
            cpu_before_s = time.process_time()
            before_s = _loop(compressor, ids, config)
            loop_cpu_s = time.process_time() - cpu_before_s
            done = extract(config)
            after_s = _loop(compressor, ids, config)
        finally:
            torch.set_num_threads(threads)
    loop_tokens_per_s = 2 * tokens / (before_s + after_s)
    report.ratios["job_over_loop"] = Ratio(
        value=done.steady_tokens_per_s / loop_tokens_per_s,
        baseline="tokens/s of a loop over Extractor in one process, the same documents and threads",
        limit=JOB_LIMIT,
        higher_is_better=True,
    )
    report.figures |= {
        "job_tokens": tokens,
        "job_steady_tokens_per_s": done.steady_tokens_per_s,
        "job_busy_tokens_per_s": sum(work.tokens_per_s for work in done.actors.values()),
        "loop_tokens_per_s": loop_tokens_per_s,
        "job_start_s": done.elapsed_s - done.steady_s,
        # Where the machine has other work, these tell more than the times do.
        "job_cpu_s_over_loops": done.cpu_s / loop_cpu_s,
        "job_padding_waste": done.padding_waste,
    }


def measure_driver(report: BenchReport, counts: Sequence[int]) -> None:
    """``driver_memory_growth``: planning over tiny documents, all of which are in the index with another content.

    Each corpus is planned in a process of its own: in one that has freed memory already a peak would not show.
    """
    peaks = {count: _driver_peak_bytes(count) for count in counts}
    known = {count: peak for count, peak in peaks.items() if peak is not None}
    report.figures["driver_peak_bytes_by_documents"] = peaks
    if len(known) < 2:
        return
    first, last = min(known), max(known)
    report.figures["driver_bytes_a_document"] = (known[last] - known[first]) / (last - first)
    report.ratios["driver_memory_growth"] = Ratio(
        value=known[last] / known[first],
        baseline=f"memory of the driver over a corpus of {first:,} documents, against {last:,}",
        limit=DRIVER_LIMIT,
    )


def measure_linearity(report: BenchReport, base: ExtractConfig, *, documents: int, words: int) -> None:
    """``time_per_token_growth``: tokenising, extracting and writing four times the documents."""
    with tempfile.TemporaryDirectory(prefix="c2kv-bench-") as folder:
        config = base.model_copy(update={"corpus": folder, "store": f"{folder}/store"})
        compressor = Compressor.load(config.spec())
        stores = {
            ratio: KVStore.open(config.store, identity=identity, create=True)
            for ratio, identity in compressor.identities.items()
        }
        work = Work(
            compressor,
            stores,
            storage=open_storage(config.store),
            namespace=config.namespace,
            run="bench",
            max_document_bytes=config.max_document_bytes,
        )
        sources = [_unit_document(source, config) for source in _sources(4 * documents, words)]
        work.extract(sources[:1], Tally())
        seconds = {n: _seconds(work, sources[:n]) for n in (documents, 4 * documents)}
    per_document = {n: taken / n for n, taken in seconds.items()}
    report.ratios["time_per_token_growth"] = Ratio(
        value=per_document[4 * documents] / per_document[documents],
        baseline=f"time a token of {documents} documents, against {4 * documents} of the same length",
        limit=LINEAR_LIMIT,
    )
    report.figures["work_s_by_documents"] = seconds


def _seconds(work: Work, documents: list[UnitDocument]) -> float:
    started = time.perf_counter()
    work.extract(documents, Tally())
    return time.perf_counter() - started


def _loop(compressor: Compressor, ids: list[list[int]], config: ExtractConfig) -> float:
    """Seconds of the bare loop, over groups of the size of a unit."""
    group: list[list[int]] = []
    started = time.perf_counter()
    for place, part in enumerate(ids):
        group.append(part)
        if sum(map(len, group)) >= config.shard_tokens or place == len(ids) - 1:
            compressor.extractor.extract_ratios(group, config.ratios, force_ratio=True)
            group = []
    return time.perf_counter() - started


def _driver_peak_bytes(count: int) -> int | None:
    with tempfile.TemporaryDirectory(prefix="c2kv-bench-") as folder:
        store = KVStore.open(f"{folder}/store", create=True)
        index = Index(open_storage(store.uri), buckets=DEFAULT_BUCKETS)
        index.table.upsert(made_up_index(count))
        with (Path(folder) / CORPUS).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"id": f"doc-{n}", "text": f"tiny {n}"}) + "\n" for n in range(count))
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as fresh:
            return fresh.submit(_planning_peak_bytes, folder).result()


def _planning_peak_bytes(folder: str) -> int | None:
    """Of this process, its code included."""
    process_bytes = psutil.Process().memory_info().rss
    ledger = Ledger.open(f"{folder}/store", namespace=INDEX_NAMESPACE)
    stored = {4: stored_contents(ledger, made_up_index(1)["fingerprint"][0].as_py())}
    above = peak_bytes(lambda: plan_extraction(Path(folder) / CORPUS, stored), "cpu")
    return None if above is None else process_bytes + above


def _sources(documents: int, words: int) -> list[SourceDocument]:
    drawn = random.Random(0)
    return [
        SourceDocument(f"doc-{n}", f"Page {n}", " ".join(drawn.choices(_WORDS, k=words)))
        for n in range(documents)
    ]


def _write(folder: Path, sources: Sequence[SourceDocument]) -> Path:
    file = folder / "corpus.jsonl"
    lines = [json.dumps({"id": s.doc_id, "title": s.title, "text": s.text}) + "\n" for s in sources]
    file.write_text("".join(lines), encoding="utf-8")
    return file


def _unit_document(source: SourceDocument, config: ExtractConfig) -> UnitDocument:
    return UnitDocument(
        doc_id=source.doc_id,
        title=source.title,
        text=source.text,
        metadata=None,
        content_hash=content_hash(source.title, source.text),
        ratios=config.ratios,
        stored=False,
    )
