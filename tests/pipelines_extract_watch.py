"""Runs that cannot go on end by themselves, and say why; progress and metrics on the way."""

import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

from c2kv_core.errors import C2KVError
from c2kv_core.store import Attempts, KVStore, open_storage
from pipelines.extract import Progress, extract
from pipelines.extract_commit import Committer
from pipelines.extract_config import ExtractConfig
from pipelines.extract_lines import ProgressLines
from pipelines.extract_metrics import METRICS, RaySink
from pipelines.extract_stream import StalledError, stall_diagnosis
from tests.extract_kit import config_for, notes, rows
from tests.pipelines_sources import write_jsonl
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def config(tmp_path: Path) -> ExtractConfig:
    write_jsonl(tmp_path / "corpus.jsonl", rows(5))
    model = save_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    return config_for(tmp_path, model)


def test_actors_that_do_not_fit_are_refused_with_the_numbers(
    ray_cluster: None, config: ExtractConfig
) -> None:
    with pytest.raises(C2KVError, match=r"40 actors and the reader need 40\.5 CPU, the cluster has 8"):
        extract(config.model_copy(update={"actors": 40}))
    growing = config.model_copy(update={"actors": 40, "min_actors": 1})
    assert extract(growing).extracted == 5, "a pool that grows needs room for its first actors only"


def test_a_stalled_run_ends_with_a_diagnosis(ray_cluster: None, config: ExtractConfig) -> None:
    # No actor can load a model in that time.
    with pytest.raises(StalledError, match=r"no unit was finished for stall_timeout_s \(0\.1 s\)") as caught:
        extract(config.model_copy(update={"stall_timeout_s": 0.1}))
    assert "CPU free" in str(caught.value) and "\n" not in str(caught.value)
    # Were it there still when Ray is stopped, it would start Ray anew.
    assert "c2kv-units" not in {thread.name for thread in threading.enumerate()}


def test_a_run_that_is_told_to_stop_publishes_what_is_finished_and_leaves_nothing_running(
    ray_cluster: None, config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Told(Committer):
        def take(self, unit: Mapping[str, Any]) -> None:
            super().take(unit)
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("pipelines.extract.Committer", Told)
    with pytest.raises(KeyboardInterrupt):
        extract(config.model_copy(update={"documents_per_shard": 1, "commit_documents": 100}))
    assert "c2kv-units" not in {thread.name for thread in threading.enumerate()}
    assert signal.getsignal(signal.SIGTERM) == before
    assert len(KVStore.open(config.store).rows()) == 1, "what was finished"
    next_night = Attempts(open_storage(config.store), namespace="default", run="next")
    next_night.heartbeat()
    assert next_night.left_behind() == {}, "nobody is blamed"
    (report,) = Path(config.store).glob("runs/*/report.json")
    assert json.loads(report.read_text())["state"] == "interrupted"
    monkeypatch.undo()
    assert extract(config).extracted == 4
    assert [note for note in notes(config) if "/next/" not in note] == [], "nothing of it is left"


def test_a_diagnosis_names_what_is_being_worked_on(ray_cluster: None, config: ExtractConfig) -> None:
    KVStore.open(config.store, create=True)
    attempts = Attempts(open_storage(config.store), namespace="default", run="night")
    assert "no actor works on anything" in stall_diagnosis(config, attempts)
    attempts.begin("unit", [("heavy", "h"), ("light", "l")], node="n", actor="a")
    assert "1 units are being worked on" in stall_diagnosis(config, attempts)
    assert "'heavy', 'light'" in stall_diagnosis(config, attempts)


def test_progress_tells_every_phase_and_lines_are_few(
    ray_cluster: None, config: ExtractConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Progress] = []
    lines = ProgressLines(3600.0)

    def follow(progress: Progress) -> None:
        told.append(progress)
        lines(progress)

    extract(config, progress=follow)
    phases = list(dict.fromkeys(progress.phase for progress in told))
    assert phases == ["planning", "starting Ray", "loading the model", "extracting", "finishing"]
    assert (told[-1].done, told[-1].pending, told[-1].failed) == (5, 5, 0)
    assert told[-1].eta_s == 0.0 and told[-1].tokens_per_s > 0
    shown = capsys.readouterr().err.splitlines()
    assert [line for line in shown if line.startswith("finishing: 5 of 5 documents, 0 failed")]
    assert len([line for line in shown if line.startswith(tuple(phases))]) == len(phases)


def test_every_metric_takes_a_value(ray_cluster: None) -> None:
    @ray.remote(num_cpus=0.1)
    def add_all() -> int:
        sinks = {where: RaySink(where, namespace="default") for where in ("actor", "driver")}  # type: ignore[arg-type]
        for name, spec in METRICS.items():
            for value in (0.0, 2.0):
                sinks[spec.where].add(name, value, dict.fromkeys(spec.labels, "x"))
        return len(METRICS)

    assert ray.get(add_all.remote()) == len(METRICS)
