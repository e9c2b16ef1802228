"""Question files, and which documents a question gets."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from c2kv_core import SourceDocument
from c2kv_core.errors import ConfigError, CorpusError
from pipelines.eval.config import EvalConfig
from pipelines.eval.methods import check_methods
from pipelines.eval.questions import Question, QuestionMaker
from pipelines.eval.rows import read_rows
from tests.eval_kit import row, write_rows


def questions(file: Path, **settings: Any) -> list[Question]:
    config = EvalConfig(data=str(file), **settings)
    return QuestionMaker(read_rows(file), config, lambda document: len(document.text.split())).questions()


def ids(documents: tuple[SourceDocument, ...]) -> list[str]:
    return [d.doc_id for d in documents]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", [row(place, passage=place // 2) for place in range(24)])


def test_gzip_and_plain_files_read_alike(file: Path) -> None:
    packed = file.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert read_rows(packed) == read_rows(file)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x"', "line 2: broken JSON"),
        ("[1]", "line 2: expected an object with documents, question and answers, got list"),
        (json.dumps(row(9, answers=[])), "line 2: expected answers as a list of at least one string"),
        (json.dumps(row(9, answers=[" "])), "line 2: expected answer as a non-empty string, got ' '"),
        (json.dumps(row(9, question="")), "line 2: expected question as a non-empty string"),
        (json.dumps(row(9, documents=[])), "line 2: expected documents as a list of at least one"),
        (json.dumps(row(9, documents=[{"id": "a", "text": ""}])), "line 2, document 0: expected text"),
        (
            json.dumps(row(9, documents=[{"id": "a", "text": "b", "title": 3}])),
            "expected title as a string, got 3",
        ),
        (json.dumps(row(0)), "question id 'q-0' occurs twice"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row(0)) + "\n" + line + "\n")
    with pytest.raises(CorpusError) as caught:
        read_rows(file)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_a_file_without_questions_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(CorpusError, match="expected at least one question"):
        read_rows(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b"{}" * 999)[:-12]])
def test_a_damaged_gzip_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(content)
    with pytest.raises(CorpusError, match=r"cannot read|broken JSON"):
        read_rows(tmp_path / "rows.jsonl.gz")


def test_distractors_are_other_passages_of_the_file(file: Path) -> None:
    for question in questions(file, distractors=3):
        assert len(set(ids(question.documents))) == 4
        assert question.group[0] in ids(question.documents)


def test_more_distractors_than_the_file_has_gives_all(file: Path) -> None:
    assert {len(q.documents) for q in questions(file, distractors=50)} == {12}


def test_a_limit_draws_from_the_whole_file_and_changes_nothing_else(file: Path) -> None:
    few, more = questions(file, limit=6, distractors=2), questions(file, limit=12, distractors=2)
    assert few == more[:6]
    assert [q.question_id for q in few] != [f"q-{place}" for place in range(6)]
    whole = {q.question_id: q for q in questions(file, distractors=2)}
    assert all(whole[q.question_id] == q for q in more)


def test_the_seed_decides(file: Path) -> None:
    assert questions(file, distractors=4, seed=1) == questions(file, distractors=4, seed=1)
    assert questions(file, distractors=4, seed=1) != questions(file, distractors=4, seed=2)


def test_the_order_of_documents_is_shuffled_unless_kept(file: Path) -> None:
    places = {ids(q.documents).index(q.group[0]) for q in questions(file, distractors=3)}
    assert places == {0, 1, 2, 3}
    assert {ids(q.documents).index(q.group[0]) for q in questions(file, distractors=3, shuffle=False)} == {0}


@pytest.mark.parametrize("target", [5, 40, 100])
def test_contexts_are_filled_up_to_a_size(file: Path, target: int) -> None:
    """Every passage has 13 or 14 words here, and the one that is needed stays even where it is too long."""
    for question in questions(file, context_tokens=target):
        size = sum(len(d.text.split()) for d in question.documents)
        assert question.group[0] in ids(question.documents)
        assert size <= max(target, 14)
        assert size > target - 14


def test_own_documents_come_before_those_of_others(tmp_path: Path) -> None:
    own = [{"id": f"own-{n}", "title": "", "text": "one two three four five"} for n in range(4)]
    file = write_rows(
        tmp_path / "rows.jsonl", [row(0, documents=own, supporting=["own-2"]), *map(row, range(1, 9))]
    )
    first = questions(file, context_tokens=20)[0]
    assert set(ids(first.documents)) == {"own-0", "own-1", "own-2", "own-3"}
    assert first.group == ("own-2",)


def test_two_ways_to_fill_are_refused() -> None:
    with pytest.raises(ValueError, match="expected distractors or context_tokens, got both"):
        EvalConfig(data="x", distractors=1, context_tokens=512)


def test_an_unknown_method_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown method 'trunkate'; did you mean 'truncate'"):
        check_methods(["full", "trunkate"])
    with pytest.raises(ConfigError, match="unknown method 'foo'; the methods are full, none"):
        check_methods(["foo"])
    with pytest.raises(ConfigError, match="'full' several times"):
        check_methods(["full", "none", "full"])
