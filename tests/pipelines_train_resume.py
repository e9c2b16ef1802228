"""A run that was stopped goes on as if it had not been; partial, damaged and stale checkpoints are never used."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from c2kv_core.config import to_yaml
from c2kv_core.errors import ConfigError, CorpusError, SidecarError, StaleAttemptError, TrainingError
from c2kv_core.store import open_storage
from pipelines.train.attempts import Attempt
from pipelines.train.checkpoint import MANIFEST, Checkpoints
from pipelines.train.config import TrainConfig
from pipelines.train.folder import PROGRESS, RunFolder
from pipelines.train.progress import LOADING, READING, TRAINING, WRITING, Progress
from pipelines.train.run import train
from tests.pipelines_train_kit import losses, metrics, tiny_model_dir, train_config

STATE = {"step": 0}
TENSORS = {"x": torch.arange(3.0)}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny")


class Stopped(Exception):
    """Thrown into a run by a test."""


def stop_after(step: int) -> Callable[[Progress], None]:
    def follow(progress: Progress) -> None:
        if progress.step == step:
            raise Stopped

    return follow


@pytest.mark.parametrize("rank", [None, 4], ids=["full", "low-rank"])
def test_a_stopped_run_goes_on_with_the_same_numbers(
    tmp_path: Path, model_dir: Path, rank: int | None
) -> None:
    dev = [{"path": str(tmp_path / "trees.jsonl")}]
    calm = train_config(tmp_path, model_dir, run="calm", dev=dev, rank=rank, distillation={"weight": 0.5})
    stopped = calm.model_copy(update={"run": "stopped"})
    expected = train(calm)
    for step in (1, 3, 5):
        with pytest.raises(Stopped):
            train(stopped, progress=stop_after(step))
    report = train(stopped)
    assert metrics(stopped) == metrics(calm)
    assert len(metrics(calm)) == calm.steps
    for key in ("rows", "source_tokens", "answer_tokens", "drift", "exported_step", "references"):
        assert report[key] == expected[key], key
    folders = (Path(c.output) / c.run / "sidecar/sidecar.safetensors" for c in (calm, stopped))
    first, second = (folder.read_bytes() for folder in folders)
    assert first == second


def test_a_finished_run_does_nothing_more(tmp_path: Path, model_dir: Path) -> None:
    config = train_config(tmp_path, model_dir)
    first = train(config)
    seen: list[Progress] = []
    second = train(config, progress=seen.append)
    assert [p.phase for p in seen] == [LOADING, TRAINING, WRITING]
    assert [p.step for p in seen if p.phase == TRAINING] == [config.steps]
    assert (first["attempts"], first["attempt_steps"]) == (1, config.steps)
    assert (second["last"], second["attempts"], second["attempt_steps"]) == (first["last"], 2, 0)


def test_another_configuration_under_the_same_name_is_refused(tmp_path: Path, model_dir: Path) -> None:
    config = train_config(tmp_path, model_dir)
    train(config)
    with pytest.raises(ConfigError, match=r"has lr 0\.01, got 0\.5; .* another run name"):
        train(config.model_copy(update={"lr": 0.5}))
    with pytest.raises(ConfigError, match=r"has ratios \[2, 4\], got \[8\]; "):
        train(config.model_copy(update={"ratios": (8,)}))
    train(config.model_copy(update={"micro_batch_rows": 1, "keep_checkpoints": 1}))


def test_a_run_in_a_bucket_goes_on_with_the_same_losses(tmp_path: Path, model_dir: Path, bucket: str) -> None:
    calm = train_config(tmp_path, model_dir)
    train(calm)
    remote = train_config(tmp_path, model_dir, output=bucket, tensorboard=True)

    class StopError(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.step == 5:
            raise StopError

    with pytest.raises(StopError):
        train(remote, progress=stop)
    report = train(remote)
    assert report["attempts"] > 1
    storage = open_storage(f"{bucket}/tiny")
    text = storage.get("metrics.jsonl").to_pybytes().decode()
    assert [json.loads(line)["loss"] for line in text.splitlines()] == losses(calm)
    exported = Path(calm.output) / "tiny/sidecar/sidecar.safetensors"
    assert storage.get("sidecar/sidecar.safetensors").to_pybytes() == exported.read_bytes()
    assert any(f.path.startswith("tensorboard/events") for f in storage.list_files("tensorboard/"))


# ---- checkpoints


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    return Checkpoints(open_storage(tmp_path / "run"))  # type: ignore[return-value]


def attempt_at(checkpoints: Checkpoints, owner: str = "a") -> Attempt:
    return Attempt.claim(checkpoints._storage, owner=owner)


def newest(checkpoints: Checkpoints) -> str | None:
    found = checkpoints.newest()
    return found.name if found else None


def test_the_newest_complete_checkpoint_is_taken_and_orphans_are_collected(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    attempt = attempt_at(checkpoints)
    for step in (2, 10, 4):
        checkpoints.save(attempt, step, TENSORS, STATE)
    assert newest(checkpoints) == "step-00000010-a000001"
    folder = tmp_path / "run/checkpoints"
    (folder / "step-00000010-a000001" / MANIFEST).unlink()
    assert newest(checkpoints) == "step-00000004-a000001"
    assert checkpoints.collect(keep=1) == ["step-00000002-a000001", "step-00000010-a000001"]
    assert [f.name for f in folder.iterdir() if any(f.iterdir())] == ["step-00000004-a000001"]


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_a_damaged_checkpoint_is_passed_over(
    checkpoints: Checkpoints, tmp_path: Path, file: str, damage: str
) -> None:
    attempt = attempt_at(checkpoints)
    for step in (2, 4):
        checkpoints.save(attempt, step, TENSORS, STATE)
    path = tmp_path / "run/checkpoints/step-00000004-a000001" / file
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    assert newest(checkpoints) == "step-00000002-a000001"


def test_a_stale_attempt_cannot_commit(checkpoints: Checkpoints) -> None:
    old = attempt_at(checkpoints, "old")
    checkpoints.save(old, 2, TENSORS, STATE)
    new = attempt_at(checkpoints, "new")
    with pytest.raises(StaleAttemptError, match="attempt 1 at this run was replaced by attempt 2"):
        checkpoints.save(old, 4, TENSORS, STATE)
    with pytest.raises(StaleAttemptError, match="another driver"):
        Attempt.claim(checkpoints._storage, owner="old", renew=True)
    assert Attempt.claim(checkpoints._storage, owner="new", renew=True).number == new.number + 1
    assert newest(checkpoints) == "step-00000002-a000001"


def test_a_commit_that_slipped_past_the_fence_is_not_trusted(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = attempt_at(checkpoints, "old")
    checkpoints.save(old, 2, TENSORS, STATE)
    new = attempt_at(checkpoints, "new")
    new.record(checkpoints.names())
    monkeypatch.setattr(old, "require_latest", lambda: None)
    late = checkpoints.save(old, 8, TENSORS, STATE)
    assert late in checkpoints.complete()
    assert newest(checkpoints) == "step-00000002-a000001"
    checkpoints.save(new, 4, TENSORS, STATE)
    assert newest(checkpoints) == "step-00000004-a000002"
    assert late in checkpoints.collect(keep=2)


def test_a_second_driver_takes_over_and_the_first_stops(tmp_path: Path, model_dir: Path) -> None:
    config = train_config(tmp_path, model_dir)

    def take_over(progress: Progress) -> None:
        if progress.step == 3:
            Attempt.claim(RunFolder(config).storage, owner="another driver")

    with pytest.raises(StaleAttemptError, match="replaced"):
        train(config, progress=take_over)
    assert Checkpoints(RunFolder(config).storage).newest().state["step"] == 2  # type: ignore[union-attr]


def test_a_run_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path, model_dir: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, not a folder")
    config = train_config(tmp_path, model_dir, output=str(blocked))
    with pytest.raises(TrainingError, match=r"cannot write the run folder .*blocked/tiny: .*; make room"):
        train(config)


# ---- killed processes


def wait_for_step(config: TrainConfig, step: int, *, alive: Callable[[], bool]) -> int:
    """Process id of the leading worker, once it is past a step."""
    folder = RunFolder(config)
    while alive():
        found = folder.get_json(PROGRESS)
        if found is not None and found["step"] >= step:
            return int(found["process"])
        time.sleep(0.05)
    raise AssertionError("the run ended before it could be killed")


@pytest.mark.faults
@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_the_numbers_stay(
    ray_cluster: None, tmp_path: Path, model_dir: Path
) -> None:
    import threading

    # Two workers with a row each: their sum is the same as that of two micro-batches, whatever the order.
    settings = {"steps": 200, "batch_rows": 2, "micro_batch_rows": 1, "checkpoint_every_steps": 20}
    calm = train_config(tmp_path, model_dir, run="calm", **settings)
    hit = train_config(tmp_path, model_dir, run="hit", num_workers=2, **settings)
    train(calm)
    killed: list[int] = []

    def kill() -> None:
        process = wait_for_step(hit, 30, alive=lambda: True)
        killed.append(process)
        os.kill(process, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    report = train(hit)
    assert len(killed) == 1
    assert report["attempts"] == 2, "the first workers and their replacements"
    assert metrics(hit) == metrics(calm)


@pytest.mark.faults
@pytest.mark.slow
def test_a_killed_driver_goes_on_with_the_same_command(tmp_path: Path, model_dir: Path) -> None:
    calm = train_config(tmp_path, model_dir, run="calm", steps=200, checkpoint_every_steps=20)
    killed = calm.model_copy(update={"run": "killed"})
    train(calm)
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(killed))
    command = [sys.executable, "-m", "pipelines.train", "--config", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoints = Checkpoints(RunFolder(killed).storage)
    while len(checkpoints.names()) < 2 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert metrics(killed) == metrics(calm)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_run_that_is_told_to_stop_saves_its_step_and_leaves(
    tmp_path: Path, model_dir: Path, number: signal.Signals
) -> None:
    calm = train_config(tmp_path, model_dir, run="calm", checkpoint_every_steps=100)
    config = calm.model_copy(update={"run": "ended"})
    train(calm)

    def end_after(progress: Progress) -> None:
        if progress.step == 2:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        train(config, progress=end_after)
    assert signal.getsignal(number) is before
    steps: list[int] = []
    train(config, progress=lambda p: steps.extend([p.step] * (p.phase == TRAINING)))
    assert steps[0] == 2, "goes on from the step in which the signal came"
    assert metrics(config) == metrics(calm)


def test_what_comes_before_the_first_step_and_a_second_signal_end_at_once(
    tmp_path: Path, model_dir: Path
) -> None:
    config = train_config(tmp_path, model_dir, checkpoint_every_steps=100)
    seen: list[int] = []

    def while_loading(progress: Progress) -> None:
        assert progress.phase == LOADING
        os.kill(os.getpid(), signal.SIGINT)

    def twice(progress: Progress) -> None:
        seen.append(progress.step)
        if progress.step == 2:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    for follow in (while_loading, twice):
        with pytest.raises(KeyboardInterrupt):
            train(config, progress=lambda p, f=follow: None if p.phase == READING else f(p))  # type: ignore[misc]
    assert seen[-1] == 2
    assert not Checkpoints(RunFolder(config).storage).names(), "nothing was saved"


def test_a_name_under_which_nothing_was_trained_can_be_had_back(tmp_path: Path, model_dir: Path) -> None:
    config = train_config(tmp_path, model_dir, max_row_tokens=64, max_part_tokens=64)
    with pytest.raises(CorpusError, match="raise max_row_tokens"):
        train(config)
    with pytest.raises(
        ConfigError, match=r"has max_row_tokens 64, got 512; .* or remove .*tiny, which holds no check"
    ):
        train(config.model_copy(update={"max_row_tokens": 512}))
    wrong = config.model_copy(update={"run": "start", "init_sidecar": str(tmp_path / "nothing")})
    with pytest.raises(SidecarError, match=r"found no sidecar\.json"):
        train(wrong)
    assert not Path(RunFolder(wrong).location).exists(), "looked for before anything is written"


def train_without_space(config: TrainConfig, limit_bytes: int) -> None:
    """Files may not grow beyond the limit: what a full disk is to a writer."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill_up(progress: Progress) -> None:
        if progress.step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))

    with pytest.raises(TrainingError, match=r"^cannot .*$"):
        train(config, progress=fill_up)
    os._exit(0)


def test_a_full_disk_is_one_line_and_costs_what_came_after_the_last_checkpoint(
    tmp_path: Path, model_dir: Path
) -> None:
    calm = train_config(tmp_path, model_dir, run="calm", checkpoint_every_steps=1)
    config = calm.model_copy(update={"run": "full"})
    train(calm)
    process = get_context("spawn").Process(target=train_without_space, args=(config, 1000))
    process.start()
    process.join(timeout=240)
    assert process.exitcode == 0
    steps: list[int] = []
    train(config, progress=lambda p: steps.extend([p.step] * (p.phase == TRAINING)))
    assert steps[0] == 2
    assert metrics(config) == metrics(calm)


def test_checkpoints_that_are_collected_leave_no_folders(tmp_path: Path, model_dir: Path) -> None:
    config = train_config(tmp_path, model_dir, checkpoint_every_steps=1, keep_checkpoints=2)
    train(config)
    assert len(list((Path(config.output) / config.run / "checkpoints").iterdir())) == 2
