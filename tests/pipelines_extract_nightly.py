"""The job night after night: what changed and nothing else, what is gone, what may be served."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from c2kv_core import Compressor
from c2kv_core.config import to_yaml
from c2kv_core.errors import C2KVError, InputError
from c2kv_core.store import KVStore, served
from pipelines.corpus import Columns
from pipelines.extract import extract
from pipelines.extract_config import ExtractConfig
from pipelines.extract_estimate import dry_run
from pipelines.extract_promote import QualityError
from pipelines.extract_report import ActorWork, ExtractReport
from pipelines.extract_save import as_markdown
from pipelines.plan import ExtractPlan, plan_extraction
from tests.extract_kit import RemovingStage, assert_same_stores, config_for, orphans, rows, stored_documents
from tests.pipelines_sources import write_jsonl
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

LONG = "The oak is tall. It grows slowly.\n\n" * 600
"""More tokens than the model has positions."""
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096)


def labelled(labels: dict[str, str], **texts: str) -> list[object]:
    return [{"id": i, "title": "", "text": t, "label": labels.get(i, "old")} for i, t in texts.items()]


def test_two_nights(ray_cluster: None, tmp_path: Path, model_dir: Path) -> None:
    config = config_for(
        tmp_path,
        model_dir,
        ratios=(4, 8),
        columns=Columns(metadata=("label",)),
        price_per_hour=3.6,
        units_at_once=2,
    )
    texts = {"long": LONG, **{f"d{i}": f"The ash {i} is grey." for i in range(6)}}
    assert config.spec().max_positions() == 4096
    write_jsonl(tmp_path / "corpus.jsonl", labelled({}, **texts))
    before = dry_run(config)
    assert (before.new, before.changed, before.seconds, before.tokens_are_counted) == (7, 0, None, True)
    first = extract(config)
    assert before.source_tokens == first.source_tokens
    assert (before.not_in_corpus, before.beyond_context, before.positions) == (0, 1, 4096)
    assert (first.beyond_context_documents, first.beyond_context) == (1, ["long"]), "no question can use it"
    check_report(config, first.run)

    grown = {**texts, "long": LONG + "And it fell.", "d6": "A new one."}
    del grown["d0"], grown["d1"]
    write_jsonl(tmp_path / "corpus.jsonl", labelled({"d2": "new"}, **grown))
    assert dry_run(config).not_in_corpus == 2
    config = config.model_copy(update={"delete_missing": True})
    with pytest.raises(InputError, match="would remove 2 of 7 documents"):
        extract(config)
    refused = dry_run(config.model_copy(update={"dry_run": True}))
    assert refused.missing == 2 and "would remove 2 of 7" in str(refused.refusal), "and the counts are told"
    config = config.model_copy(update={"max_deleted_fraction": 0.5})
    plan = dry_run(config)
    assert (plan.new, plan.changed, plan.unchanged, plan.relabelled, plan.missing) == (1, 1, 4, 1, 2)
    assert plan.seconds is not None and plan.cost is not None
    added = extract(config.model_copy(update={"mode": "add", "delete_missing": False}))
    assert (added.extracted, added.unchanged, added.relabelled) == (1, 5, 1), "only what is new"
    second = extract(config)
    assert (second.extracted, second.unchanged, second.relabelled, second.removed) == (1, 5, 0, 2)
    assert 0.5 < second.reused_tokens / second.source_tokens < 1
    check_second_night(config)


def check_report(config: ExtractConfig, run: str) -> None:
    folder = Path(config.store) / "runs" / run
    report = json.loads((folder / "report.json").read_text())
    assert (report["state"], report["unaccounted"], report["extracted"]) == ("done", 0, 7)
    assert report["cost_per_million_tokens"] > 0 and report["cpu_s"] > 0
    assert sum(a["source_tokens"] for a in report["actors"].values()) == report["source_tokens"]
    assert {s["id"] for s in report["slowest"]} <= {"long", *(f"d{i}" for i in range(6))}
    assert "| cost a million source tokens |" in (folder / "report.md").read_text()


def check_second_night(config: ExtractConfig) -> None:
    """Reused parts are the bytes that computing them gives; what is gone is gone."""
    store = KVStore.open(config.store)
    assert {row.doc_id for row in store.rows()} == {"long", *(f"d{i}" for i in range(2, 7))}
    kept = store.text(["d2", "d3", "d0"], namespace="default")
    assert {i: json.loads(t.metadata or "")["label"] for i, t in kept.items()} == {"d2": "new", "d3": "old"}
    torch.set_num_threads(1)
    compressor = Compressor.load(config.spec())
    ids = compressor.part_ids("", LONG + "And it fell.")
    assert len(ids) > 2
    for ratio in config.ratios:
        (fresh,) = compressor.compress([ids], (ratio,))[ratio]
        for part, expected in zip(stored_documents(config, ratio)["long"].parts, fresh, strict=True):
            torch.testing.assert_close(part.keys, expected.keys, rtol=1e-2, atol=1e-5)
            torch.testing.assert_close(part.values, expected.values, rtol=1e-2, atol=1e-5)
    assert store.verify().ok


def test_a_new_fingerprint_is_served_only_after_its_quality_check(
    ray_cluster: None, tmp_path: Path, model_dir: Path
) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", rows(3))
    checked = (
        f"{sys.executable} -c \"import os, sys; print('F1 of', os.environ['C2KV_RATIO']); sys.exit(%d)\""
    )
    config = config_for(tmp_path, model_dir, promote=True, quality_check=checked % 0)
    report = extract(config)
    assert "F1 of 4" in report.quality
    now = served(config.store, "default")
    assert now is not None and now.fingerprint == report.fingerprints[4] and "F1 of 4" in now.reason
    worse = config.model_copy(update={"ratios": (8,), "quality_check": checked % 3})
    with pytest.raises(QualityError, match="exit code 3: F1 of 8"):
        extract(worse)
    assert served(config.store, "default") == now, "the old default stays"
    assert len(stored_documents(worse, 8)) == 3, "the slots are there, for another look"
    better = extract(worse.model_copy(update={"quality_check": None}))
    assert better.unchanged == 3
    after = served(config.store, "default")
    assert after is not None and (after.version, after.fingerprint) == (2, better.fingerprints[8])
    lossy = config.model_copy(update={"ratios": (16,), "max_document_bytes": 30})
    with pytest.raises(QualityError, match="2 of 3 documents failed, more than max_failed_fraction"):
        extract(lossy)
    assert served(config.store, "default") == after, "a few may fail, but not most of them"


def change_after_planning(monkeypatch: pytest.MonkeyPatch, corpus: Path, then: list[object]) -> None:
    """The corpus holds other documents once a run has been planned."""

    def planned(*args: Any, **options: Any) -> ExtractPlan:
        made = plan_extraction(*args, **options)
        write_jsonl(corpus, then)
        return made

    monkeypatch.setattr("pipelines.extract_plan.plan_extraction", planned)


def test_a_document_that_vanishes_during_the_run_is_accounted_for(
    ray_cluster: None, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", rows(5))
    change_after_planning(monkeypatch, corpus, rows(5)[1:])
    report = extract(config_for(tmp_path, model_dir))
    assert (report.documents, report.extracted, report.vanished, report.unaccounted) == (5, 4, 1, 0)


def test_a_changed_document_leaves_no_old_text_where_none_is_to_be_kept(
    ray_cluster: None, tmp_path: Path, model_dir: Path
) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", rows(3))
    config = config_for(tmp_path, model_dir)
    extract(config)
    write_jsonl(corpus, [*rows(2), {"id": "doc-2", "title": "", "text": "The birch was felled."}])
    assert extract(config.model_copy(update={"keep_text": False})).extracted == 1
    assert sorted(KVStore.open(config.store).text(["doc-1", "doc-2"], namespace="default")) == ["doc-1"]


def test_what_comes_back_during_the_run_is_not_removed(
    ray_cluster: None, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", rows(5))
    config = config_for(tmp_path, model_dir, delete_missing=True, max_deleted_fraction=0.5)
    extract(config)
    write_jsonl(corpus, rows(6)[2:])
    change_after_planning(monkeypatch, corpus, rows(6)[1:])
    report = extract(config)
    assert (report.extracted, report.removed, report.unaccounted) == (1, 1, 0)
    assert {row.doc_id for row in KVStore.open(config.store).rows()} == {f"doc-{i}" for i in range(1, 6)}


@pytest.mark.faults
def test_a_store_that_is_removed_stops_the_run_and_leaves_nothing_half_made(
    ray_cluster: None, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", rows(3))
    config = config_for(tmp_path, model_dir)
    with monkeypatch.context() as patch:
        patch.setattr("pipelines.extract_stream.ExtractStage", RemovingStage)
        with pytest.raises(C2KVError, match="is gone"):
            extract(config)
    assert not (tmp_path / "store" / "shards").exists()
    assert extract(config).extracted == 3


@pytest.mark.faults
def test_jobs_at_once_and_jobs_that_divide_a_corpus_leave_one_row_each(
    ray_cluster: None, tmp_path: Path, model_dir: Path
) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", rows(16))
    config = config_for(tmp_path, model_dir, threads_per_actor=1)
    halves = [
        config.model_copy(update={"partition": (i, 2), "store": str(tmp_path / "halves")}) for i in (0, 1)
    ]
    reports = [extract(half) for half in halves]
    assert sum(report.extracted for report in reports) == 16
    assert all(report.extracted for report in reports)
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    other = subprocess.Popen(
        [sys.executable, "-m", "pipelines.extract", "--config", str(tmp_path / "run.yaml")], cwd=ROOT
    )
    extract(config)
    assert other.wait(timeout=400) == 0
    assert_same_stores(config, halves[0])
    KVStore.open(config.store).gc(retention_s=0)
    assert orphans(config) == []


def report(**fields: Any) -> ExtractReport:
    told = {"run": "r", "store": "s", "namespace": "n", "hardware": "h", "sidecar": "trained"}
    return ExtractReport(**told, fingerprints={4: "f"}, positions=10, documents=1, unchanged=0, **fields)


def test_estimates_take_no_speed_of_a_moment() -> None:
    work = {"a": ActorWork(units=2, source_tokens=5_000, busy_s=50.0)}
    short = report(source_tokens=5_000, steady_tokens=2_000, steady_s=0.01, actors=work)
    assert short.usual_tokens_per_s == 100.0, "units that end together are no speed"
    assert "steady state" not in as_markdown(short)
    few = report(source_tokens=50_000, steady_tokens=40_000, steady_s=20.0, actors=work)
    assert few.usual_tokens_per_s == 100.0, "two units, of which one began long before the other ended"
    work = {"a": ActorWork(units=9, source_tokens=50_000, busy_s=50.0)}
    steady = report(source_tokens=50_000, steady_tokens=40_000, steady_s=20.0, actors=work)
    assert steady.usual_tokens_per_s == 2_000.0 and "steady state" in as_markdown(steady)
    assert report(source_tokens=1_000, actors=work).usual_tokens_per_s is None, "too little to tell"
    assert report(source_tokens=9_000, reused_tokens=8_500, actors=work).usual_tokens_per_s is None
