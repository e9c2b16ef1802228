"""``c2kv bench store``: verified reads and writes beside plain ones of the same bytes, and look-ups by index size."""

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.fs
import torch

from c2kv_core.document import CompressedDocument, Geometry, StoredDocument
from c2kv_core.errors import InputError
from c2kv_core.identity import Identity
from c2kv_core.slots import slot_count, slot_positions
from c2kv_core.store import FORMAT_VERSION, KVStore, open_storage
from c2kv_core.store.index import INDEX_SCHEMA, Index
from c2kv_core.store.names import bucket_of
from c2kv_core.store.reader import IndexReader
from pipelines.bench.config import BenchStoreConfig
from pipelines.bench.report import BenchReport, Ratio, alternate

LOCAL_LIMIT = 0.5
"""Bar of verified local reads over plain ones."""
REMOTE_LIMIT = 0.9
"""Bar of verified S3 reads over the fastest plain client's."""
LOOKUP_LIMIT_MS = 5.0
"""Bar of a look-up of eight ids in the largest index, in a reader that holds its buckets."""
INDEX_NAMESPACE = "bench"
_RANGE_BYTES = 16 * 2**20
_THREADS = 8
_MOST_WRITES = 3
"""Each leaves the documents' bytes behind until the end."""


def bench_store(config: BenchStoreConfig) -> BenchReport:
    """Measure ``verified_over_plain_local``, ``verified_over_plain_s3`` (bytes a second) and ``lookup_ms_of_bar``."""
    report = BenchReport(name="store")
    documents = _documents(config)
    report.figures = {
        "documents": config.documents,
        "bytes_a_document": documents[0].kv_bytes,
        "quantisation": config.quantisation,
    }
    with _folder(config) as folder:
        _measure(report, config, documents, str(folder / "store"), "local", _plain_local)
        if config.s3 is not None:
            with _prefix(config.s3) as uri:
                _measure(report, config, documents, uri, "s3", _plain_s3)
        _lookups(report, config, folder)
    return report


def _measure(
    report: BenchReport,
    config: BenchStoreConfig,
    documents: list[StoredDocument],
    uri: str,
    place: str,
    plain: Callable[[str, str], dict[str, Callable[[], object]]],
) -> None:
    identity = _identity(config)
    store = KVStore.open(uri, identity=identity, create=True)
    rows = store.put(documents)
    size = sum(row.length for row in rows)
    ids = [document.doc_id for document in documents]
    readers = {"verified": lambda: store.get(ids, namespace=INDEX_NAMESPACE), **plain(uri, rows[0].shard)}
    medians = alternate(readers, repeats=config.repeats)
    fastest = min((name for name in medians if name != "verified"), key=medians.__getitem__)
    report.ratios[f"verified_over_plain_{place}"] = Ratio(
        value=medians[fastest] / medians["verified"],
        baseline=f"bytes a second of {fastest}, the same bytes",
        limit=LOCAL_LIMIT if place == "local" else REMOTE_LIMIT,
        higher_is_better=True,
    )
    mib = size / 2**20
    for name, seconds in medians.items():
        report.figures[f"{place}_read_mib_per_s_{name.replace(' ', '_')}"] = mib / seconds
    storage = open_storage(uri)
    data = storage.get(rows[0].shard)
    writers = {"verified": lambda: store.put(documents), "plain": lambda: storage.put("plain", data)}
    for name, seconds in alternate(writers, repeats=min(config.repeats, _MOST_WRITES)).items():
        report.figures[f"{place}_write_mib_per_s_{name}"] = mib / seconds
    storage.delete("plain")


