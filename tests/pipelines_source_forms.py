"""Forms of corpora beyond JSON lines: CSV, zstandard, Delta tables, buckets; columns by other names."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from c2kv_core.errors import ConfigError, CorpusError
from c2kv_core.store import open_storage
from pipelines.corpus import Columns, CorpusRow, corpus_files, read_rows
from pipelines.corpus.scan import scan_corpus
from pipelines.extract_config import ExtractConfig
from pipelines.plan import corpus_documents
from tests.pipelines_sources import EXPECTED, ROWS, write_jsonl

MAPPED = Columns(id="key", title="head", text="body", metadata=("lang", "year"))
RECORDS = [
    {"key": "a", "head": "Ash", "body": 'Grey, "rough"\nbark.', "lang": "en", "year": 1999, "unused": 1},
    {"key": "ü", "head": None, "body": "Öl " * 50_000, "lang": None, "year": 2001, "unused": 2},
]
MAPPED_ROWS = [
    ("a", "Ash", 'Grey, "rough"\nbark.', {"lang": "en", "year": 1999}),
    ("ü", "", "Öl " * 50_000, {"lang": None, "year": 2001}),
]


def rows_of(corpus: Path | str, columns: Columns = MAPPED) -> list[CorpusRow]:
    return [row for file in corpus_files(str(corpus)) for row in read_rows(file, columns)]


def plain(rows: list[CorpusRow]) -> list[tuple[str, str, str, dict[str, object]]]:
    return [(*row.document, json.loads(row.metadata or "null")) for row in rows]


def write_csv(file: Path) -> Path:
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, list(RECORDS[0]))
        writer.writeheader()
        writer.writerows(RECORDS)
    return file


def compress(file: Path, name: str) -> Path:
    target = file.with_name(name)
    with pa.CompressedOutputStream(str(target), "zstd") as packed:
        packed.write(file.read_bytes())
    file.unlink()
    return target


def test_json_lines_by_other_names_with_metadata(tmp_path: Path) -> None:
    assert plain(rows_of(write_jsonl(tmp_path / "c.jsonl", list(RECORDS)))) == MAPPED_ROWS


@pytest.mark.parametrize("packed", [False, True])
def test_csv(tmp_path: Path, packed: bool) -> None:
    file = write_csv(tmp_path / "c.csv")
    file = compress(file, "c.csv.zst") if packed else file
    texts = [(i, t, x, {k: "" if v is None else str(v) for k, v in m.items()}) for i, t, x, m in MAPPED_ROWS]
    assert plain(rows_of(file)) == texts


def test_zstandard_json_lines(tmp_path: Path) -> None:
    file = compress(write_jsonl(tmp_path / "c.jsonl", list(ROWS)), "c.jsonl.zst")
    assert list(corpus_documents(file)) == EXPECTED


def test_a_damaged_zstandard_file_is_named(tmp_path: Path) -> None:
    file = compress(write_jsonl(tmp_path / "c.jsonl", list(ROWS)), "c.jsonl.zst")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CorpusError, match=r"c\.jsonl\.zst"):
        list(corpus_documents(file))


def test_delta_table_with_partitions_and_replaced_rows(tmp_path: Path) -> None:
    folder = str(tmp_path / "table")
    write_deltalake(folder, pa.Table.from_pylist(RECORDS), partition_by=["lang"])
    assert sorted(plain(rows_of(folder))) == MAPPED_ROWS
    DeltaTable(folder).delete("key = 'a'")
    assert plain(rows_of(folder)) == MAPPED_ROWS[1:], "files of older versions are no corpus"
    with pytest.raises(CorpusError, match=r"found a Delta table or a store at .*/table: "):
        rows_of(tmp_path)


def test_a_bucket_holds_every_form(tmp_path: Path, bucket: str) -> None:
    storage = open_storage(bucket)
    pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "p.parquet", row_group_size=1)
    write_csv(tmp_path / "c.csv")
    write_jsonl(tmp_path / "j.jsonl.gz", list(RECORDS))
    (tmp_path / "oak.md").write_text("# The oak\nIt is tall.")
    for file in tmp_path.iterdir():
        storage.put(f"in/{file.name}", file.read_bytes())
    for name in ("p.parquet", "j.jsonl.gz"):
        assert plain(rows_of(f"{bucket}/in/{name}")) == MAPPED_ROWS
    assert [row.document.doc_id for row in rows_of(f"{bucket}/in")] == ["a", "ü", "a", "ü", "oak", "a", "ü"]
    write_deltalake(f"{bucket}/table", pa.Table.from_pylist(RECORDS), storage_options=storage.table_options())
    assert plain(rows_of(f"{bucket}/table/")) == MAPPED_ROWS
    with pytest.raises(CorpusError, match=r"found a Delta table or a store at .*/table: "):
        rows_of(bucket)
    with pytest.raises(CorpusError, match="found nothing"):
        rows_of(f"{bucket}/absent")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("key,body,lang,year\na,b,c\n", "line 2: expected 4 fields"),
        ("key,body,lang,year\na,b,c,d,e\n", "line 2: expected 4 fields"),
        ("key,lang,year\na,b,c\n", "body is missing"),
        ("key,body,lang,year,body\na,b,c,d,e\n", "expected one column body, got 2"),
        ('key,body,lang,year\n"a,b\n', "unexpected end of data"),
        ("key,body,lang,year\n,b,c,d\n", "line 2: expected a non-empty string key"),
    ],
)
def test_a_bad_csv_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.csv").write_text(text)
    with pytest.raises(CorpusError, match=message):
        rows_of(tmp_path / "c.csv")


def test_metadata_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    records = [{**RECORDS[0], "year": float("nan")}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "c.parquet")
    with pytest.raises(CorpusError, match="row 1: metadata"):
        rows_of(tmp_path / "c.parquet")


def test_a_metadata_column_that_no_document_has_is_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"id": "a", "text": "A.", "lang": null}\n{"id": "b", "text": "B.", "year": 1}\n')
    files = corpus_files(str(corpus))
    assert scan_corpus(files, Columns(metadata=("lang", "year"))).documents == 2, "one document has each"
    with pytest.raises(CorpusError, match=r"expected langs in the corpus.* none of its 2 documents has it"):
        scan_corpus(files, Columns(metadata=("lang", "langs")))
    assert scan_corpus(files, Columns(metadata=("year",)), limit=1).documents == 1, "the rest was not read"


def test_columns_that_contradict_are_refused() -> None:
    from c2kv_core.config import load_config

    given = ["corpus=c", "store=s"]
    for wrong in (
        "columns.metadata=[text]",
        "columns={metadata: [year]}|keep_text=false",
        "partition=[2,2]",
        "delete_missing=true|limit=3",
        "min_actors=2",
        "promote=true|limit=3",
        "promote=true|partition=[0,2]",
        "quality_check=c2kv eval 'unbalanced",
        "quality_check=''",
        'quality_check="a\\0b"',
    ):
        with pytest.raises(ConfigError):
            load_config(ExtractConfig, None, [*given, *wrong.split("|")])
