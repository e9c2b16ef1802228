"""Ctrl-C and SIGTERM at a command: exit code 130 and one line that says what to do."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from c2kv_core.config import to_yaml
from tests.pipelines_train_kit import tiny_model_dir, train_config, tree_file

COMMAND = "from c2kv_cli.main import main; main()"
SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny")


def interrupted(number: signal.Signals, watched: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of a command that gets a signal once a file is there."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Its own Ray, whatever this session has running.
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
        start_new_session=True,
    )
    try:
        while not list(watched.parent.glob(watched.name)):
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=0.05)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
        return process.returncode, err
    finally:
        process.kill()
        process.wait()


@pytest.mark.ray_cli
@pytest.mark.slow
@pytest.mark.parametrize(
    "workers",
    [pytest.param(0, id="in this process"), pytest.param(1, id="on Ray", marks=pytest.mark.faults)],
)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda s: s.name)
def test_a_run_ends_in_order_and_says_how_to_go_on(
    tmp_path: Path, model_dir: Path, number: signal.Signals, workers: int
) -> None:
    config = train_config(tmp_path, model_dir, steps=100_000, checkpoint_every_steps=1, num_workers=workers)
    (tmp_path / "train.yaml").write_text(to_yaml(config))
    saved = tmp_path / "runs" / config.run / "checkpoints" / "*"
    code, err = interrupted(number, saved, "train", "--config", str(tmp_path / "train.yaml"))
    assert code == 130, err
    assert err.endswith("the same command goes on from the newest checkpoint, where there is one\n"), err
    assert ("finishing the step and saving it" in err) == (number == signal.SIGINT and not workers), err
    assert "Traceback" not in err and "***" not in err


@pytest.mark.parametrize("number", SIGNALS, ids=lambda s: s.name)
def test_an_evaluation_is_interrupted(tmp_path: Path, model_dir: Path, number: signal.Signals) -> None:
    data, answers = tree_file(tmp_path / "trees.jsonl", rows=1000), tmp_path / "answers.jsonl"
    code, err = interrupted(
        number, answers, "eval", f"data={data}", f"model={model_dir}", f"predictions={answers}"
    )
    assert (code, err.splitlines()[-1]) == (130, "interrupted"), err
    assert "Traceback" not in err and "***" not in err
