"""Whatever dies, whenever: the same command goes on, and the store becomes that of an undisturbed run."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from c2kv_core.config import to_yaml
from c2kv_core.store import KVStore, attempts
from pipelines.extract import extract
from pipelines.extract_config import ExtractConfig
from tests.extract_kit import ShakyStage, assert_same_stores, config_for, notes, orphans, rows
from tests.extract_victim import STORE_PID
from tests.pipelines_sources import write_jsonl
from tests.s3_server import BUCKET, S3Server
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(600)]

DOCUMENTS = 20
BOUND_S = 400
"""For a run that takes seconds on a machine with nothing else to do."""
ROOT = Path(__file__).parent.parent
MOMENTS = ("first", "between", "last")


@pytest.fixture(scope="module")
def calm(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> ExtractConfig:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("calm")
    model = save_tiny_model(folder / "model", max_position_embeddings=4096)
    write_jsonl(folder / "corpus.jsonl", rows(DOCUMENTS))
    config = config_for(folder, model, ratios=(4, 8), threads_per_actor=1, stall_timeout_s=300.0)
    assert extract(config).extracted == DOCUMENTS
    return config


def run_victim(config: ExtractConfig, folder: Path, victim: str, moment: str, **environment: str) -> int:
    """Exit code of a run in which something is killed."""
    (folder / "run.yaml").write_text(to_yaml(config))
    finished = subprocess.run(
        [sys.executable, "-m", "tests.extract_victim", str(folder / "run.yaml"), victim, moment],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    if victim in ("actor", "store"):
        assert "Traceback" not in finished.stderr, finished.stderr
    return finished.returncode


def finish(config: ExtractConfig) -> int:
    """Run the same command again; what it computed must be what was not committed, and no more."""
    committed = {row.doc_id for row in KVStore.open(config.store).rows()}
    report = extract(config)  # starts no Ray where nothing is left to do
    assert (report.extracted, report.unchanged, report.unaccounted) == (
        DOCUMENTS - len(committed),
        len(committed),
        0,
    )
    return len(committed)


def check_end(config: ExtractConfig, calm: ExtractConfig) -> None:
    assert_same_stores(config, calm)
    store = KVStore.open(config.store)
    store.gc(retention_s=0)
    assert orphans(config) == []
    assert store.verify().ok
    assert extract(config).unchanged == DOCUMENTS


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", ["driver", "node"])
def test_a_killed_driver_or_node_costs_only_what_was_not_committed(
    calm: ExtractConfig, tmp_path: Path, victim: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = calm.model_copy(update={"store": str(tmp_path / "store")})
    code = run_victim(config, tmp_path, victim, moment)
    done = len({row.doc_id for row in KVStore.open(config.store).rows()}) == DOCUMENTS
    # Where every result had reached the driver when its node went, it may have come to its end.
    assert code == -signal.SIGKILL if victim == "driver" else code != 0 or done
    # The dead run's last heartbeat is a moment ago.
    monkeypatch.setattr(attempts, "DEAD_AFTER_S", 0.0)
    committed = finish(config)
    if victim == "driver":
        assert committed == 0 if moment == "first" else 0 < committed < DOCUMENTS
    assert committed == DOCUMENTS or notes(config) == [], "what the dead run noted is settled"
    check_end(config, calm)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_actor_costs_a_restart(calm: ExtractConfig, tmp_path: Path, moment: str) -> None:
    config = calm.model_copy(update={"store": str(tmp_path / "store")})
    assert run_victim(config, tmp_path, "actor", moment) == 0
    assert finish(config) == DOCUMENTS
    assert notes(config) == []
    check_end(config, calm)


def test_actors_killed_again_and_again_change_nothing(
    calm: ExtractConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.extract_stream.ExtractStage", ShakyStage)
    config = calm.model_copy(update={"store": str(tmp_path / "store"), "documents_per_shard": 7})
    report = extract(config)
    assert (report.extracted, report.failed_documents) == (DOCUMENTS, 0)
    assert len(list((tmp_path / "seen").iterdir())) == 3, "every unit lost its process once"
    assert len(report.actors) >= 1 and notes(config) == []
    assert_same_stores(config, calm)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    made = S3Server(tmp_path / "server")
    made.start()
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    made.stop()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_store_ends_the_run_in_one_line_and_nothing_is_lost(
    calm: ExtractConfig, tmp_path: Path, server: S3Server, moment: str
) -> None:
    config = calm.model_copy(update={"store": f"s3://{BUCKET}/night"})
    assert run_victim(config, tmp_path, "store", moment, **{STORE_PID: str(server.process_group)}) == 1
    server.start()
    before = len({row.doc_id for row in KVStore.open(config.store).rows()})
    assert before == 0 if moment == "first" else 0 < before < DOCUMENTS
    # Workers of the session's Ray know another server.
    command = [sys.executable, "-m", "pipelines.extract", "--config", str(tmp_path / "run.yaml")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=BOUND_S, capture_output=True)
    check_end(config, calm)
