"""The extraction job on real Ray, with a tiny model and a real store."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from c2kv_core import Compressor, StoredDocument, load_base
from c2kv_core.config import load_config
from c2kv_core.errors import C2KVError
from c2kv_core.store import KVStore
from pipelines.extract import extract
from pipelines.extract_config import ExtractConfig
from pipelines.extract_report import ExtractReport
from pipelines.plan import ExtractPlan, plan_extraction
from tests.core_store_kit import assert_same
from tests.pipelines_sources import write_jsonl
from tests.tiny_models import random_sidecar, save_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow]

LONG = "The oak is tall. It grows slowly.\n\n" * 200
ROWS: list[dict[str, str]] = [
    {"id": "short", "title": "S", "text": "a"},
    {"id": "long", "title": "The oak", "text": LONG},
    {"id": "empty", "title": "Nothing", "text": "  "},
    *({"id": f"doc-{i}", "title": f"T{i}", "text": f"The birch {i} is white. " * (i + 1)} for i in range(12)),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096)


def test_a_corpus_goes_to_a_bucket_and_comes_back_the_same(
    ray_cluster: None, config: ExtractConfig, bucket: str
) -> None:
    remote = config.model_copy(update={"store": bucket, "actors": 2})
    report = extract(remote)
    assert_accounted(report, extracted=14, unchanged=0)
    assert_accounted(extract(remote), extracted=0, unchanged=14)
    extract(config)
    ids = [row["id"] for row in ROWS if row["id"] != "empty"]
    for ratio in config.ratios:
        here, there = (stored(c, ratio, ids) for c in (config, remote))
        for doc_id in ids:
            assert_same(there[doc_id], here[doc_id])
    assert KVStore.open(bucket).verify().ok


@pytest.fixture
def config(tmp_path: Path, model_dir: Path) -> ExtractConfig:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", list(ROWS))
    return ExtractConfig(
        corpus=str(corpus),
        store=str(tmp_path / "store"),
        model=str(model_dir),
        ratios=(4, 8),
        documents_per_shard=4,
    )


def stored(config: ExtractConfig, ratio: int, ids: list[str]) -> dict[str, StoredDocument]:
    """Documents as a reader gets them."""
    identity = config.spec().identities()[ratio]
    found = KVStore.open(config.store, identity=identity).get(ids, namespace=config.namespace)
    assert all(isinstance(d, StoredDocument) for d in found.values()), found
    return found  # type: ignore[return-value]


def assert_accounted(report: ExtractReport, *, extracted: int, unchanged: int) -> None:
    assert (report.extracted, report.unchanged, report.unaccounted) == (extracted, unchanged, 0)


def test_a_corpus_becomes_a_store_and_only_changes_are_extracted_again(
    ray_cluster: None, config: ExtractConfig, tmp_path: Path
) -> None:
    report = extract(config)
    assert_accounted(report, extracted=14, unchanged=0)
    assert [(s.doc_id, s.reason) for s in report.skipped] == [("empty", "the document has no text")]
    check_slots_equal_those_made_in_this_process(config)
    check_texts_and_run_files(config, report)

    shards = sorted(Path(config.store).glob("shards/**/*.arrow"))
    assert_accounted(extract(config), extracted=0, unchanged=14)
    assert sorted(Path(config.store).glob("shards/**/*.arrow")) == shards

    changed = [{**ROWS[0], "text": "b"}, *ROWS[1:], {"id": "new", "title": "", "text": "A new one."}]
    write_jsonl(tmp_path / "corpus.jsonl", list(changed))
    assert_accounted(extract(config), extracted=2, unchanged=13)
    assert stored(config, 4, ["short"])["short"].content_hash != stored_hash(ROWS[0])
    assert KVStore.open(config.store).text(["short"], namespace="default")["short"].text == "b"

    further = config.model_copy(update={"ratios": (4, 16)})
    report = extract(further)
    assert_accounted(report, extracted=15, unchanged=0)
    assert {r.fingerprint for r in KVStore.open(config.store).rows()} >= set(report.fingerprints.values())
    assert report.slots == sum(-(-d.num_tokens // 16) for d in stored(further, 16, ["short"]).values()) + sum(
        r.slots
        for r in KVStore.open(config.store).rows(fingerprint=report.fingerprints[16])
        if r.doc_id != "short"
    )


def stored_hash(row: dict[str, str]) -> str:
    from c2kv_core.text import content_hash

    return content_hash(row["title"], row["text"])


def check_slots_equal_those_made_in_this_process(config: ExtractConfig) -> None:
    """Batch mates, actor and order leave no trace; a document of several parts is one document."""
    compressor = Compressor.load(config.spec())
    rows = [row for row in ROWS if row["id"] != "empty"]
    for ratio in config.ratios:
        found = stored(config, ratio, [row["id"] for row in rows])
        assert len(found["long"].parts) > 1
        for row in rows:
            ids = compressor.part_ids(row["title"], row["text"])
            (alone,) = compressor.compress([ids], (ratio,))[ratio]
            got = found[row["id"]].parts
            assert [p.num_tokens for p in got] == [len(part) for part in ids]
            for part, expected in zip(got, alone, strict=True):
                # one unit of bfloat16, in which slots are stored
                torch.testing.assert_close(part.keys, expected.keys, rtol=1e-2, atol=1e-5)
                torch.testing.assert_close(part.values, expected.values, rtol=1e-2, atol=1e-5)


def check_texts_and_run_files(config: ExtractConfig, report: ExtractReport) -> None:
    text = KVStore.open(config.store).text(["long"], namespace="default")["long"]
    assert (text.title, text.text) == ("The oak", LONG)
    run = Path(config.store) / "runs" / report.run
    assert load_config(ExtractConfig, run / "config.yaml") == config
    assert json.loads((run / "report.json").read_text())["extracted"] == 14


def test_one_bad_document_fails_alone_and_is_named(
    ray_cluster: None, tmp_path: Path, model_dir: Path
) -> None:
    # The tiny vocabulary splits these into more tokens than the tiny limit leaves beside the turn: not one text fits.
    narrow = save_tiny_model(tmp_path / "narrow", max_position_embeddings=64)
    rows = [ROWS[0], {"id": "wide", "title": "", "text": "word " * 100}, ROWS[3]]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", list(rows))
    report = extract(
        ExtractConfig(
            corpus=str(corpus), store=str(tmp_path / "store"), model=str(narrow), documents_per_shard=8
        )
    )
    assert [f.doc_id for f in report.failed] == ["wide"]
    assert "64 positions" in report.failed[0].reason
    assert_accounted(report, extracted=2, unchanged=0)


def test_a_limited_run_reads_nothing_behind_its_limit(
    ray_cluster: None, tmp_path: Path, model_dir: Path
) -> None:
    # Neither checked nor wanted: another text under a planned id, and a row that cannot be read.
    rows: list[object] = [ROWS[0], ROWS[3], {**ROWS[0], "text": "behind the limit"}, "not an object"]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", rows)
    config = ExtractConfig(corpus=str(corpus), store=str(tmp_path / "store"), model=str(model_dir), limit=2)
    assert_accounted(extract(config), extracted=2, unchanged=0)
    assert KVStore.open(config.store).text(["short"], namespace="default")["short"].text == ROWS[0]["text"]
    assert_accounted(extract(config), extracted=0, unchanged=2)


def test_a_store_that_cannot_be_written_stops_the_job_and_says_why(
    ray_cluster: None, config: ExtractConfig
) -> None:
    KVStore.open(config.store, create=True)
    (Path(config.store) / "shards").write_text("in the way")
    with pytest.raises(C2KVError, match="the job stopped: cannot write the shard") as caught:
        extract(config)
    assert "\n" not in str(caught.value)


def test_a_corpus_that_breaks_while_it_is_read_stops_the_job_in_one_line(
    ray_cluster: None,
    config: ExtractConfig,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    plan = plan_extraction

    def break_after_planning(*args: Any, **options: Any) -> ExtractPlan:
        made = plan(*args, **options)
        write_jsonl(Path(config.corpus), [ROWS[0], "not an object"])
        return made

    monkeypatch.setattr("pipelines.extract_plan.plan_extraction", break_after_planning)
    with pytest.raises(C2KVError, match=r"corpus\.jsonl, line 2: expected an object") as caught:
        extract(config)
    assert "\n" not in str(caught.value) and "retry" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err


def test_a_sidecar_retrained_in_place_after_planning_stops_the_job(
    ray_cluster: None, config: ExtractConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_base(config.model)
    random_sidecar(model, seed=1).save(tmp_path / "sidecar")
    plan = plan_extraction

    def retrain_after_planning(*args: Any, **options: Any) -> ExtractPlan:
        shutil.rmtree(tmp_path / "sidecar")
        random_sidecar(model, seed=2).save(tmp_path / "sidecar")
        return plan(*args, **options)

    monkeypatch.setattr("pipelines.extract_plan.plan_extraction", retrain_after_planning)
    with pytest.raises(C2KVError, match="changed since the run began"):
        extract(config.model_copy(update={"sidecar": str(tmp_path / "sidecar")}))
    assert KVStore.open(config.store).rows() == []


def test_slots_that_are_not_finite_are_never_stored(
    ray_cluster: None, config: ExtractConfig, tmp_path: Path
) -> None:
    model, _ = load_base(config.model)
    sidecar = random_sidecar(model)
    with torch.no_grad():
        sidecar.slot_embedding[0] = float("nan")
    sidecar.save(tmp_path / "sidecar")
    report = extract(config.model_copy(update={"sidecar": str(tmp_path / "sidecar"), "limit": 2}))
    assert [f.doc_id for f in report.failed] == ["short", "long"] and "not finite" in report.failed[0].reason
    assert KVStore.open(config.store).rows() == []


def test_folder_and_parquet_sources_go_through_the_same_job(
    ray_cluster: None, tmp_path: Path, model_dir: Path
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.md").write_text(f"# Title {i}\nThe ash {i} has grey bark.")
    config = ExtractConfig(corpus=str(folder), store=str(tmp_path / "store"), model=str(model_dir), limit=3)
    assert_accounted(extract(config), extracted=3, unchanged=0)
    assert_accounted(extract(config.model_copy(update={"limit": None})), extracted=2, unchanged=3)
