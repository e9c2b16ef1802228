"""The control of evaluations: the base tuned on the same rows, against a stock model with the deltas merged in."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from c2kv_core.errors import ConfigError, SidecarError
from pipelines.control import Control
from pipelines.eval.config import EvalConfig
from pipelines.eval.evaluate import evaluate
from pipelines.train.control_objective import ControlObjective
from pipelines.train.run import train
from pipelines.train.setup import set_up
from tests.oracle import assert_near
from tests.pipelines_sources import write_jsonl
from tests.pipelines_train_kit import tiny_model_dir, train_config, tree_row
from tests.pipelines_train_step import rows_of


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("documents", ["full", "none"])
def test_loss_and_gradients_are_those_of_the_merged_model(
    tmp_path: Path, model_dir: Path, documents: str
) -> None:
    settings = {"questions_per_row": 3, "reconstruction": {"weight": 1.0}}
    setup = set_up(train_config(tmp_path, model_dir, control=documents, rank=3, **settings))
    objective = setup.objective
    assert isinstance(objective, ControlObjective)
    with torch.no_grad():
        for name, parameter in setup.sidecar.named_parameters():
            if name.endswith(".up"):
                parameter.normal_(std=0.1)
    rows = rows_of(setup)
    before = setup.base_tensors_digest()
    got = objective.losses(rows)
    got.loss.backward()
    assert setup.base_tensors_digest() == before
    gradients = {n: p.grad for n, p in setup.sidecar.named_parameters() if p.grad is not None}
    assert len(gradients) == 4 * 3 * 2, "down and up of q, k and v in every layer, not the slot vector"
    model = copy.deepcopy(setup.model)
    objective.control.merge_into(model)
    model.requires_grad_(True)
    total = torch.zeros(())
    for row in rows:
        context = [*setup.prefix_ids]
        if documents == "full":
            context += [i for d in row.parts for part in d for i in part]
        asked = [a for a in row.asked if not a.passage]
        for one in asked:
            logits = model(torch.tensor([[*context, *one.ids]])).logits[0]
            start = len(context) + len(one.question_ids) - 1
            total = total + F.cross_entropy(logits[start:-1], torch.tensor(one.answer_ids)) / len(asked)
    expected = total / setup.config.batch_rows
    expected.backward()
    assert_near(got.loss, expected)
    for base, pair in objective.control.deltas(model):
        assert base.weight.grad is not None and pair.up.grad is not None
        assert_near(pair.up.grad, base.weight.grad @ pair.down.T, 2e-4)
        assert_near(pair.down.grad, pair.up.T @ base.weight.grad, 2e-4)


def test_a_tuned_base_is_a_row_of_the_table(tmp_path: Path, model_dir: Path) -> None:
    made = {}
    for documents in ("full", "none"):
        config = train_config(
            tmp_path,
            model_dir,
            run=documents,
            control=documents,
            rank=8,
            steps=60,
            dev=[{"path": str(tmp_path / "trees.jsonl")}],
            eval_every_steps=30,
        )
        report = train(config)
        assert "sidecar" not in report
        made[documents] = report["control"]
        assert report["dev"]["answer"]["trees"].keys() == {"control"}
    questions = write_jsonl(tmp_path / "questions.jsonl", [tree_row(place) for place in range(8)])
    settings = EvalConfig(
        data=str(questions),
        model=str(model_dir),
        methods=("full", "none", "tuned", "tuned_none"),
        tuned=made["full"],
        tuned_none=made["none"],
    )
    rows = {row.method: row for row in evaluate(settings).methods}
    for tuned, base in (("tuned", "full"), ("tuned_none", "none")):
        assert rows[tuned].answer_nll < 2.5 < 6 < rows[base].answer_nll, "the form of answers was learned"
    assert rows["tuned"].bytes_per_source_token == rows["full"].bytes_per_source_token
    assert rows["tuned_none"].bytes_per_source_token == 0
    swapped = settings.model_copy(update={"tuned": made["none"]})
    with pytest.raises(ConfigError, match=r"expects a control tuned with documents full, .* had none"):
        evaluate(swapped)
    (Path(made["full"]) / "control.safetensors").write_bytes(b"torn")
    with pytest.raises(SidecarError, match=r"expected a control in .*c2kv train control=full"):
        Control.load(made["full"])


def test_a_tuned_row_needs_its_control(tmp_path: Path, model_dir: Path) -> None:
    questions = write_jsonl(tmp_path / "questions.jsonl", [tree_row(0)])
    with pytest.raises(ConfigError, match="the method tuned needs a control: tuned=DIR"):
        evaluate(EvalConfig(data=str(questions), model=str(model_dir), methods=("tuned",)))


@pytest.mark.parametrize("settings", [{"rank": None}, {"rank": 2, "init_sidecar": "x"}])
def test_a_control_needs_a_rank_and_starts_from_the_base(
    tmp_path: Path, model_dir: Path, settings: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match="a control needs rank, and neither shard_base nor init_sidecar"):
        train_config(tmp_path, model_dir, control="full", **settings)
