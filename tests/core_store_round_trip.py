"""What goes in comes out, bit for bit, mapped and aligned."""

import json
import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from c2kv_core.document import CompressedDocument, Geometry, StoredDocument
from c2kv_core.errors import IdentityError, InputError
from c2kv_core.identity import Identity
from c2kv_core.store import IndexRow
from tests.core_store_kit import (
    assert_same,
    get_one,
    make_document,
    make_identity,
    make_text,
    miss_reason,
    new_store,
    shard_of,
)

WEIRD_IDS = [
    "plain",
    "Plain",
    "PLAIN",
    "a/b/c",
    "/etc/passwd",
    "..",
    "../../store.json",
    "it's",
    'say "hi"',
    "`tick`",
    "x') OR ('1'='1",
    "target.doc_id",
    "100%",
    "a%20b",
    "a b",
    " lead and trail ",
    "tab\tnew\nline",
    "nul\0inside",
    "back\\slash",
    "ünïcode",
    "u\u0308",  # decomposed
    "\u00fc",  # composed: another id
    "日本語の文書",
    "🦜",
    "x" * 1024,
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("part_tokens", [(18,), (16, 5, 1)], ids=["one-part", "three-parts"])
@pytest.mark.parametrize("selection", ["topk", "heads"])
def test_documents_come_back_bit_for_bit(
    tmp_path: Path, dtype: str, part_tokens: tuple[int, ...], selection: str
) -> None:
    identity = make_identity(slot_dtype=dtype, selection=selection)
    store = new_store(tmp_path, identity=identity)
    documents = [make_document(f"d{n}", part_tokens=part_tokens, identity=identity, seed=n) for n in range(4)]
    store.put(documents)
    found = store.get([d.doc_id for d in documents], namespace="acme")
    for document in documents:
        assert_same(found[document.doc_id], document)
    assert store.counters == {"hit": 4, "hit_bytes": sum(d.kv_bytes for d in documents)}


def test_an_empty_part_and_an_empty_document_are_stored(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    documents = [make_document("empty", part_tokens=(0,)), make_document("half", part_tokens=(0, 5, 0))]
    store.put(documents)
    for document in documents:
        assert_same(get_one(store, document.doc_id), document)
    assert store.verify().ok


def test_strided_tensors_are_stored_by_value(tmp_path: Path) -> None:
    document = make_document("a", part_tokens=(16,))
    part = document.parts[0]
    strided = CompressedDocument(
        keys=part.keys.transpose(1, 2).contiguous().transpose(1, 2),
        values=part.values.repeat_interleave(2, dim=3)[..., ::2],
        slot_positions=part.slot_positions,
        num_tokens=part.num_tokens,
        ratio=part.ratio,
    )
    store = new_store(tmp_path)
    store.put(
        [
            StoredDocument(
                namespace="acme",
                doc_id="a",
                content_hash=document.content_hash,
                title=document.title,
                parts=(strided,),
            )
        ]
    )
    assert_same(get_one(store, "a"), document)


@pytest.mark.parametrize(
    "geometry", [Geometry(layers=1, kv_heads=1, head_dim=1), Geometry(layers=3, kv_heads=2, head_dim=5)]
)
def test_kv_starts_at_64_byte_offsets_of_the_file(tmp_path: Path, geometry: Geometry) -> None:
    identity = make_identity(slot_dtype="bfloat16", geometry=geometry)
    store = new_store(tmp_path, identity=identity)
    documents = [
        make_document("i" * length, part_tokens=(4 * length, 3, 9), identity=identity)
        for length in range(1, 9)
    ]
    store.put(documents)
    # The file as any Arrow reader sees it, without the store's own code.
    with pa.memory_map(str(shard_of(store, "i"))) as mapped:
        start = mapped.read_buffer().address
        assert start % 64 == 0
        reader = pa.ipc.open_file(mapped)
        assert reader.num_record_batches == len(documents)
        for number, document in enumerate(documents):
            batch = reader.get_batch(number)
            assert batch["doc_id"].to_pylist() == [document.doc_id] * 3
            _, offsets, data = batch["kv"].buffers()
            starts = memoryview(offsets).cast("q")
            for index, part in enumerate(document.parts):
                address = data.address + starts[index] + batch["kv_offset"][index].as_py()
                assert address % 64 == 0
                assert batch["kv_length"][index].as_py() == part.kv_bytes
                kv = torch.stack([part.keys, part.values], dim=1).view(torch.uint8).numpy().tobytes()
                assert data.slice(address - data.address, part.kv_bytes).to_pybytes() == kv
    for document in documents:
        outcome = get_one(store, document.doc_id)
        assert isinstance(outcome, StoredDocument)
        assert all(part.keys.data_ptr() % 64 == 0 for part in outcome.parts)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to see what is mapped")
def test_tensors_are_views_of_the_mapped_shard(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    document = make_document("a")
    store.put([document])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome = get_one(store, "a")
    assert isinstance(outcome, StoredDocument)
    shard = shard_of(store, "a")
    spans = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(shard))
    ]
    for tensor in (outcome.parts[0].keys, outcome.parts[0].values):
        assert any(start <= tensor.data_ptr() < end for start, end in spans)
    # A file that is removed lives on for those who hold tensors of it.
    shard.unlink()
    assert_same(outcome, document)
    assert not any(str(shard) in link for link in _open_files())


def _open_files() -> list[str]:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_symlink():
            links.append(str(entry.readlink()) if entry.exists() else "")
    return links


def test_ids_of_any_unicode_are_kept_apart(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    documents = {doc_id: make_document(doc_id, seed=n) for n, doc_id in enumerate(WEIRD_IDS)}
    store.put(list(documents.values()), texts=[make_text(d, f"text of {i}") for i, d in documents.items()])
    # Again, so that every id also goes through the matched side of the merge.
    store.put(list(documents.values()))
    assert len(store.rows()) == len(WEIRD_IDS)
    for doc_id, document in documents.items():
        assert_same(get_one(store, doc_id), document)
    texts = store.text(WEIRD_IDS, namespace="acme")
    assert {i: t.text for i, t in texts.items()} == {i: f"text of {i}" for i in WEIRD_IDS}
    for doc_id in WEIRD_IDS[::2]:
        assert store.delete([doc_id], namespace="acme") == 1
    assert {row.doc_id for row in store.rows()} == set(WEIRD_IDS[1::2])
    assert set(store.text(WEIRD_IDS, namespace="acme")) == set(WEIRD_IDS[1::2])


@pytest.mark.parametrize("doc_id", ["", "\ud800"], ids=["empty", "lone-surrogate"])
def test_ids_that_cannot_be_stored_are_refused_and_never_found(tmp_path: Path, doc_id: str) -> None:
    store = new_store(tmp_path)
    with pytest.raises(InputError, match="document id"):
        store.put([make_document(doc_id)])
    assert miss_reason(store, doc_id) == "not_found"
    assert store.delete([doc_id], namespace="acme") == 0
    assert store.text([doc_id], namespace="acme") == {}


@pytest.mark.parametrize("namespace", ["", "Upper", "a/b", ".", "..", "x" * 65, "ü", "a b", "a\n"])
def test_malformed_namespaces_are_refused(tmp_path: Path, namespace: str) -> None:
    store = new_store(tmp_path)
    with pytest.raises(InputError, match="namespace"):
        store.put([make_document("a", namespace=namespace)])
    with pytest.raises(InputError, match="namespace"):
        store.get(["a"], namespace=namespace)
    with pytest.raises(InputError, match="namespace"):
        store.delete(["a"], namespace=namespace)
    assert store.rows() == []


def test_namespaces_are_separate(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    mine, theirs = make_document("same", seed=1), make_document("same", namespace="other", seed=2)
    store.put([mine, theirs], texts=[make_text(mine, "mine"), make_text(theirs, "theirs")])
    assert_same(get_one(store, "same"), mine)
    assert_same(get_one(store, "same", namespace="other"), theirs)
    assert miss_reason(store, "same", namespace="third") == "not_found"
    assert store.delete(["same"], namespace="other") == 1
    assert miss_reason(store, "same", namespace="other") == "not_found"
    assert store.text(["same"], namespace="other") == {}
    assert_same(get_one(store, "same"), mine)
    assert store.text(["same"], namespace="acme")["same"].text == "mine"
    assert {row.shard.split("/")[1] for row in store.rows()} == {"acme"}


def _with_head_slots(counts: Tensor) -> StoredDocument:
    document = make_document("a")
    (part,) = document.parts
    return replace(document, parts=(replace(part, head_slots=counts),))


def test_slots_that_heads_share_out_are_written_only_where_they_are_named(tmp_path: Path) -> None:
    sharing = make_identity(selection="heads")
    plain, shared = new_store(tmp_path / "plain"), new_store(tmp_path / "shared", identity=sharing)
    with pytest.raises(IdentityError, match=r"expected no head_slots in part 0 .* selection is 'none'"):
        plain.put([make_document("a", identity=sharing)])
    with pytest.raises(IdentityError, match=r"expected head_slots in part 0 .* selection is 'heads'"):
        shared.put([make_document("a")])
    # 18 tokens have 5 slots: 30 entries over 3 layers of 2 heads.
    for counts in ([[5, 5], [5, 5], [5, 4]], [[5, 5], [5, 5], [11, -1]], [[5, 5, 5], [5, 5, 5]]):
        with pytest.raises(IdentityError, match=r"shape \(L, K\) = \(3, 2\) with a sum of 30"):
            shared.put([_with_head_slots(torch.tensor(counts))])
    shared.put([document := _with_head_slots(torch.tensor([[18, 1], [3, 3], [4, 1]]))])
    assert_same(get_one(shared, "a"), document)


@pytest.mark.parametrize(
    ("identity", "field"),
    [
        (make_identity(ratio=8), "ratio"),
        (make_identity(slot_dtype="bfloat16"), "dtype"),
        (make_identity(geometry=Geometry(layers=3, kv_heads=2, head_dim=8)), "shape"),
    ],
    ids=["ratio", "dtype", "geometry"],
)
def test_slots_of_another_setting_are_not_written(tmp_path: Path, identity: Identity, field: str) -> None:
    store = new_store(tmp_path)
    with pytest.raises(IdentityError, match=field):
        store.put([make_document("a", identity=identity)])
    assert store.rows() == []


def test_index_rows_travel_as_plain_values(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    rows = store.write_shard([make_document("a"), make_document("b", namespace="other")], run="night-1")
    assert [row.shard.split("/")[3] for row in rows] == ["night-1"] * 2
    assert store.rows() == []  # durable, not visible
    assert pickle.loads(pickle.dumps(rows)) == rows
    through_json = [IndexRow.from_dict(json.loads(json.dumps(row.to_dict()))) for row in rows]
    assert through_json == rows
    store.commit(through_json)
    assert store.rows() == rows
    assert_same(get_one(store, "a"), make_document("a"))
