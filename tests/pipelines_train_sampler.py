"""What a row's place in a run draws for it: documents, packs, gaps, further questions."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines.train.config import DataFile
from pipelines.train.ingest import RowFile
from pipelines.train.sampler import DocumentSampler
from tests.pipelines_sources import write_jsonl
from tests.pipelines_train_kit import files_of, read_files, train_config, tree_row


@pytest.fixture
def file(tmp_path: Path) -> RowFile:
    """Eight rows."""
    (made,) = files_of(tmp_path, 8)
    return made


def test_supporting_documents_are_there_among_distractors_of_the_file(file: RowFile) -> None:
    sampler = DocumentSampler([file])
    places, sizes = Counter[int](), Counter[int]()
    known = {d.doc_id for row in file.rows for d in row.documents}
    for seed in range(200):
        row = file.rows[seed % 8]
        sample = sampler.sample(0, row, (4,), counts=(2, 4), random=np.random.default_rng(seed))
        ids = [d.doc_id for d in sample.documents]
        assert len(set(ids)) == len(ids) and set(ids) <= known
        (supporting,) = row.supporting
        places[ids.index(supporting)] += 1
        sizes[len(ids)] += 1
    assert set(sizes) == {2, 3, 4}
    assert set(places) == {0, 1, 2, 3}, "the order is shuffled"


def test_packed_documents_hold_the_same_texts_in_order(file: RowFile) -> None:
    sizes = Counter[int]()
    for seed in range(200):
        apart, packed = (
            DocumentSampler([file], questions=2, passages=2, pack_words=most).sample(
                0, file.rows[seed % 8], (2, 4), counts=(3, 3), random=np.random.default_rng(seed)
            )
            for most in (0, 60)
        )
        sizes[len(packed.documents)] += 1
        assert "+".join(d.doc_id for d in packed.documents) == "+".join(d.doc_id for d in apart.documents)
        assert packed.documents[0].title == apart.documents[0].title
        whole = "\n".join(d.text for d in packed.documents)
        assert all(d.text in whole for d in apart.documents)
        assert len(packed.ratios[0]) == len(packed.documents)
        assert all(p.text in whole and "+" not in p.doc_id for p in packed.passages)
    # Each document has 14 words: two of them fit a limit of 28 or more of 60, three one of 42.
    assert sizes[3] > sizes[1] > sizes[2] > 30, sizes


def test_gaps_change_nothing_else_and_are_mostly_small(file: RowFile) -> None:
    totals, far = [], 0
    for seed in range(300):
        drawn = [
            DocumentSampler([file], passages=1, gap_tokens=most).sample(
                0, file.rows[seed % 8], (2, 4), counts=(1, 4), random=np.random.default_rng(seed)
            )
            for most in (0, 1000)
        ]
        assert drawn[0].gaps == () and replace(drawn[1], gaps=()) == drawn[0]
        gaps = drawn[1].gaps
        assert len(gaps) == len(drawn[1].documents) + 1 and min(gaps) >= 0
        totals.append(sum(gaps))
        far += gaps[-1] > 300
    assert max(totals) <= 1000 and max(totals) > 900
    assert 200 < float(np.median(totals)) < 300, "a quarter of the most, as the square of a uniform number"
    assert far > 10, "questions too stand apart"


def test_further_questions_are_those_that_the_documents_answer(tmp_path: Path) -> None:
    rows = [tree_row(place % 3, id=f"row-{place}", question=f"Question {place}?") for place in range(9)]
    both = [rows[0]["documents"][0], rows[1]["documents"][0]]
    rows.append(tree_row(0, id="row-both", documents=both, supporting=[d["id"] for d in both]))
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    read = read_files(train_config(tmp_path, Path("unused")), (DataFile(path=str(file)),))
    seen = set()
    for seed in range(40):
        sampler = DocumentSampler(read, questions=4)
        sample = sampler.sample(
            0, read[0].rows[seed % 9], (4,), counts=(1, 2), random=np.random.default_rng(seed)
        )
        there = {d.doc_id for d in sample.documents}
        assert 2 <= len(sample.others) <= 3
        assert len({r.row_id for r in (sample.row, *sample.others)}) == len(sample.others) + 1
        assert all(r.supporting <= there for r in sample.others)
        seen |= {r.row_id for r in sample.others}
    assert seen == {r.row_id for r in read[0].rows}
