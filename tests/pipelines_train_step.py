"""A training step against the plain way of computing it: one row at a time, the stock model, one big batch."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from c2kv_core import ComposedContext, compose, hf_adapter
from c2kv_core.cache import AppendCache
from c2kv_core.compose import token_states
from c2kv_core.errors import ConfigError, CorpusError
from c2kv_core.sidecar import is_fitted
from pipelines.train.config import TrainConfig
from pipelines.train.dev import DevSet
from pipelines.train.optimizer import learning_rate
from pipelines.train.prepare import Asked, Prepared
from pipelines.train.setup import TrainingSetup, set_up
from pipelines.train.trainer import Trainer
from pipelines.train.world import World
from tests.core_head_slots import give_shares
from tests.oracle import assert_near
from tests.pipelines_train_kit import tiny_model_dir, train_config, tree_file


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny")


def rows_of(setup: TrainingSetup, step: int = 1) -> list[Prepared]:
    return [row for group in setup.stream.step(step).micro_batches for row in group]


def slot_context(setup: TrainingSetup, row: Prepared, view: int) -> ComposedContext:
    """Each part extracted alone, documents placed one by one."""
    context = setup.prefix
    assert context is not None
    *gaps, last = row.sample.gaps or [0] * (len(row.parts) + 1)
    for parts, ratio, gap in zip(row.parts, row.sample.ratios[view], gaps, strict=True):
        context = moved(context, gap)
        for part in parts:
            (states,) = setup.objective.extractor.states([part], (ratio,))
            context = compose(setup.model, context, states.documents())
    return moved(context, last)


def moved(context: ComposedContext, gap: int) -> ComposedContext:
    return replace(context, next_position=context.next_position + gap)


def plain_logits(setup: TrainingSetup, context: ComposedContext, asked: Asked) -> Tensor:
    """Logits (T, V) over question and answer, alone after a context."""
    hidden = token_states(
        setup.model,
        torch.tensor([asked.ids]),
        AppendCache(context.cache),
        start=context.next_position,
    )
    return hf_adapter.logits(setup.model, hidden)[0]


def document_ids(setup: TrainingSetup, row: Prepared) -> list[int]:
    return [*setup.prefix_ids, *(i for d in row.parts for part in d for i in part)]


def teacher_logits(setup: TrainingSetup, row: Prepared, asked: Asked) -> Tensor:
    """The same from the stock model over everything in full."""
    ids = document_ids(setup, row)
    with torch.no_grad():
        return setup.model(torch.tensor([ids + asked.ids])).logits[0, len(ids) :]


def plain_loss(setup: TrainingSetup, rows: list[Prepared], config: TrainConfig) -> Tensor:
    total = torch.zeros(())
    for row in rows:
        for view in range(config.views_per_row):
            context = slot_context(setup, row, view)
            for asked in row.asked:
                alike = sum(a.passage == asked.passage for a in row.asked)
                weight = config.reconstruction.weight if asked.passage else 1.0
                loss = plain_ask_loss(setup, context, row, asked, config)
                total = total + weight * loss / alike / config.views_per_row
    return total / config.batch_rows


def plain_ask_loss(
    setup: TrainingSetup, context: ComposedContext, row: Prepared, asked: Asked, config: TrainConfig
) -> Tensor:
    temperature = config.distillation.temperature
    logits = plain_logits(setup, context, asked)
    start = len(asked.question_ids) - 1
    answer = F.cross_entropy(logits[start:-1], torch.tensor(asked.answer_ids))
    first = 0 if config.distillation.positions == "question_and_answer" else start
    student = (logits[first:-1] / temperature).log_softmax(-1)
    teacher = (teacher_logits(setup, row, asked)[first:-1] / temperature).softmax(-1)
    kl = F.kl_div(student, teacher, reduction="none").sum(-1).mean() * temperature**2
    return answer + config.distillation.weight * kl


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize(
    ("positions", "gap_tokens", "shared", "selection"),
    [
        ("answer", 0, False, "none"),
        ("question_and_answer", 0, True, "none"),
        ("answer", 400, False, "heads"),
        ("answer", 400, True, "heads"),
    ],
)
def test_batched_loss_and_gradients_equal_those_of_one_row_at_a_time(
    tmp_path: Path,
    model_dir: Path,
    positions: str,
    gap_tokens: int,
    shared: bool,
    selection: str,
    recompute: bool,
) -> None:
    config = train_config(
        tmp_path,
        model_dir,
        micro_batch_rows=4,
        views_per_row=2,
        questions_per_row=3,
        reconstruction={"weight": 0.4, "passages": 2, "cue_words": 3, "max_tokens": 4},
        distillation={"weight": 0.7, "temperature": 2.0, "positions": positions},
        gradient_checkpointing=recompute,
        gap_tokens=gap_tokens,
        max_part_tokens=24,
        share_documents=4 if shared else 1,
        selection=selection,
    )
    setup = set_up(config)
    if selection == "heads":
        give_shares(setup.sidecar)
    rows = rows_of(setup)
    assert (len({frozenset(d.doc_id for d in row.sample.documents) for row in rows}) == 1) == shared
    assert max(len(document) for row in rows for document in row.parts) > 1, "documents of several parts"
    assert all((sum(row.sample.gaps) > 0) == (gap_tokens > 0) for row in rows)
    assert {len(row.sample.others) for row in rows} >= {1, 2}, "rows of different numbers of questions"
    expected = plain_loss(setup, rows, config)
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in setup.sidecar.named_parameters() if p.grad is not None}
    setup.sidecar.zero_grad()
    got = setup.objective.losses(rows)
    got.loss.backward()
    assert_near(got.loss, expected)
    alone = rows_of(set_up(config.model_copy(update={"share_documents": 1})))
    sizes = [
        (document.doc_id, sum(map(len, parts)))
        for row in alone
        for document, parts in zip(row.sample.documents, row.parts, strict=True)
    ]
    tokens = sum(dict(sizes).values()) if shared else sum(size for _, size in sizes)
    assert got.sums["source_tokens"] == tokens, "each is extracted once"
    # The last layer's slots attend to nothing, so its query projection has no gradient.
    last = f"layers.{len(setup.sidecar.layers) - 1}.q_proj.weight"
    fitted = {n for n, _ in setup.sidecar.named_parameters() if is_fitted(n)}
    assert set(gradients) == set(dict(setup.sidecar.named_parameters())) - {last} - fitted
    for name, parameter in setup.sidecar.named_parameters():
        if name in gradients:
            assert parameter.grad is not None
            assert_near(parameter.grad, gradients[name], 2e-4)
    assert all(p.grad is None for p in setup.model.parameters())


def gradients_of(config: TrainConfig) -> tuple[dict[str, Tensor], float]:
    trainer = Trainer(set_up(config), World())
    record = trainer.step(1)
    return {n: p.grad.clone() for n, p in trainer.weights.named.items() if p.grad is not None}, record.loss


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_accumulated_gradients_equal_the_big_batch(tmp_path: Path, model_dir: Path, rows: int) -> None:
    # without clipping, which would hide a wrong factor
    settings: dict[str, Any] = {
        "batch_rows": 6,
        "clip_norm": 1e9,
        "reconstruction": {"weight": 0.3},
        "questions_per_row": 2,
    }
    big, big_loss = gradients_of(train_config(tmp_path, model_dir, micro_batch_rows=6, **settings))
    small, small_loss = gradients_of(train_config(tmp_path, model_dir, micro_batch_rows=rows, **settings))
    assert small_loss == pytest.approx(big_loss, rel=1e-5)
    for name in big:
        assert_near(small[name], big[name], 2e-4)


@pytest.mark.parametrize("rank", [None, 4])
def test_only_the_sidecar_moves(tmp_path: Path, model_dir: Path, rank: int | None) -> None:
    setup = set_up(train_config(tmp_path, model_dir, rank=rank))
    before = {n: p.detach().clone() for n, p in setup.sidecar.named_parameters()}
    trainer = Trainer(setup, World())
    for step in (1, 2):
        trainer.step(step)
    assert setup.base_tensors_digest() == setup.untrained_digest
    still = {n for n, p in setup.sidecar.named_parameters() if torch.equal(p, before[n])}
    assert all(".q_proj." in name and name.startswith("layers.3.") for name in still)
    with torch.no_grad():
        next(setup.model.parameters()).add_(1e-3)
    assert setup.base_tensors_digest() != setup.untrained_digest


def test_small_updates_are_not_lost_in_bfloat16(tmp_path: Path, model_dir: Path) -> None:
    setup = set_up(train_config(tmp_path, model_dir, dtype="bfloat16", lr=1e-5, warmup_share=0.0))
    trainer = Trainer(setup, World())
    start = {n: p.detach().clone() for n, p in trainer.weights.named.items()}
    for step in range(1, 4):
        trainer.step(step)
    for name, weight in trainer.weights.named.items():
        assert weight.dtype == torch.float32
        working = dict(setup.sidecar.named_parameters())[name]
        assert torch.equal(working, weight.to(torch.bfloat16))
        if "layers.3.q_proj" not in name:
            assert not torch.equal(weight, start[name])


def test_pull_towards_the_start_is_a_gradient(tmp_path: Path, model_dir: Path) -> None:
    trainer = Trainer(set_up(train_config(tmp_path, model_dir)), World())
    weights = list(trainer.weights)
    with torch.no_grad():
        for weight in weights:
            weight += 0.1
    trainer.weights.clear_gradients()
    trainer.weights.pull(3.0)
    count = sum(w.numel() for w in weights)
    for weight in weights:
        assert weight.grad is not None
        assert_near(weight.grad, torch.full_like(weight, 2 * 3.0 * 0.1 / count), 1e-4)


def test_learning_rate_follows_the_recipe(tmp_path: Path, model_dir: Path) -> None:
    config = train_config(tmp_path, model_dir, steps=100, lr=1.0, warmup_share=0.06)
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert rates[52] == pytest.approx(0.5, abs=0.01)
    assert rates[-1] == pytest.approx(0.0, abs=1e-9)
    assert all(a >= b for a, b in pairwise(rates[5:]))
    held = config.model_copy(update={"schedule": "constant"})
    assert learning_rate(held, 100) == 1.0


def test_gaps_take_positions_from_rows(tmp_path: Path, model_dir: Path) -> None:
    most = hf_adapter.max_positions(set_up(train_config(tmp_path, model_dir)).model)
    with pytest.raises(ConfigError, match=f"gap_tokens below the model's {most} positions"):
        set_up(train_config(tmp_path, model_dir, gap_tokens=most))
    with pytest.raises(CorpusError, match="too long"):
        rows_of(set_up(train_config(tmp_path, model_dir, gap_tokens=most - 20)))


def test_held_out_rows_are_as_far_away_as_those_of_training(tmp_path: Path, model_dir: Path) -> None:
    dev = [str(tree_file(tmp_path / "dev.jsonl"))]
    near, far = (
        DevSet(
            set_up(train_config(tmp_path, model_dir, run=f"gap-{gap}", dev=dev, gap_tokens=gap)), World()
        ).evaluate(0)
        for gap in (0, 400)
    )
    assert near.answer["dev"].keys() == far.answer["dev"].keys() == {"2", "4"}
    assert all(abs(near.answer["dev"][k] - far.answer["dev"][k]) > 1e-4 for k in ("2", "4"))


def test_held_out_rows_share_documents_as_those_of_training_do(tmp_path: Path, model_dir: Path) -> None:
    dev = [str(tree_file(tmp_path / "dev.jsonl"))]
    config = train_config(tmp_path, model_dir, dev=dev, share_documents=2, micro_batch_rows=4, dev_rows=4)
    found = DevSet(set_up(config), World())
    rows = found._rows["dev"]
    sets = [frozenset(d.doc_id for d in row.sample.documents) for row in rows]
    assert (sets[0], sets[2]) == (sets[1], sets[3])
    assert found.evaluate(0).answer["dev"].keys() == {"2", "4"}
    shares = [DevSet(set_up(config), OneOfTwo(rank))._rows["dev"] for rank in (0, 1)]
    assert [r.sample.documents for pair in zip(*shares, strict=True) for r in pair] == [
        r.sample.documents for r in rows
    ], "whoever evaluates them"


class OneOfTwo(World):
    """A worker of two, alone."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2
