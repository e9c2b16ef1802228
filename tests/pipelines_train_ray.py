"""Training on real Ray Train workers: as in one process, with the base whole or spread over them."""

import shutil
from pathlib import Path

import pytest

from c2kv_core.errors import NonFiniteLossError, TrainingError
from pipelines.train.progress import TRAINING, Progress
from pipelines.train.run import train
from tests.pipelines_train_kit import losses, tiny_model_dir, train_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny")


def test_a_base_spread_over_two_workers_gives_the_losses_of_one(
    ray_cluster: None, tmp_path: Path, model_dir: Path
) -> None:
    dev = [{"path": str(tmp_path / "trees.jsonl")}]
    alone = train_config(
        tmp_path,
        model_dir,
        run="alone",
        dev=dev,
        rank=4,
        gradient_checkpointing=True,
        distillation={"weight": 0.5},
    )
    spread = alone.model_copy(update={"run": "spread", "num_workers": 2, "shard_base": True})
    expected = train(alone)
    seen: list[Progress] = []
    report = train(spread, progress=seen.append)
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-5)
    assert report["rows"] == expected["rows"]
    assert report["best"]["score"] == pytest.approx(expected["best"]["score"], rel=1e-5)
    assert seen[-1].step == spread.steps


def test_relative_paths_are_those_of_the_driver(
    ray_cluster: None, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray Train gives each worker a working directory of its own.
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_dir, "model")
    first = train_config(
        tmp_path, Path("model"), data=[{"path": "trees.jsonl"}], output="runs", run="first", steps=2
    )
    train(first)
    changes = {"run": "second", "num_workers": 1, "init_sidecar": "runs/first/sidecar", "data_dir": "."}
    second = first.model_copy(update=changes)
    seen: list[Progress] = []
    report = train(second, progress=seen.append)
    assert report["sidecar"] == str(tmp_path / "runs/second/sidecar")
    assert (tmp_path / "runs/second/sidecar/sidecar.json").is_file()
    assert (TRAINING, 2) in [(p.phase, p.step) for p in seen], "however fast the last step was over"
    assert train(second)["attempt_steps"] == 0


def test_a_loss_that_is_no_number_ends_the_run_without_another_try(
    ray_cluster: None, tmp_path: Path, model_dir: Path
) -> None:
    # So high a learning rate that the second step's loss overflows.
    config = train_config(tmp_path, model_dir, num_workers=2, lr=1e30, warmup_share=0.0)
    with pytest.raises(NonFiniteLossError, match=r"at step 2; its rows are in"):
        train(config)
    assert len(list((Path(config.output) / config.run / "attempts").glob("*.claim"))) == 2


def test_workers_that_do_not_fit_are_refused(ray_cluster: None, tmp_path: Path, model_dir: Path) -> None:
    config = train_config(tmp_path, model_dir, num_workers=4, num_cpus_per_worker=100)
    with pytest.raises(TrainingError, match=r"4 workers need 400 CPU, the cluster has 8; lower num_workers"):
        train(config)
