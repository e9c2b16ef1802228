"""Rows of all layouts, and the order in which a run draws them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from c2kv_core.errors import CorpusError
from c2kv_core.text import ChatRenderer
from pipelines.train.adapters import to_row
from pipelines.train.ahead import RowsAhead
from pipelines.train.config import DataFile, Reconstruction, TrainConfig
from pipelines.train.mixture import Mixture
from pipelines.train.prepare import TOO_LONG, Prepared, Preparer
from pipelines.train.row import RowError
from pipelines.train.run import train
from pipelines.train.sampler import DocumentSampler, Sample
from pipelines.train.stream import RowStream, StepRows
from tests.pipelines_sources import write_jsonl
from tests.pipelines_train_kit import files_of, read_files, train_config, tree_row
from tests.tiny_models import tiny_tokenizer

HOTPOT: dict[str, Any] = {
    "_id": "h1",
    "question": " Who? ",
    "answer": "Ada",
    "supporting_facts": [["B", 0]],
    "context": [["A", ["One.", " Two."]], ["B", ["Three.", "Four."]]],
}
MUSIQUE: dict[str, Any] = {
    "id": "m1",
    "question": "Who?",
    "answer": "",
    "answer_aliases": ["Ada"],
    "paragraphs": [
        {"title": "A", "paragraph_text": "One. Two.", "is_supporting": False},
        {"title": "B", "paragraph_text": "Three. Four.", "is_supporting": True},
    ],
}
OWN = tree_row(0)
IN_COLUMNS = {
    **HOTPOT,
    "supporting_facts": {"title": ["B"], "sent_id": [0]},
    "context": {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three.", "Four."]]},
}


@pytest.mark.parametrize(
    ("record", "form"),
    [
        (HOTPOT, "jsonl"),
        (HOTPOT, "json"),
        ({**HOTPOT, "evidences": []}, "jsonl"),
        (MUSIQUE, "jsonl"),
        # lists of mixed types have no Parquet form: published copies hold the same in columns
        (IN_COLUMNS, "parquet"),
        (MUSIQUE, "parquet"),
    ],
    ids=["hotpotqa", "hotpotqa-list", "2wikimultihopqa", "musique", "hotpotqa-parquet", "musique-parquet"],
)
def test_public_layouts_become_the_same_row(
    tmp_path: Path, model_path: Path, record: dict[str, Any], form: str
) -> None:
    file = tmp_path / f"rows.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist([record]), file)
    else:
        file.write_text(json.dumps(record if form == "jsonl" else [record]))
    (read,) = read_files(train_config(tmp_path, model_path), (DataFile(path=str(file)),))
    (row,) = read.rows
    assert [(d.title, d.text) for d in row.documents] == [("A", "One. Two."), ("B", "Three. Four.")]
    assert row.supporting == {row.documents[1].doc_id}
    assert (row.question, row.answer, row.row_id) == ("Who?", "Ada", record.get("_id", "m1"))


def test_longbench_passages_become_documents() -> None:
    record = {"input": "Who?", "context": "Passage 1:\nA\nPassage 2:\nB", "answers": ["x"], "_id": "l"}
    row = to_row(record, "longbench")
    assert [d.text for d in row.documents] == ["A", "B"]
    assert row.supporting == {d.doc_id for d in row.documents}
    assert [d.text for d in to_row({**record, "context": "One text"}, "auto").documents] == ["One text"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"a": 1}, "no known layout has the keys a"),
        ({**HOTPOT, "context": None}, "not a hotpotqa row"),
        ({**HOTPOT, "question": " "}, "no question"),
        ([1], "expected an object"),
        ({**OWN, "id": None}, "expected an id, got null"),
        ({**OWN, "documents": [{"id": None, "text": "t"}]}, "expected an id, got null"),
    ],
)
def test_a_bad_row_says_why(record: Any, message: str) -> None:
    with pytest.raises(RowError, match=message):
        to_row(record, "auto")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "x", "ending in .jsonl"),
        ("a.json", "{}", "expected a JSON list"),
        ("a.parquet", "x", "cannot read"),
        ("missing.jsonl", None, "cannot read the data file .*missing.jsonl"),
    ],
)
def test_a_bad_file_is_named(
    tmp_path: Path, model_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    config = train_config(tmp_path, model_path, data_dir=str(tmp_path))
    with pytest.raises(CorpusError, match=message):
        read_files(config, (DataFile(path=name),))


@pytest.mark.parametrize("key", ["data", "dev"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "missing.jsonl",
            r"missing.jsonl: No such file or directory; give one that exists \(data_dir is .*\)",
        ),
        ("folder.jsonl", "folder.jsonl: Is a directory"),
        ("rows.csv", "ending in .jsonl"),
    ],
)
def test_files_are_checked_before_ray_and_the_model(
    tmp_path: Path, model_path: Path, key: str, path: str, message: str
) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    config = train_config(tmp_path, model_path, data_dir=str(tmp_path), num_workers=2, **{key: [path]})
    with pytest.raises(CorpusError, match=message):
        train(config)
    assert not (tmp_path / "runs").exists()


def test_a_path_alone_is_a_file_with_defaults(tmp_path: Path, model_path: Path) -> None:
    config = train_config(tmp_path, model_path, data=["a.jsonl", {"path": "b.jsonl", "weight": 2.0}])
    assert config.data == (DataFile(path="a.jsonl"), DataFile(path="b.jsonl", weight=2.0))


@pytest.fixture
def model_path() -> Path:
    """No model is loaded here."""
    return Path("unused")


# ---- drawing


def test_files_are_drawn_by_weight_and_each_row_once_an_epoch(tmp_path: Path) -> None:
    mixture = Mixture(files_of(tmp_path, 8, 40, weights=(3.0, 1.0)), seed=1)
    drawn = [mixture.row(place) for place in range(4000)]
    assert sum(file == 0 for file, _ in drawn) == pytest.approx(3000, abs=100)
    of_second = [row.row_id for file, row in drawn if file == 1]
    for epoch in range(len(of_second) // 40):
        assert len(set(of_second[epoch * 40 : (epoch + 1) * 40])) == 40
    assert of_second[:40] != of_second[40:80]


def test_a_place_holds_the_same_row_in_whatever_order_it_is_asked_for(tmp_path: Path) -> None:
    files = files_of(tmp_path, 8, 40)
    forward, late = Mixture(files, seed=1), Mixture(files, seed=1)
    last = late.row(5000)
    assert [forward.row(p) for p in range(100)] == [late.row(p) for p in range(100)]
    assert forward.row(5000) == last
    other = Mixture(files, seed=2)
    assert [other.row(p) for p in range(100)] != [late.row(p) for p in range(100)]


def stream_of(tmp_path: Path, **changes: Any) -> RowStream:
    config: TrainConfig = train_config(tmp_path, Path("unused"), **changes)
    tokenizer = tiny_tokenizer()
    preparer = Preparer(
        tokenizer,
        ChatRenderer(tokenizer),
        max_part_tokens=config.max_part_tokens,
        max_row_tokens=config.max_row_tokens,
        reconstruction=config.reconstruction,
    )
    return RowStream(config, read_files(config, config.data), preparer)


def samples(stream: RowStream, step: int, *, rank: int = 0, world: int = 1) -> list[Sample]:
    groups = stream.step(step, rank=rank, world=world).micro_batches
    return sorted((row.sample for group in groups for row in group), key=str)


def test_rows_prepared_ahead_are_those_of_the_step(tmp_path: Path) -> None:
    stream, other = stream_of(tmp_path, batch_rows=8), stream_of(tmp_path, batch_rows=8)
    asked: list[int] = []
    begin = other.step

    def noted(step: int, *, rank: int, world: int) -> StepRows:
        asked.append(step)
        return begin(step, rank=rank, world=world)

    other.step = noted  # type: ignore[method-assign]
    ahead = RowsAhead(other, rank=1, world=2, last_step=7)
    # In order, then as a run that goes on elsewhere.
    for step in (1, 2, 6, 7):
        assert ahead.take(step) == stream.step(step, rank=1, world=2)
    assert asked == [1, 2, 3, 6, 7], "each step once, and none after the last"


def test_a_fault_of_the_next_step_is_told_there(tmp_path: Path) -> None:
    # Until the second step rows have one document, and fit.
    stages = [{"from_step": 2, "documents_per_row": [3, 3]}]
    stream = stream_of(tmp_path, max_row_tokens=64, documents_per_row=(1, 1), stages=stages)
    ahead = RowsAhead(stream, rank=0, world=1, last_step=2)
    assert ahead.take(1).micro_batches
    with pytest.raises(CorpusError, match="100 rows in turn cannot be used"):
        ahead.take(2)


@pytest.mark.parametrize("world", [2, 4])
def test_workers_share_a_step_without_changing_it(tmp_path: Path, world: int) -> None:
    stream, other = (stream_of(tmp_path, batch_rows=8) for _ in range(2))
    for step in (3, 1):
        alone = samples(stream, step)
        shared = [samples(other, step, rank=rank, world=world) for rank in range(world)]
        assert {len(part) for part in shared} == {8 // world}
        assert sorted((s for part in shared for s in part), key=str) == alone


def test_every_document_draws_its_own_ratio(tmp_path: Path) -> None:
    stages = [{"from_step": 3, "ratios": [8]}]
    stream = stream_of(tmp_path, batch_rows=64, views_per_row=2, documents_per_row=(3, 3), stages=stages)
    drawn = samples(stream, 1)
    assert all(len(view) == 3 for s in drawn for view in s.ratios)
    counts = Counter(k for s in drawn for view in s.ratios for k in view)
    assert set(counts) == {2, 4}
    assert all(count > 100 for count in counts.values())
    assert any(len(set(view)) == 2 for s in drawn for view in s.ratios), "ratios mix within a row"
    assert any(s.ratios[0] != s.ratios[1] for s in drawn), "views draw apart"
    assert {k for s in samples(stream, 3) for view in s.ratios for k in view} == {8}


def test_stages_change_only_what_they_name(tmp_path: Path) -> None:
    stages = [
        {"from_step": 2, "documents_per_row": [2, 2]},
        {"from_step": 3, "ratios": [8]},
        {"from_step": 4, "documents_per_row": [3, 3]},
    ]
    stream = stream_of(tmp_path, batch_rows=8, documents_per_row=(1, 1), ratios=(4,), stages=stages)
    drawn = {step: samples(stream, step) for step in range(1, 5)}
    assert [{len(s.documents) for s in drawn[step]} for step in drawn] == [{1}, {2}, {2}, {3}]
    assert [{k for s in drawn[step] for v in s.ratios for k in v} for step in drawn] == [{4}, {4}, {8}, {8}]


def prepared(tmp_path: Path, row: dict[str, Any], *, max_row_tokens: int = 4096) -> Prepared:
    config = train_config(tmp_path, Path("unused"))
    file = write_jsonl(tmp_path / "row.jsonl", [row])
    (read,) = read_files(config, (DataFile(path=str(file)),))
    sample = DocumentSampler([read], passages=2).sample(
        0, read.rows[0], (4,), counts=(1, 1), random=np.random.default_rng(0)
    )
    tokenizer = tiny_tokenizer()
    preparer = Preparer(
        tokenizer,
        ChatRenderer(tokenizer),
        max_part_tokens=64,
        max_row_tokens=max_row_tokens,
        reconstruction=Reconstruction(weight=1.0, cue_words=3, max_tokens=5),
    )
    return preparer.prepare(sample)


def test_long_documents_are_split_and_answers_keep_their_end(tmp_path: Path) -> None:
    row = tree_row(0, answers=["a long answer " * 30 + "<|im_end|> end"])
    row["documents"][0]["text"] = "The oak is tall. " * 50
    made = prepared(tmp_path, row)
    (parts,) = made.parts
    assert len(parts) > 1 and all(len(part) <= 64 for part in parts)
    end = tiny_tokenizer().eos_token_id
    answer_ids = made.asked[0].answer_ids
    assert answer_ids.index(end) == len(answer_ids) - 1, "the only end token is the last"
    assert tiny_tokenizer().decode(answer_ids[:-1]).strip() == row["answers"][0].strip()
    with pytest.raises(RowError, match=rf"{TOO_LONG}: row-0 has {made.total_tokens} tokens, .* 100"):
        prepared(tmp_path, row, max_row_tokens=100)


def test_passages_continue_their_cue(tmp_path: Path) -> None:
    words = [f"{place}x" for place in range(60)]
    row = tree_row(0)
    row["documents"][0]["text"] = " ".join(words)
    _, *passages = prepared(tmp_path, row).asked
    assert len(passages) == 2 and all(p.passage and len(p.answer_ids) == 5 for p in passages)
    starts = set()
    for passage in passages:
        question = tiny_tokenizer().decode(passage.question_ids)
        cue = question.split("Continue:")[1].split("<|im_end|>")[0].split()
        start = words.index(cue[0])
        starts.add(start)
        assert cue == words[start : start + 3]
        said = tiny_tokenizer().decode(passage.answer_ids).strip()
        assert " ".join(words[start + 3 :]).startswith(said)
    assert len(starts) == 2, "passages begin at drawn places"


@pytest.mark.parametrize("text", ["oak", "an oak"])
def test_passages_of_a_short_text_have_a_short_cue(tmp_path: Path, text: str) -> None:
    row = tree_row(0)
    row["documents"][0]["text"] = text
    for passage in prepared(tmp_path, row).asked[1:]:
        assert tiny_tokenizer().decode(passage.answer_ids).strip() == "oak"


def test_a_step_without_any_usable_row_says_so(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"100 rows in turn cannot be used, .*; raise max_row_tokens"):
        stream_of(tmp_path, max_row_tokens=64, documents_per_row=(3, 3)).step(1)
