"""What a run leaves behind, through the command line: records, curves, card, and a sidecar that extraction takes."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from c2kv_core import Compressor, CompressorSpec
from c2kv_core.config import to_yaml
from c2kv_core.errors import ConfigError, CorpusError, NonFiniteLossError
from pipelines.train import objective
from pipelines.train.config import TrainConfig
from pipelines.train.objective import Losses, Objective
from pipelines.train.prepare import Prepared
from pipelines.train.progress import LOADING, MEASURING, READING, TRAINING, WRITING
from pipelines.train.run import train
from tests.pipelines_sources import write_jsonl
from tests.pipelines_train_kit import tiny_model_dir, train_config, tree_file, tree_row

PHASES = (READING, LOADING, MEASURING, TRAINING, WRITING)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny")


def run_folder(config: TrainConfig) -> Path:
    return Path(config.output) / config.run


def test_the_command_leaves_records_curves_card_and_a_usable_sidecar(tmp_path: Path, model_dir: Path) -> None:
    dev = tree_file(tmp_path / "held-out.jsonl", rows=5)
    config = train_config(
        tmp_path,
        model_dir,
        dev=[{"path": str(dev)}],
        distillation={"weight": 0.5, "positions": "question_and_answer"},
        reconstruction={"weight": 0.1, "max_tokens": 8},
        views_per_row=2,
        tensorboard=True,
        curves=True,
    )
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    command = [sys.executable, "-m", "c2kv_cli.main", "train", "--config", str(file), "--json", "seed=0"]
    # The package has no ``__main__``: the entry point is called as the installed script does.
    command[1:3] = ["-c", "from c2kv_cli.main import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    folder = run_folder(config)
    assert report["sidecar"] == str(folder / "sidecar")
    assert (report["attempts"], report["attempt_steps"]) == (1, config.steps)
    told = [line for line in done.stderr.splitlines() if line.startswith(PHASES)]
    begun = list(dict.fromkeys(line.removesuffix(" ...").partition(":")[0] for line in told))
    assert begun == list(PHASES)
    assert any(line.startswith("training: step 6 of 6, loss ") for line in told)
    assert report["rows"] == config.steps * config.batch_rows
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert set(steps[-1]["parts"]) == {"distillation", "full_compute", "reconstruction"}
    assert set(steps[-1]["by_ratio"]) <= {"2", "4"}
    assert [json.loads(line)["step"] for line in (folder / "dev.jsonl").read_text().splitlines()] == [0, 3, 6]
    assert set(report["references"]["held-out"]) == {"full compute", "no documents"}
    check_card((folder / "sidecar/README.md").read_text())
    made = Compressor.load(
        CompressorSpec(model=config.model, sidecar=str(folder / "sidecar"), ratios=config.ratios)
    )
    assert f"Sidecar {made.identities[4].sidecar_digest} " in (folder / "sidecar/README.md").read_text()
    assert made.sidecar.config.trained
    assert made.sidecar.config.ratios == config.ratios
    assert made.sidecar.header.base_digest == made.identities[4].base_digest


def test_what_is_not_installed_is_told_at_once_and_leaves_nothing(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("matplotlib", "tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    config = train_config(tmp_path, model_dir, curves=True, tensorboard=True)
    with pytest.raises(ConfigError, match=r"matplotlib and tensorboard, .* curves=false tensorboard=false"):
        train(config)
    with pytest.raises(ConfigError, match=r"^not installed: tensorboard, .* or give tensorboard=false"):
        train(config.model_copy(update={"curves": False}))
    assert not Path(config.output).exists()
    assert train(config.model_copy(update={"curves": False, "tensorboard": False}))["step"] == config.steps


def test_a_finished_run_can_have_its_curves_later(tmp_path: Path, model_dir: Path) -> None:
    config = train_config(tmp_path, model_dir)
    train(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(config.model_copy(update={"curves": True}))
    assert (run_folder(config) / "curves.png").read_bytes().startswith(b"\x89PNG")


def check_card(card: str) -> None:
    assert "| trees.jsonl | 8 | by rows | CC0-1.0 | 0 |" in card
    assert "moved by 0." in card
    assert "| file | full compute | no documents | k = 2 | k = 4 |" in card
    assert "lr: 0.01" in card


def test_the_best_sidecar_on_held_out_rows_is_exported(tmp_path: Path, model_dir: Path) -> None:
    # So high a learning rate that later steps do harm.
    dev = [{"path": str(tmp_path / "trees.jsonl")}]
    config = train_config(
        tmp_path, model_dir, dev=dev, lr=0.3, steps=12, eval_every_steps=1, export_dtype="float32"
    )
    report = train(config)
    lines = (run_folder(config) / "dev.jsonl").read_text().splitlines()
    scores = {row["step"]: row["score"] for row in map(json.loads, lines)}
    best = min(scores, key=lambda step: scores[step])
    assert 0 < best < config.steps
    assert report["exported_step"] == best
    # A run that starts from the exported sidecar measures at its start what the best one measured.
    further = config.model_copy(
        update={"run": "further", "steps": 1, "init_sidecar": str(run_folder(config) / "sidecar")}
    )
    train(further)
    first = json.loads((run_folder(further) / "dev.jsonl").read_text().splitlines()[0])
    assert first["score"] == pytest.approx(scores[best], rel=1e-5)


def test_rows_that_cannot_be_used_are_counted_and_the_rest_is_trained_on(
    tmp_path: Path, model_dir: Path
) -> None:
    long = tree_row(9)
    long["documents"][0]["text"] = "The oak is tall. " * 400
    rows = [*map(tree_row, range(4)), "text", tree_row(5, answers=["", " "]), tree_row(6, documents=[]), long]
    file = write_jsonl(tmp_path / "mixed.jsonl", list(rows))
    with file.open("ab") as out:
        out.write(b"{broken\n\xff\xfe\n")
    report = train(train_config(tmp_path, model_dir, data=[{"path": str(file)}], max_row_tokens=600))
    assert report["rows_left_out"] == {"unreadable": 3, "no answer": 1, "no document with text": 1}
    assert report["dropped"] > 0
    assert report["rows"] == 24


def test_data_without_a_usable_row_is_refused(tmp_path: Path, model_dir: Path) -> None:
    file = write_jsonl(tmp_path / "none.jsonl", [tree_row(0, answers=[])])
    with pytest.raises(CorpusError, match=r"found none; the first fault: line 1: no answer: row-0"):
        train(train_config(tmp_path, model_dir, data=[{"path": str(file)}]))


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_batch(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = train_config(tmp_path, model_dir)
    honest = objective.Objective.losses
    calls: list[int] = []

    def broken(self: Objective, rows: list[Prepared]) -> Losses:
        calls.append(len(rows))
        made = honest(self, rows)
        return Losses(loss=made.loss * float("nan"), sums=made.sums) if len(calls) == 7 else made

    monkeypatch.setattr(Objective, "losses", broken)
    with pytest.raises(
        NonFiniteLossError, match=r"loss is nan and its gradient nan at step 4; its rows are in .*; lower lr"
    ):
        train(config)
    (saved,) = (run_folder(config) / "non_finite").iterdir()
    rows = json.loads(saved.read_text())
    assert len(rows) == config.batch_rows
    assert {"question", "answer", "documents", "ratios"} <= rows[0].keys()
    monkeypatch.undo()
    assert train(config)["step"] == config.steps


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("learning_rate", 1, "unknown key 'learning_rate'"),
        ("distillation", {"wait": 1}, "unknown key 'distillation.wait'; did you mean 'distillation.weight'"),
        ("documents_per_row", [3, 2], "1 <= fewest <= most, got 3, 2"),
        ("run", "../up", "run: string should match"),
        ("num_workers", 3, "batch_rows to be a multiple of num_workers, got 4 and 3"),
    ],
)
def test_faults_of_the_configuration_are_named(
    tmp_path: Path, model_dir: Path, key: str, value: object, message: str
) -> None:
    from c2kv_core.config import parse_config

    data = {**train_config(tmp_path, model_dir).model_dump(mode="json"), key: value}
    with pytest.raises(ConfigError, match=message):
        parse_config(TrainConfig, data, source="run.yaml")
