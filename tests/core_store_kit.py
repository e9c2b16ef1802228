"""What the store's tests share: tiny identities and documents, and work for other processes."""

import os
import signal
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from c2kv_core.document import CompressedDocument, Geometry, StoredDocument
from c2kv_core.identity import Identity
from c2kv_core.store import FORMAT_VERSION, KVStore, Miss, SourceText

GEOMETRY = Geometry(layers=3, kv_heads=2, head_dim=4)


def make_identity(**changes: Any) -> Identity:
    values: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "base_digest": "b" * 64,
        "tokenizer_digest": "t" * 64,
        "rendering_version": 1,
        "splitter_version": 1,
        "document_layout": "turns",
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "geometry": GEOMETRY,
        "sidecar_digest": "s" * 64,
        "ratio": 4,
        "overlap_tokens": 0,
        "residual": "none",
        "max_part_tokens": 1024,
        "slot_dtype": "float32",
        "quantisation": "none",
    }
    return Identity(**{**values, **changes})


def make_document(
    doc_id: str,
    *,
    namespace: str = "acme",
    part_tokens: tuple[int, ...] = (18,),
    identity: Identity | None = None,
    seed: int = 0,
) -> StoredDocument:
    """A document of random slots; the same arguments give the same bits."""
    identity = identity or make_identity()
    generator = torch.Generator().manual_seed(seed)
    return StoredDocument(
        namespace=namespace,
        doc_id=doc_id,
        content_hash=f"{seed:064x}",
        title=f"Title of {doc_id}",
        parts=tuple(_make_part(tokens, identity, generator) for tokens in part_tokens),
    )


def make_text(document: StoredDocument, text: str = "some text") -> SourceText:
    return SourceText(
        namespace=document.namespace,
        doc_id=document.doc_id,
        title=document.title,
        text=text,
        content_hash=document.content_hash,
    )


def _make_part(num_tokens: int, identity: Identity, generator: torch.Generator) -> CompressedDocument:
    slots = -(-num_tokens // identity.ratio)
    shape = (identity.geometry.layers, identity.geometry.kv_heads, slots, identity.geometry.head_dim)
    dtype: torch.dtype = getattr(torch, identity.slot_dtype)
    ends = torch.clamp((torch.arange(slots) + 1) * identity.ratio, max=num_tokens)
    return CompressedDocument(
        keys=torch.randn(shape, generator=generator).to(dtype),
        values=torch.randn(shape, generator=generator).to(dtype),
        slot_positions=ends - 1,
        num_tokens=num_tokens,
        ratio=identity.ratio,
        head_slots=_head_slots(shape, generator) if identity.selection == "heads" else None,
    )


def _head_slots(shape: tuple[int, int, int, int], generator: torch.Generator) -> torch.Tensor:
    """(L, K) entries at random, together L x K x M."""
    layers, heads, slots, _ = shape
    drawn = torch.randint(layers * heads, (layers * heads * slots,), generator=generator)
    return drawn.bincount(minlength=layers * heads).view(layers, heads)


def new_store(folder: Path, *, identity: Identity | None = None, **options: Any) -> KVStore:
    """A store that exists afterwards and sees others' commits at once."""
    return KVStore.open(
        folder / "store",
        identity=identity or make_identity(),
        create=True,
        **{"index_refresh_s": 0.0, **options},
    )


def get_one(store: KVStore, doc_id: str, *, namespace: str = "acme") -> StoredDocument | Miss:
    return store.get([doc_id], namespace=namespace)[doc_id]


def miss_reason(store: KVStore, doc_id: str, *, namespace: str = "acme") -> str | None:
    outcome = get_one(store, doc_id, namespace=namespace)
    return outcome.reason if isinstance(outcome, Miss) else None


def assert_same(outcome: StoredDocument | Miss, expected: StoredDocument) -> None:
    """Equal to the last bit, metadata included."""
    assert isinstance(outcome, StoredDocument), outcome
    for name in ("namespace", "doc_id", "content_hash", "title"):
        assert getattr(outcome, name) == getattr(expected, name)
    assert len(outcome.parts) == len(expected.parts)
    for came, part in zip(outcome.parts, expected.parts, strict=True):
        assert (came.num_tokens, came.ratio) == (part.num_tokens, part.ratio)
        assert came.slot_positions.dtype == torch.int64
        assert torch.equal(came.slot_positions, part.slot_positions)
        assert (came.head_slots is None) == (part.head_slots is None)
        if came.head_slots is not None and part.head_slots is not None:
            assert came.head_slots.dtype == torch.int64
            assert torch.equal(came.head_slots, part.head_slots)
        for a, b in ((came.keys, part.keys), (came.values, part.values)):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert torch.equal(a, b)


def shard_of(store: KVStore, doc_id: str) -> Path:
    row = next(row for row in store.rows() if row.doc_id == doc_id)
    return Path(store.uri) / row.shard


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- other processes


def run_processes(target: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> list[int | None]:
    """Run ``target`` in a fresh interpreter for each tuple, at the same time; their exit codes."""
    context = get_context("spawn")
    processes = [context.Process(target=target, args=values) for values in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    return [process.exitcode for process in processes]


def put_many(folder: Path, own: str, shared: list[str], rounds: int, seed: int) -> None:
    """Put one document of our own and all shared ones, ``rounds`` times."""
    store = new_store(folder)
    for number in range(rounds):
        store.put(
            [
                make_document(f"{own}-{number}", seed=seed),
                *(make_document(doc_id, seed=seed) for doc_id in shared),
            ]
        )


def put_documents(folder: Path, doc_ids: list[str]) -> None:
    new_store(folder).put([make_document(doc_id) for doc_id in doc_ids])


def write_then_die(folder: Path, doc_id: str, seed: int) -> None:
    """Write a shard, and be killed before its rows reach anybody."""
    new_store(folder).write_shard([make_document(doc_id, seed=seed)], run="night")
    os.kill(os.getpid(), signal.SIGKILL)
