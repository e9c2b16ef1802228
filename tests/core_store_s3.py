"""The storage operations on a real S3 server, its faults included, and both back ends by one set of tests."""

import random
import threading
from collections.abc import Callable

import pyarrow as pa
import pytest

from c2kv_core.errors import InputError, StoreError
from c2kv_core.store import KVStore, Storage, open_storage
from c2kv_core.store.names import PROBES
from c2kv_core.store.probe import probe
from c2kv_core.store.s3_client import ObjectStorageError
from c2kv_core.store.s3_storage import PART_BYTES, S3Storage
from c2kv_core.store.storage import GAP_BYTES, TEMPORARY, FileRange, read_ranges
from tests.core_store_kit import make_document, make_identity
from tests.s3_server import S3Server


@pytest.fixture
def storage(uri: str) -> Storage:
    """Both back ends."""
    return open_storage(uri)


def test_files_are_put_listed_read_and_deleted(storage: Storage) -> None:
    assert list(storage.list_files("")) == []
    storage.put("a/one", b"12345")
    storage.put("a/two", pa.py_buffer(b"678"))
    storage.put("b", b"")
    listed = {f.path: f.size_bytes for f in storage.list_files("")}
    assert listed == {"a/one": 5, "a/two": 3, "b": 0}
    assert [f.path for f in storage.list_files("a/")] == ["a/one", "a/two"]
    assert storage.get("a/one").to_pybytes() == b"12345"
    assert storage.get("b").to_pybytes() == b""
    storage.put("a/one", b"new")
    assert storage.get("a/one").to_pybytes() == b"new"
    assert storage.exists("a/one") and not storage.exists("a") and not storage.exists("c")
    assert storage.delete("a/one") and not storage.delete("a/one")
    assert not storage.exists("a/one")
    with pytest.raises(FileNotFoundError):
        storage.get("a/one")
    with pytest.raises(FileNotFoundError):
        storage.get_range("never", offset=0, length=1)


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "a/../../b", "a\0b"])
def test_no_path_leaves_the_store(storage: Storage, path: str) -> None:
    for action in (storage.get, storage.delete, storage.exists, lambda p: storage.put(p, b"x")):
        with pytest.raises(OSError, match=r"leaves the store|embedded null"):
            action(path)


def test_ranges_are_cut_at_the_end_and_aligned(storage: Storage) -> None:
    data = bytes(range(256)) * 8
    storage.put("file", data)
    for offset, length in [(0, 2048), (0, 1), (7, 100), (64, 64), (2040, 100), (2048, 10), (5000, 1), (3, 0)]:
        got = storage.get_range("file", offset=offset, length=length)
        assert got.to_pybytes() == data[offset : offset + length]
        if got.size:
            assert got.address % 64 == offset % 64


def test_many_ranges_come_at_once_in_order(storage: Storage) -> None:
    far = GAP_BYTES + 100
    data = bytes(i % 251 for i in range(3 * far))
    storage.put("one", data)
    storage.put("two", data[::-1])
    wanted = [
        FileRange(path="two", offset=2 * far, length=50),
        FileRange(path="one", offset=10, length=20),
        FileRange(path="gone", offset=0, length=5),
        FileRange(path="one", offset=far + 50, length=300),
        FileRange(path="one", offset=25, length=20),
        FileRange(path="two", offset=len(data) - 5, length=50),
    ]
    found = read_ranges(storage, wanted)
    for asked, got in zip(wanted, found, strict=True):
        if asked.path == "gone":
            assert isinstance(got, FileNotFoundError)
            continue
        assert isinstance(got, pa.Buffer)
        whole = data if asked.path == "one" else data[::-1]
        assert got.to_pybytes() == whole[asked.offset : asked.offset + asked.length]
        assert got.address % 64 == asked.offset % 64


def test_ranges_over_parts_and_the_end_of_a_file(storage: Storage) -> None:
    data = random.Random(0).randbytes(2 * PART_BYTES + 1000)
    storage.put("big", data)
    size = len(data)
    spans = [
        (0, size),
        (10, 100),
        (PART_BYTES - 5, 10),
        (PART_BYTES, PART_BYTES),
        (2 * PART_BYTES - 1, 2000),
        (size - 3, 100),
        (size, 10),
        (size + 5, 10),
        (7, 0),
    ]
    wanted = [FileRange(path="big", offset=offset, length=length) for offset, length in spans]
    seen = []
    for number, got in storage.stream_ranges(wanted):
        offset, length = spans[number]
        assert isinstance(got, pa.Buffer)
        assert got.to_pybytes() == data[offset : offset + length], spans[number]
        seen.append(number)
    assert sorted(seen) == list(range(len(spans)))
    for number, alone in enumerate(wanted):
        (got,) = read_ranges(storage, [alone])
        assert isinstance(got, pa.Buffer)
        assert got.to_pybytes() == data[alone.offset : alone.offset + alone.length], spans[number]