def _plain_local(uri: str, shard: str) -> dict[str, Callable[[], object]]:
    path = str(Path(uri) / shard)

    def mapped_and_summed() -> object:
        with pa.memory_map(path, "r") as file:
            buffer = file.read_buffer()
        return np.frombuffer(buffer.slice(0, buffer.size // 8 * 8), dtype=np.uint64).sum()

    return {"mapping and summing": mapped_and_summed}


def _plain_s3(uri: str, shard: str) -> dict[str, Callable[[], object]]:
    parts = urlsplit(uri)
    path = f"{parts.netloc}/{parts.path.strip('/')}/{shard}"
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    arrow = pyarrow.fs.S3FileSystem(
        endpoint_override=endpoint, region=os.environ.get("AWS_REGION", "us-east-1")
    )
    size = arrow.get_file_info(path).size
    offsets = range(0, size, _RANGE_BYTES)

    def piece(offset: int) -> int:
        with arrow.open_input_file(path) as file:
            return len(file.read_at(min(_RANGE_BYTES, size - offset), offset))

    def pieces() -> object:
        with ThreadPoolExecutor(_THREADS) as pool:
            return sum(pool.map(piece, offsets))

    def whole() -> object:
        with arrow.open_input_file(path) as file:
            return file.readall()

    storage = open_storage(uri)
    return {
        "Arrow in one": whole,
        "Arrow in ranges": pieces,
        "botocore in ranges": lambda: storage.get_range(shard, offset=0, length=size),
    }


def _lookups(report: BenchReport, config: BenchStoreConfig, folder: Path) -> None:
    milliseconds, loading = {}, {}
    for count in config.index_rows:
        place = folder / f"index-{count}"
        KVStore.open(place, create=True)
        index = Index(open_storage(place), buckets=16)
        index.table.upsert(made_up_index(count))
        reader = IndexReader(index, refresh_s=3600.0)
        started = time.perf_counter()
        reader.lookup(INDEX_NAMESPACE, [f"doc-{n}" for n in range(200)])
        loading[count] = time.perf_counter() - started
        random = np.random.default_rng(0)
        times = []
        for _ in range(config.lookups):
            ids = [f"doc-{n}" for n in random.integers(count, size=8)]
            started = time.perf_counter()
            found = reader.lookup(INDEX_NAMESPACE, ids)
            times.append(time.perf_counter() - started)
            assert all(found.values()), "every id is in the index"
        milliseconds[count] = 1000 * float(np.median(times))
        shutil.rmtree(place)
    report.figures["lookup_of_8_ms_by_index_rows"] = milliseconds
    report.figures["loading_all_buckets_s_by_index_rows"] = loading
    largest = max(milliseconds)
    report.ratios["lookup_ms_of_bar"] = Ratio(
        value=milliseconds[largest] / LOOKUP_LIMIT_MS,
        baseline=f"{LOOKUP_LIMIT_MS:g} ms, for eight ids among {largest:,} rows in a reader that holds them",
        limit=1.0,
    )


def made_up_index(count: int) -> pa.Table:
    """Rows of an index of so many documents, of namespace ``INDEX_NAMESPACE`` and one fingerprint."""
    ids = [f"doc-{n}" for n in range(count)]
    columns: dict[str, Any] = {
        "bucket": [bucket_of(INDEX_NAMESPACE, doc_id, buckets=16) for doc_id in ids],
        "namespace": [INDEX_NAMESPACE] * count,
        "doc_id": ids,
        "fingerprint": ["f" * 64] * count,
        "content_hash": [f"{n:064x}" for n in range(count)],
        "shard": [f"shards/{INDEX_NAMESPACE}/{'f' * 64}/run/{n // 16:032x}.arrow" for n in range(count)],
        "offset": np.arange(count, dtype=np.int64) % 16 * 2**25,
        "length": np.full(count, 2**25, dtype=np.int64),
        "parts": np.ones(count, dtype=np.int32),
        "slots": np.full(count, 250, dtype=np.int64),
        "source_tokens": np.full(count, 1000, dtype=np.int64),
        "created_at": [datetime.now(UTC)] * count,
        "head_length": np.full(count, 2048, dtype=np.int64),
        "head_checksum": [f"{n:032x}" for n in range(count)],
    }
    return pa.table(columns, schema=INDEX_SCHEMA)


def _documents(config: BenchStoreConfig) -> list[StoredDocument]:
    slots = slot_count(config.source_tokens, config.ratio)
    shape = (config.layers, config.kv_heads, slots, config.head_dim)
    generator = torch.Generator().manual_seed(0)
    return [
        StoredDocument(
            namespace=INDEX_NAMESPACE,
            doc_id=f"doc-{n}",
            content_hash=f"{n:064x}",
            title="",
            parts=(
                CompressedDocument(
                    keys=torch.randn(shape, generator=generator).to(torch.bfloat16),
                    values=torch.randn(shape, generator=generator).to(torch.bfloat16),
                    slot_positions=slot_positions(config.source_tokens, config.ratio),
                    num_tokens=config.source_tokens,
                    ratio=config.ratio,
                ),
            ),
        )
        for n in range(config.documents)
    ]


def _identity(config: BenchStoreConfig) -> Identity:
    geometry = Geometry(layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim)
    return Identity(
        format_version=FORMAT_VERSION,
        base_digest="bench",
        tokenizer_digest="bench",
        rendering_version=1,
        splitter_version=1,
        document_layout="turns",
        rope={},
        geometry=geometry,
        sidecar_digest="bench",
        ratio=config.ratio,
        overlap_tokens=0,
        residual="none",
        max_part_tokens=config.source_tokens,
        slot_dtype="bfloat16",
        quantisation=config.quantisation,
    )


@contextmanager
def _folder(config: BenchStoreConfig) -> Iterator[Path]:
    if config.directory is None:
        made = Path(tempfile.mkdtemp(prefix="c2kv-bench-"))
    else:
        made = Path(config.directory).expanduser()
        if made.exists():
            raise InputError(f"expected a directory that does not exist yet, found {made}")
        made.mkdir(parents=True)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _prefix(uri: str) -> Iterator[str]:
    """A fresh prefix below a URI, emptied at the end."""
    fresh = f"{uri.rstrip('/')}/bench-{uuid.uuid4().hex}"
    try:
        yield fresh
    finally:
        storage = open_storage(fresh)
        for file in list(storage.list_files("")):
            storage.delete(file.path)
