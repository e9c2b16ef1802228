"""The numbers and names in docs/store.md are those of the code."""

import re
from pathlib import Path

import pytest

from c2kv_core.store.index import INDEX_SCHEMA
from c2kv_core.store.record import SHARED_RECORD_SCHEMA, layer_bytes
from c2kv_core.store.s3_storage import PART_BYTES

TEXT = (Path(__file__).parent.parent / "docs" / "store.md").read_text()
LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128


def rows() -> list[list[str]]:
    lines = [line for line in TEXT.splitlines() if line.startswith(("| bfloat16", "| int8"))]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_cost_sheet_follows_from_the_layout(row: list[str]) -> None:
    codec, ratio, slots, *told = row
    count = -(-1000 // int(ratio))
    size = LAYERS * layer_bytes(
        kv_heads=KV_HEADS,
        slots=count,
        head_dim=HEAD_DIM,
        dtype="bfloat16",
        quantisation="int8" if codec == "int8" else "none",
    )
    assert int(slots) == count
    assert told == [f"{size / 1e6:.1f}", f"{size / 1e6:.1f}", f"{size * 1e8 / 1e15:.2f}"]


def test_there_is_a_row_for_each_codec_and_ratio() -> None:
    assert len(rows()) == 6


def test_every_column_is_named() -> None:
    missing = [name for name in {*INDEX_SCHEMA.names, *SHARED_RECORD_SCHEMA.names} if name not in TEXT]
    assert missing == []


def test_full_caches_and_parts_are_told_right() -> None:
    full = 1000 * LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
    assert f"{full / 1e6:.0f} MB a document" in TEXT and f"{full * 1e8 / 1e15:.1f} PB" in TEXT
    assert f"parts of {PART_BYTES // 2**20} MiB" in TEXT


def test_the_tests_it_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    there = "\n".join(file.read_text() for file in Path(__file__).parent.glob("*.py"))
    assert named and [name for name in sorted(named) if f"def {name}(" not in there] == []