def test_of_many_that_create_one_wins(storage: Storage) -> None:
    won: list[int] = []
    gate = threading.Barrier(12)

    def race(number: int) -> None:
        gate.wait()
        if storage.create("only", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert storage.get("only").to_pybytes() == str(won[0]).encode()
    assert not storage.create("only", b"late")


def test_a_store_is_probed_before_it_is_written(storage: Storage) -> None:
    KVStore.open(storage.uri, create=True)
    assert list(storage.list_files(PROBES)) == []


def test_storage_that_overwrites_is_refused(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(self: Storage, path: str, data: bytes) -> bool:
        self.put(path, data)
        return True

    monkeypatch.setattr(type(storage), "create", overwrite)
    with pytest.raises(StoreError, match="does not keep to `create only if absent`"):
        probe(storage)


# ---- S3 alone


def s3(uri: str) -> S3Storage:
    made = open_storage(uri)
    assert isinstance(made, S3Storage)
    return made


def test_large_objects_go_in_parts(bucket: str) -> None:
    storage = s3(bucket)
    data = bytes(251) + bytes(range(251)) * (2 * PART_BYTES // 251)
    storage.put("large", data)
    assert storage.get("large").to_pybytes() == data
    middle = storage.get_range("large", offset=PART_BYTES - 3, length=PART_BYTES + 10)
    assert middle.to_pybytes() == data[PART_BYTES - 3 : 2 * PART_BYTES + 7]
    assert list(storage.list_files(TEMPORARY)) == []


def test_a_write_that_stopped_midway_is_seen_by_gc_alone(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = s3(bucket)
    # what a killed writer leaves: an upload with a part and no end
    client = storage._client
    place = storage._place("shards/torn")
    upload = client.create_multipart_upload(**place)["UploadId"]
    client.upload_part(**place, UploadId=upload, PartNumber=1, Body=b"x" * 100)
    assert not storage.exists("shards/torn")
    assert [f.path for f in storage.list_files("shards/")] == []
    (unfinished,) = storage.list_files(TEMPORARY)
    assert unfinished.path == f"{TEMPORARY}{upload}/shards/torn"
    assert storage.delete(unfinished.path)
    assert list(storage.list_files(TEMPORARY)) == []
    # a part that fails leaves nothing
    monkeypatch.setattr(S3Storage, "_put_part", lambda *args: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        storage.put("large", bytes(PART_BYTES + 1))
    assert list(storage.list_files(TEMPORARY)) == [] and not storage.exists("large")


def test_a_lost_answer_to_a_create_is_still_a_success(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = s3(bucket)
    client, send = storage._client, storage._client.put_object

    def twice(**request: object) -> object:
        send(**request)  # arrived, but the answer did not: the client tries again
        return send(**request)

    monkeypatch.setattr(client, "put_object", twice)
    assert storage.create("mine", b"1")
    assert not s3(bucket).create("mine", b"1")


@pytest.mark.parametrize(
    "uri", ["s3://", "s3:///x", "s3://b/a/../c", "s3://b/a?b=c", "s3://user@b/x", "s3://b/100%"]
)
def test_malformed_addresses_are_refused(uri: str) -> None:
    with pytest.raises(InputError, match="expected"):
        open_storage(uri)


def wrong_bucket(monkeypatch: pytest.MonkeyPatch) -> str:
    return "s3://no-such-bucket-here/x"


def wrong_secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    return "s3://c2kv-tests/x"


def wrong_key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    return "s3://c2kv-tests/x"


def no_credentials(monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    return "s3://c2kv-tests/x"


def nobody_there(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    return "s3://c2kv-tests/x"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrong_bucket, "there is no such bucket"),
        (wrong_secret, "the secret key is wrong; check AWS_SECRET_ACCESS_KEY"),
        (wrong_key, "does not know the access key; check AWS_ACCESS_KEY_ID"),
        (no_credentials, "no AWS credentials found; set AWS_ACCESS_KEY_ID"),
        (nobody_there, "nothing answers at http://127.0.0.1:9"),
    ],
)
def test_what_is_wrong_is_said(
    bucket: str, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], str], message: str
) -> None:
    uri = spoil(monkeypatch)
    with pytest.raises(ObjectStorageError, match=message):
        open_storage(uri).put("x", b"1")
    with pytest.raises(StoreError, match=message) as raised:
        KVStore.open(uri, identity=make_identity(), create=True)
    assert "\n" not in str(raised.value)


def test_a_store_lives_in_a_bucket(bucket: str, s3_server: S3Server) -> None:
    store = KVStore.open(bucket, identity=make_identity(), create=True, index_refresh_s=0.0)
    store.put([make_document(f"d{n}", seed=n) for n in range(5)])
    store.put([make_document("d1", seed=9)])
    again = KVStore.open(bucket, identity=make_identity())
    found = again.get(["d0", "d1", "d9"], namespace="acme")
    assert [type(found[i]).__name__ for i in ("d0", "d1", "d9")] == [
        "StoredDocument",
        "StoredDocument",
        "Miss",
    ]
    assert store.delete(["d0"], namespace="acme") == 1
    assert store.verify().ok
