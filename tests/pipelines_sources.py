"""Reading a corpus: every form, every fault with its place."""

import gzip
import json
import os
import signal
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from c2kv_core import SourceDocument
from c2kv_core.errors import C2KVError, CorpusError
from c2kv_core.text import content_hash
from pipelines.corpus.scan import digest_of
from pipelines.plan import Stored, corpus_documents, plan_extraction

ROWS = [
    {"id": "a/1", "title": "Ash", "text": "The ash has grey bark."},
    {"id": "ü", "title": None, "text": "Text without a title.\nTwo lines."},
    {"id": "c", "text": "No title key."},
]
EXPECTED = [SourceDocument(str(r["id"]), str(r.get("title") or ""), str(r["text"])) for r in ROWS]


def held(hashes: dict[str, str]) -> Stored:
    """What a store holds, by id."""
    return Stored.of((doc_id, digest_of(content)) for doc_id, content in hashes.items())


def write_jsonl(file: Path, rows: list[object]) -> Path:
    """One JSON value a line."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_json_lines_with_and_without_gzip(tmp_path: Path, name: str) -> None:
    assert list(corpus_documents(write_jsonl(tmp_path / name, list(ROWS)))) == EXPECTED


def test_blank_lines_are_no_documents(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "corpus.jsonl", list(ROWS))
    file.write_text(f"\n{file.read_text()}\n  \n")
    assert list(corpus_documents(file)) == EXPECTED


def test_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "corpus.parquet")
    assert list(corpus_documents(tmp_path / "corpus.parquet")) == EXPECTED


def test_folder_of_text_files_takes_ids_from_paths_and_titles_from_headings(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "oak.md").write_text("# The oak\n\nIt is tall.")
    (tmp_path / "plain.txt").write_text("No heading.")
    (tmp_path / "ignored.pdf").write_bytes(b"%PDF")
    assert list(corpus_documents(tmp_path)) == [
        SourceDocument("plain", "", "No heading."),
        SourceDocument("sub/oak", "The oak", "\nIt is tall."),
    ]


def test_limit_takes_the_first_documents_and_reads_no_further(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "corpus.jsonl", [*ROWS[:2], "not an object"])
    assert list(corpus_documents(file, limit=2)) == EXPECTED[:2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x", "text": "t"', "line 2: broken JSON"),
        ('["x"]', "line 2: expected an object"),
        ('{"text": "t"}', "line 2: expected a non-empty string id, got None"),
        ('{"id": 7, "text": "t"}', "line 2: expected a non-empty string id, got 7"),
        ('{"id": "x"}', "line 2: expected text as a string in document 'x', got none"),
        ('{"id": "x", "title": 3, "text": "t"}', "line 2: expected title as a string"),
        ('{"id": "x", "text": "\\ud800"}', "line 2: text of document 'x' holds half a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(CorpusError, match=message) as caught:
        list(corpus_documents(file))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_rows_are_told_of_together(tmp_path: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"id": "a"}\n{"id": "b", "text": "B."}\n{broken\n[]\n')
    with pytest.raises(
        CorpusError, match=r"line 1: .*; .*line 3: broken JSON.*; .*line 4: expected an object"
    ) as told:
        plan_extraction(corpus, {4: Stored.of(())})
    assert "\n" not in str(told.value) and "more" not in str(told.value)
    corpus.write_text('{"id": "a"}\n' * 1000)
    with pytest.raises(CorpusError, match=r"line 10: .*perhaps more") as told:
        plan_extraction(corpus, {4: Stored.of(())})
    assert "line 11" not in str(told.value)


def test_bytes_that_are_no_text_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"ab\xff\xfe")
    with pytest.raises(CorpusError, match=r"bad\.txt, offset 2 of the text: expected UTF-8"):
        list(corpus_documents(tmp_path))


@pytest.mark.parametrize("name", ["bad.jsonl", "bad.jsonl.gz"])
def test_a_line_that_is_no_text_is_named_wherever_it_is(tmp_path: Path, name: str) -> None:
    file = write_jsonl(tmp_path / name, [{"id": str(i), "text": "x" * 50} for i in range(2000)])
    whole = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    whole += b'{"id": "z", "text": "\xff"}\n'
    file.write_bytes(gzip.compress(whole) if file.suffix == ".gz" else whole)
    with pytest.raises(CorpusError, match="line 2001: expected UTF-8 text"):
        list(corpus_documents(file))


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "cut.parquet"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b'{"id": "a", "text": "t"}\n' * 50)[:40])
    with pytest.raises(CorpusError, match=name.replace(".", r"\.")):
        list(corpus_documents(tmp_path / name))


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "cut.csv.zst"])
def test_a_packed_file_without_a_byte_is_no_empty_one(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / "whole.jsonl", list(ROWS))
    (tmp_path / name).touch()
    with pytest.raises(CorpusError, match="got an empty file"):
        list(corpus_documents(tmp_path))


def test_what_cannot_be_listed_is_not_taken_for_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "whole.jsonl", list(ROWS))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "absent.jsonl")
    with pytest.raises(CorpusError, match=r"cannot list the corpus .*link\.jsonl"):
        list(corpus_documents(tmp_path))
    (tmp_path / "link.jsonl").unlink()
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if os.fspath(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(CorpusError, match=r"cannot list the corpus .*locked"):
        list(corpus_documents(tmp_path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "absent", "found nothing"),
        (lambda p: (p / "empty").mkdir() or p / "empty", "found none"),
        (lambda p: (p / "x.pdf").write_text("a") and p / "x.pdf", "expected a file ending in"),
    ],
)
def test_no_corpus_says_what_is_accepted(tmp_path: Path, make: object, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        list(corpus_documents(make(tmp_path)))  # type: ignore[operator]


def test_parquet_without_the_columns_names_the_missing_one(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "c.parquet")
    with pytest.raises(CorpusError, match="text is missing"):
        list(corpus_documents(tmp_path / "c.parquet"))


def test_plan_tells_new_changed_unchanged_and_empty_apart(tmp_path: Path) -> None:
    rows = [*ROWS, {"id": "blank", "text": " \n\t"}]
    file = write_jsonl(tmp_path / "corpus.jsonl", list(rows))
    ash = content_hash("Ash", "The ash has grey bark.")
    other = content_hash("", "another content")
    stored = {
        4: held({"a/1": ash, "ü": other}),
        8: held({"a/1": ash, "ü": content_hash(*EXPECTED[1][1:])}),
    }
    plan = plan_extraction(file, stored)
    assert {i: plan.pending.ratios_of(i) for i in ("a/1", "ü", "c", "blank", "never")} == {
        "a/1": (),
        "ü": (4,),
        "c": (4, 8),
        "blank": (),
        "never": (),
    }
    assert (len(plan.pending), plan.new, plan.changed) == (2, 1, 1)
    assert (plan.unchanged, plan.empty, plan.empty_ids, plan.documents) == (1, 1, ("blank",), 4)
    only_new = plan_extraction(file, stored, only_new=True)
    assert only_new.pending.ratios_of("ü") == () and only_new.pending.ratios_of("c") == (4, 8)


def test_duplicate_ids_are_refused_over_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "1.jsonl", list(ROWS))
    write_jsonl(tmp_path / "2.jsonl", [ROWS[2]])
    with pytest.raises(
        CorpusError,
        match=r"id 'c' occurs in .*1\.jsonl \(document 3\) and again in .*2\.jsonl \(document 1\)",
    ):
        plan_extraction(tmp_path, {})


def test_several_processes_read_the_same_plan(tmp_path: Path) -> None:
    for number in range(4):
        write_jsonl(
            tmp_path / f"{number}.jsonl", [{"id": f"{number}-{i}", "text": "x" * i} for i in range(5)]
        )
    stored = {4: held({"1-1": content_hash("", "x"), "2-2": content_hash("", "other")})}
    one, two = (plan_extraction(tmp_path, stored, processes=n) for n in (1, 2))
    assert (one.pending.keys == two.pending.keys).all() and (one.pending.masks == two.pending.masks).all()
    assert (one.all_keys == two.all_keys).all() and one.empty_ids == two.empty_ids == (
        "0-0",
        "1-0",
        "2-0",
        "3-0",
    )
    write_jsonl(tmp_path / "9.jsonl", [{"id": "3-4", "text": "again"}])
    with pytest.raises(
        CorpusError, match=r"'3-4' occurs in .*3\.jsonl \(document 5\) and again in .*9\.jsonl"
    ):
        plan_extraction(tmp_path, {}, processes=2)


def test_a_process_that_dies_over_the_corpus_is_told_of(tmp_path: Path) -> None:
    for number in range(2):
        write_jsonl(tmp_path / f"{number}.jsonl", [{"id": str(number), "text": "x"}])
    with pytest.raises(C2KVError, match="one of 2 processes that read the corpus died"):
        plan_extraction(tmp_path, {4: held({})}, keep=die, processes=2)


def die(doc_id: str) -> bool:
    """What lack of memory does, in a process that reads the corpus."""
    os.kill(os.getpid(), signal.SIGKILL)
    return True


def test_a_corpus_without_documents_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(CorpusError, match="found none"):
        plan_extraction(tmp_path / "empty.jsonl", {4: held({})})
    (tmp_path / "more.jsonl").touch()
    for processes in (1, 2):
        with pytest.raises(CorpusError, match="found none"):
            plan_extraction(tmp_path, {4: held({})}, keep=str.isupper, processes=processes)
    write_jsonl(tmp_path / "more.jsonl", list(ROWS))
    for processes in (1, 2):
        plan = plan_extraction(tmp_path, {4: held({})}, keep=str.isupper, processes=processes)
        assert plan.documents == 0, "a partition may have none"


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    (tmp_path / "lines.jsonl").write_bytes(mark + b'{"id": "a", "text": "x"}\n')
    (tmp_path / "oak.md").write_bytes(mark + b"# The oak\nIt is tall.")
    assert list(corpus_documents(tmp_path)) == [
        SourceDocument("a", "", "x"),
        SourceDocument("oak", "The oak", "It is tall."),
    ]


@pytest.mark.parametrize("line", ["[" * 100_000, '{"id": "a", "text": "x", "n": ' + "9" * 5000 + "}"])
def test_json_beyond_the_parsers_limits_is_a_bad_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"id": "ok", "text": "x"}\n' + line + "\n")
    with pytest.raises(CorpusError, match="line 2"):
        list(corpus_documents(file))


def test_a_gzip_file_damaged_in_the_middle_is_named(tmp_path: Path) -> None:
    random = Random(1)
    rows = [{"id": str(i), "text": random.randbytes(20).hex()} for i in range(2000)]
    content = bytearray(write_jsonl(tmp_path / "corpus.jsonl.gz", list(rows)).read_bytes())
    content[3000:3040] = bytes(40)
    (tmp_path / "corpus.jsonl.gz").write_bytes(content)
    with pytest.raises(CorpusError, match=r"corpus\.jsonl\.gz"):
        list(corpus_documents(tmp_path / "corpus.jsonl.gz"))


def test_a_file_name_that_is_no_text_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.md")).write_text("x")
    with pytest.raises(CorpusError, match="not UTF-8") as caught:
        list(corpus_documents(tmp_path))
    str(caught.value).encode()


@pytest.mark.parametrize("corpus", ["", "~nobody-of-that-name/corpus"])
def test_a_path_that_means_nothing_is_refused(corpus: str) -> None:
    with pytest.raises(CorpusError, match="expected"):
        list(corpus_documents(corpus))
