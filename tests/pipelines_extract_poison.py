"""Documents that do harm: each fails alone, is remembered, and stops nothing but too many of them."""

import json
from pathlib import Path

import pytest

from c2kv_core.config import to_yaml
from c2kv_core.store import Attempts, DeadLetters, KVStore, open_storage
from c2kv_core.text import content_hash
from pipelines.extract import extract, main
from pipelines.extract_commit import TooManyFailuresError
from tests.extract_kit import BROKEN, DEADLY, HUNGRY, PoisonedStage, config_for, notes, rows
from tests.pipelines_sources import write_jsonl
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_each_kind_of_poison_fails_alone_and_is_left_alone_until_asked_for(
    ray_cluster: None, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = {"deadly": DEADLY, "broken": BROKEN, "hungry": HUNGRY, "wide": "oak " * 2000}
    write_jsonl(tmp_path / "corpus.jsonl", rows(9, **poison))
    config = config_for(tmp_path, model_dir, max_attempts=2, max_document_bytes=4000, documents_per_shard=7)
    with monkeypatch.context() as patch:
        patch.setattr("pipelines.extract_stream.ExtractStage", PoisonedStage)
        report = extract(config)
        assert (report.extracted, report.failed_documents, report.unaccounted) == (9, 4, 0)
        kinds = {f.doc_id: f.kind for f in report.failed}
        assert kinds == {"deadly": "killed", "broken": "tokenizer", "hungry": "memory", "wide": "too_long"}
    letters = {one.doc_id: one for one in DeadLetters.open(config.store).rows()}
    assert letters.keys() == kinds.keys()
    assert (letters["deadly"].attempts, letters["hungry"].attempts) == (2, 1)
    assert "died 2 times" in letters["deadly"].reason and "no memory" in letters["hungry"].reason
    assert notes(config) == [], "everything is accounted for"

    # Left alone, without Ray and without a model.
    again = extract(config)
    assert (again.unchanged, again.failed_before, again.extracted) == (9, 4, 0)

    # Tried again, with the cause gone for three of them; attempts add up.
    retried = extract(config.model_copy(update={"retry_failed": True}))
    assert (retried.extracted, retried.failed_documents, retried.failed_before) == (3, 1, 0)
    (left,) = DeadLetters.open(config.store).rows()
    assert (left.doc_id, left.attempts) == ("wide", 2) and left.first_failed_at < left.last_failed_at

    # Another content is another document.
    write_jsonl(tmp_path / "corpus.jsonl", rows(9, deadly=DEADLY, wide="short now"))
    assert extract(config).extracted == 1
    assert DeadLetters.open(config.store).rows() == []
    assert KVStore.open(config.store).verify().ok


def test_deaths_of_dead_runs_count_until_asked_for_and_failures_go_with_their_documents(
    ray_cluster: None, tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", rows(2, wide="oak " * 2000))
    config = config_for(tmp_path, model_dir, max_document_bytes=4000)
    KVStore.open(config.store, create=True)
    dead = Attempts(open_storage(config.store), namespace="default", run="dead")
    for _ in range(config.max_attempts):
        dead.begin("u", [("doc-1", content_hash("T1", "The birch 1 is white. " * 2))], node="n", actor="a")
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    assert main(["--config", str(tmp_path / "run.yaml"), "retry_failed=true"]) == 1, "as c2kv extract"
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert (report["extracted"], [f["id"] for f in report["failed"]]) == (2, ["wide"])
    assert said.err.splitlines()[-1].startswith("error: 1 of 3 documents failed, the first 'wide': ")
    write_jsonl(tmp_path / "corpus.jsonl", rows(2))
    extract(config)
    assert len(DeadLetters.open(config.store).rows()) == 1, "it may come back"
    extract(config.model_copy(update={"delete_missing": True}))
    assert DeadLetters.open(config.store).rows() == []


def test_too_many_failures_stop_the_run_and_are_not_held_against_the_documents(
    ray_cluster: None, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {f"broken-{i}": BROKEN for i in range(14)}
    write_jsonl(tmp_path / "corpus.jsonl", rows(4, **broken))
    config = config_for(tmp_path, model_dir, max_failed_fraction=0.5, commit_documents=100, readers=1)
    with monkeypatch.context() as patch:
        patch.setattr("pipelines.extract_stream.ExtractStage", PoisonedStage)
        with pytest.raises(
            TooManyFailuresError, match=r"1[1-4] of 18 documents failed, more than max_failed_fraction"
        ):
            extract(config)
    stored = KVStore.open(config.store).rows()
    assert [row.doc_id for row in stored] == [f"doc-{i}" for i in range(4)], "what went well is published"
    assert not any(one.run for one in DeadLetters.open(config.store).rows())
    assert extract(config).extracted == 14
