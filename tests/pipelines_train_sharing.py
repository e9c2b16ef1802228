"""Rows of a micro-batch over each other's documents."""

import numpy as np
import pytest

from pipelines.train.prepare import Prepared
from pipelines.train.setup import TrainingSetup, set_up
from pipelines.train.sharing import shared_rows
from tests.pipelines_train_kit import tiny_model_dir, train_config


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> TrainingSetup:
    folder = tmp_path_factory.mktemp("sharing")
    model = tiny_model_dir(folder / "tiny")
    return set_up(train_config(folder, model, micro_batch_rows=4, questions_per_row=2, views_per_row=2))


def rows_of(setup: TrainingSetup) -> list[Prepared]:
    (rows,) = setup.stream.step(1).micro_batches
    assert len({d.doc_id for row in rows for d in row.sample.documents}) > max(len(r.parts) for r in rows)
    return rows


def shared(rows: list[Prepared], *, most: int = 10_000, gap: int = 0, seed: int = 0) -> list[Prepared]:
    return shared_rows(rows, max_row_tokens=most, gap_tokens=gap, random=np.random.default_rng(seed))


def test_each_row_reads_all_documents_once_with_their_own_ratios(setup: TrainingSetup) -> None:
    rows = rows_of(setup)
    first = {}
    for row in rows:
        for place, document in enumerate(row.sample.documents):
            ratios = tuple(view[place] for view in row.sample.ratios)
            first.setdefault(document.doc_id, (row.parts[place], ratios))
    made = shared(rows)
    for row, old in zip(made, rows, strict=True):
        assert row.asked == old.asked
        told = {
            document.doc_id: (row.parts[place], tuple(view[place] for view in row.sample.ratios))
            for place, document in enumerate(row.sample.documents)
        }
        assert told == first
        assert len(row.parts) == len(first), "none twice"
        assert all(row.parts[place] is first[d.doc_id][0] for place, d in enumerate(row.sample.documents))
    orders = {tuple(d.doc_id for d in row.sample.documents) for row in made}
    assert len(orders) > 1, "each in an order of its own"
    assert shared(rows) == made
    assert shared(rows, seed=1) != made


def test_rows_that_do_not_fit_stay_as_they_were(setup: TrainingSetup) -> None:
    rows = rows_of(setup)
    assert shared(rows, most=max(row.total_tokens for row in rows)) != rows
    assert shared(rows, most=1) == rows
    assert shared(rows[:1]) == rows[:1]
    for most in range(40, 400, 20):
        for row, old in zip(shared(rows, most=most), rows, strict=True):
            assert row.total_tokens <= max(most, old.total_tokens)


def test_gaps_are_drawn_for_the_documents_that_are_there(setup: TrainingSetup) -> None:
    for row in shared(rows_of(setup), gap=500):
        assert len(row.sample.gaps) == len(row.parts) + 1
        assert 0 <= sum(row.sample.gaps) <= 500
    assert all(row.sample.gaps == () for row in shared(rows_of(setup)))
