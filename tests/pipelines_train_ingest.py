"""Data files to the run's own rows: the same by Ray Data as in this process, kept whatever becomes of the files."""

import gzip
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from c2kv_core.errors import CorpusError, InputError, TrainingError
from c2kv_core.store import open_storage
from pipelines.train import ingest
from pipelines.train.config import TrainConfig
from pipelines.train.folder import RunFolder
from pipelines.train.ingest import ROWS, dropped_rows, open_rows, take_in
from pipelines.train.reading import RowReader
from pipelines.train.row import Passage, TrainRow
from pipelines.train.row_table import RowTable, row_pieces
from pipelines.train.run import train
from pipelines.train.sampler import DocumentSampler
from tests.pipelines_sources import write_jsonl
from tests.pipelines_train_kit import losses, tiny_model_dir, train_config, tree_file, tree_row

# ---- tables


def many_rows(count: int) -> list[TrainRow]:
    """Rows that share documents, with texts of every kind."""
    passages = [Passage(f"d{n}", "t" * (n % 3), f"text\n{n} \U0001f333 \0") for n in range(count // 2 + 1)]
    return [
        TrainRow(
            row_id=f"r{n}",
            documents=(passages[n // 2], passages[(n * 7) % len(passages)]),
            supporting=frozenset({passages[n // 2].doc_id}),
            question=f"q{n}?",
            answer="a",
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("piece_bytes", [1, 2**20])
def test_a_table_is_the_rows_it_was_made_of(count: int, piece_bytes: int) -> None:
    rows = many_rows(count)
    pieces = list(row_pieces(rows, piece_bytes=piece_bytes))
    assert sum(size for _, size in pieces) == count
    assert (len(pieces) > 1) == (piece_bytes == 1 and count > 256)
    table = RowTable(data for data, _ in pieces)
    assert list(table) == rows
    assert (table[-1], table[1:3]) == (rows[-1], rows[1:3])
    with pytest.raises(IndexError, match=f"a row from 0 to {count - 1}"):
        table[count]


def test_documents_and_questions_are_found_as_by_looking_at_all_rows() -> None:
    rows = many_rows(700)
    table = RowTable(data for data, _ in row_pieces(rows, piece_bytes=1))
    once = {document.doc_id: document for row in rows for document in row.documents}
    assert list(table.pool) == list(once.values())
    for doc_id in [*once, "nobody's"]:
        found = [table[number] for number, _ in table.asking(doc_id, within=set(once))]
        assert found == [row for row in rows if min(row.supporting) == doc_id]
        assert table.asking(doc_id, within=set()) == []


def test_of_many_questions_on_a_document_only_those_drawn_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manual = tree_row(0)
    path = write_jsonl(tmp_path / "manual.jsonl", [{**manual, "id": n} for n in range(1000)])
    files, _ = open_rows(train_config(tmp_path, Path("unused"), data=[str(path)]))
    row, decode, decoded = files[0].rows[500], RowTable.__getitem__, []

    def note(table: RowTable, number: Any) -> Any:
        decoded.append(number)
        return decode(table, number)

    monkeypatch.setattr(RowTable, "__getitem__", note)
    random = np.random.default_rng(0)
    sample = DocumentSampler(files, questions=9).sample(0, row, (4,), counts=(1, 1), random=random)
    assert len({other.row_id for other in (row, *sample.others)}) == 9
    assert len(decoded) <= 10


def test_a_table_of_no_rows_is_empty() -> None:
    table = RowTable([])
    assert (len(table), len(table.pool), table.asking("d0", within={"d0"})) == (0, 0, [])


# ---- taking in


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Two data files with faults, one of them packed, and a held-out file. No model is loaded."""
    lines = [json.dumps(tree_row(place)).encode() for place in range(40)]
    lines[3], lines[5] = b"{", b'{"id": "\xff"}'
    lines[7] = json.dumps(tree_row(7, question="\ud83d?")).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    (tmp_path / "b.json").write_text(json.dumps([tree_row(1, id=7), tree_row(2, answers=[])]))
    tree_file(tmp_path / "dev.jsonl", rows=4)
    files: dict[str, Any] = {"data": [{"path": "a.jsonl.gz", "limit": 30}, "b.json"], "dev": ["dev.jsonl"]}
    return train_config(tmp_path, Path("unused"), data_dir=str(tmp_path), **files)


def test_bad_rows_are_counted_and_the_rest_is_taken(config: TrainConfig) -> None:
    (a, b), (dev,) = open_rows(config)
    assert (a.name, b.name, dev.name) == ("a", "b", "dev")
    assert [len(file.rows) for file in (a, b, dev)] == [27, 1, 4]
    assert a.dropped == {"unreadable": 3}
    assert a.first_fault is not None and a.first_fault.startswith("line 4: unreadable")
    assert dropped_rows([a, b]) == {"unreadable": 3, "no answer": 1}
    assert b.rows[0].row_id == "7"


def test_ray_data_takes_in_what_this_process_does(ray_cluster: None, config: TrainConfig) -> None:
    alone, spread = RunFolder(config), RunFolder(config.model_copy(update={"run": "spread"}))
    take_in(config, alone)
    take_in(spread.config, spread, on_ray=True)
    assert spread.get_json(ROWS) == alone.get_json(ROWS)
    for piece in (piece for table in alone.get_json(ROWS) for piece in table["pieces"]):
        assert spread.storage.get(piece["path"]) == alone.storage.get(piece["path"])


@pytest.mark.parametrize("on_ray", [False, True])
def test_a_file_without_a_usable_row_ends_it_before_anything_counts(
    request: pytest.FixtureRequest, config: TrainConfig, tmp_path: Path, on_ray: bool
) -> None:
    if on_ray:
        request.getfixturevalue("ray_cluster")
    (tmp_path / "b.json").write_text("[1]")
    folder = RunFolder(config)
    expected = r"usable rows in .*b.json, found none; the first fault: row 1: unreadable: expected an object, got int$"
    with pytest.raises(CorpusError, match=expected):
        take_in(config, folder, on_ray=on_ray)
    assert not folder.storage.exists(ROWS)
    (tmp_path / "b.json").write_text(json.dumps([tree_row(1)]))
    take_in(config, folder, on_ray=on_ray)
    assert [len(file.rows) for file in open_rows(config)[0]] == [27, 1]


@pytest.mark.parametrize("row_id", ["\ud83d", "a\nb", "long" * 10_000])
def test_the_first_fault_is_one_short_line_of_text(ray_cluster: None, tmp_path: Path, row_id: str) -> None:
    rows = [tree_row(0, id=row_id, answers=[]), tree_row(1)]
    (tmp_path / "trees.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = train_config(tmp_path, Path("unused"))
    take_in(config, RunFolder(config), on_ray=True)
    (file,), _ = open_rows(config)
    assert file.first_fault is not None
    assert file.first_fault.encode().startswith(b"line 1: no answer: ")
    assert file.first_fault.isprintable()
    assert len(file.first_fault) <= 300


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "trees.jsonl").write_text(content)
    with pytest.raises(CorpusError, match=r"usable rows in .*trees.jsonl, found no row at all$"):
        open_rows(train_config(tmp_path, Path("unused")))


@pytest.mark.parametrize("key", ["answers", "supporting"])
@pytest.mark.parametrize("value", ["oak", {"text": ["oak"]}])
def test_what_is_no_list_is_not_taken_by_letters_or_keys(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "trees.jsonl").write_text(json.dumps(tree_row(0, **{key: value})))
    with pytest.raises(CorpusError, match=r"line 1: unreadable: expected a list of texts, got .*oak"):
        open_rows(train_config(tmp_path, Path("unused")))


def test_values_that_python_cannot_hold_cost_their_row(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([tree_row(place) for place in range(4)])
    no_text = pa.array([b"\xff", b"b", b"c", b"d"]).view(pa.string())
    late = pa.array([0, 0, 2**62, 0], pa.timestamp("us"))
    pq.write_table(table.append_column("note", no_text).append_column("when", late), tmp_path / "a.parquet")
    (file,), _ = open_rows(train_config(tmp_path, Path("unused"), data=[str(tmp_path / "a.parquet")]))
    assert [row.row_id for row in file.rows] == ["row-1", "row-3"]
    assert file.dropped == {"unreadable": 2}
    assert file.first_fault is not None and "can't decode byte 0xff" in file.first_fault


def test_a_file_that_ends_its_readers_ends_the_run(ray_cluster: None, tmp_path: Path) -> None:
    # Reading waits until somebody writes.
    os.mkfifo(tmp_path / "a.jsonl")
    config = train_config(tmp_path, Path("unused"), data=[str(tmp_path / "a.jsonl")], max_failures=1)
    ended, killed = threading.Event(), set[int]()

    def kill_readers() -> None:
        while not ended.wait(0.05):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if "".join(process.cmdline()).startswith("ray::Map"):
                        process.kill()
                        killed.add(process.pid)

    killer = threading.Thread(target=kill_readers)
    killer.start()
    try:
        with pytest.raises(TrainingError, match=r"^reading the data files stopped: "):
            take_in(config, RunFolder(config), on_ray=True)
    finally:
        ended.set()
        killer.join()
    assert len(killed) == 2


def test_a_run_goes_on_with_the_rows_it_began_with(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "tiny")
    whole = train_config(tmp_path, model, run="whole")
    train(whole)
    # A run of three steps is no part of one of six, so the second is stopped in its third.
    cut = train_config(tmp_path, model, run="cut")
    stopped = RuntimeError("stopped")

    def stop(progress: Any) -> None:
        if progress.step == 3:
            raise stopped

    with pytest.raises(RuntimeError) as caught:
        train(cut, progress=stop)
    assert caught.value is stopped
    data = tmp_path / "trees.jsonl"
    data.write_text(json.dumps(tree_row(0, answers=["another"])))
    train(cut)
    assert losses(cut) == losses(whole)
    data.unlink()
    assert train(cut)["rows"] == 24, "a finished run needs no file"


def test_of_two_drivers_that_take_in_the_first_decides(tmp_path: Path) -> None:
    for name in ("slow", "fast"):
        (tmp_path / name).mkdir()
    first = train_config(tmp_path, Path("unused"), data=["a.jsonl"], data_dir=str(tmp_path / "fast"))
    late = first.model_copy(update={"data_dir": str(tmp_path / "slow")})
    # Reading waits until somebody writes.
    os.mkfifo(tmp_path / "slow/a.jsonl")
    reader = threading.Thread(target=take_in, args=(late, RunFolder(late)))
    reader.start()
    tree_file(tmp_path / "fast/a.jsonl", rows=3)
    taken = [list(file.rows) for file in open_rows(first)[0]]
    (tmp_path / "slow/a.jsonl").write_text(json.dumps(tree_row(7)))
    reader.join()
    assert [list(file.rows) for file in open_rows(first)[0]] == taken
    pieces = list((Path(RunFolder(first).location) / "rows").rglob("*.arrow"))
    assert len(pieces) == len([*first.data, *first.dev])


def test_pieces_that_no_list_names_are_removed(config: TrainConfig) -> None:
    open_rows(config)
    folder = Path(RunFolder(config).location)
    (folder / ROWS).unlink()
    (old,) = (folder / "rows/002").glob("*.arrow")
    tree_file(Path(config.data_path(config.dev[0])), rows=5)
    for _ in range(2):
        (dev,) = open_rows(config)[1]
        assert len(dev.rows) == 5
    assert not old.exists() and len(list((folder / "rows").rglob("*.arrow"))) == 3


def test_sigterm_ends_the_reading_of_files(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminated(RowReader):
        def __iter__(self) -> Iterator[TrainRow]:
            signal.raise_signal(signal.SIGTERM)
            return super().__iter__()

    monkeypatch.setattr(ingest, "RowReader", Terminated)
    # Without it the base, which is not there, would be the next to be looked at.
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert not RunFolder(config).storage.exists(ROWS)


@pytest.mark.parametrize("fault", ["flipped", "missing"])
def test_damaged_rows_are_told(config: TrainConfig, fault: str) -> None:
    open_rows(config)
    (piece,) = (Path(RunFolder(config).location) / "rows/000").glob("*.arrow")
    data = bytearray(piece.read_bytes())
    data[len(data) // 2] ^= 1
    piece.unlink()
    if fault == "flipped":
        piece.write_bytes(data)
    with pytest.raises(TrainingError, match=r"rows/000/00000-\w+.arrow.*remove rows.json there"):
        open_rows(config)


@pytest.mark.parametrize("content", ["", "{", "null", "[]", '[{"path": 1}]'])
def test_a_damaged_list_of_rows_is_told(config: TrainConfig, content: str) -> None:
    open_rows(config)
    (Path(RunFolder(config).location) / ROWS).write_text(content)
    with pytest.raises(TrainingError, match=r"3 tables in .*rows.json, got a damaged list; remove it"):
        open_rows(config)


def test_files_and_run_may_lie_in_a_bucket(config: TrainConfig, tmp_path: Path, bucket: str) -> None:
    storage = open_storage(f"{bucket}/data")
    for name in ("a.jsonl.gz", "b.json", "dev.jsonl"):
        storage.put(name, (tmp_path / name).read_bytes())
    # Beside it one whose name begins alike.
    storage.put("b.json.gz", b"")
    away = config.model_copy(update={"data_dir": f"{bucket}/data", "output": f"{bucket}/runs"})
    here, there = open_rows(config), open_rows(away)
    for one, other in zip([*here[0], *here[1]], [*there[0], *there[1]], strict=True):
        assert list(one.rows) == list(other.rows)
        assert (one.name, one.dropped) == (other.name, other.dropped)
    missing = away.model_copy(update={"dev": (config.data[0].model_copy(update={"path": "c.jsonl"}),)})
    with pytest.raises(
        CorpusError, match=r"data file s3://.*/data/c.jsonl: No such object; .*\(data_dir is s3://"
    ):
        train(missing.model_copy(update={"run": "other"}))


def test_a_bucket_that_cannot_be_reached_is_told(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(TrainingError, match=r"the run folder s3://nobodys/runs/.*no AWS credentials found"):
        train(config.model_copy(update={"output": "s3://nobodys/runs"}))


def test_rows_that_cannot_be_read_now_are_not_thrown_away(config: TrainConfig) -> None:
    open_rows(config)
    (piece,) = (Path(RunFolder(config).location) / "rows/000").glob("*.arrow")
    piece.unlink()
    piece.mkdir()
    with pytest.raises(TrainingError, match=r"rows/000/.*; run the same command again$"):
        open_rows(config)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("~nobody-here/a.jsonl", "got '~nobody-here/a.jsonl': there is no such home directory"),
        ("a\0.jsonl", "cannot read the data file .*: embedded null byte"),
        ("file:///nowhere/a.jsonl", "cannot read the data file /nowhere/a.jsonl: No such file"),
    ],
)
def test_paths_that_are_none_are_told(tmp_path: Path, path: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        train(train_config(tmp_path, Path("unused"), data=[path]))


def test_local_paths_may_be_written_as_uris(config: TrainConfig, tmp_path: Path) -> None:
    below = config.model_copy(update={"data_dir": f"file://{tmp_path}"})
    whole = config.data[0].model_copy(update={"path": f"file://{tmp_path}/a.jsonl.gz"})
    assert below.data_path(config.data[0]) == config.data_path(whole) == str(tmp_path / "a.jsonl.gz")


def test_held_out_files_go_by_their_names(config: TrainConfig) -> None:
    twice = [{"path": "dev.jsonl"}, {"path": "other/dev.json.gz"}]
    with pytest.raises(CorpusError, match=r"held-out files of different names, got dev, dev; rename one"):
        train(TrainConfig.model_validate({**config.model_dump(), "dev": twice}))


def test_held_out_rows_of_which_none_fits_are_told(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "dev.jsonl", [tree_row(0, question="why " * 200)])
    config = train_config(
        tmp_path, tiny_model_dir(tmp_path / "tiny"), dev=[str(tmp_path / "dev.jsonl")], max_row_tokens=100
    )
    with pytest.raises(
        CorpusError, match=r"rows of dev that can be evaluated, found none among 1, the last: too long"
    ):
        train(config)


def test_a_piece_of_another_form_is_no_table() -> None:
    with pytest.raises(pa.ArrowInvalid):
        RowTable([pa.py_buffer(b"ARROW1\0\0 cut off")])
