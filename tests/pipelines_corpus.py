"""The shared corpus of 8,253 real documents: everything is planned, nothing is dropped."""

import os
from pathlib import Path

import pytest

from c2kv_core import SourceDocument
from c2kv_core.batching import length_batches
from c2kv_core.text import ChatRenderer, document_content, document_parts
from pipelines.extract import extract
from pipelines.extract_config import ExtractConfig
from pipelines.extract_units import UnitDocument, gather
from pipelines.plan import Stored, corpus_documents, plan_extraction
from tests.pipelines_sources import write_jsonl
from tests.tiny_models import save_tiny_model, tiny_tokenizer

DATA_DIR = Path(os.environ.get("C2KV_DATA_DIR", Path(__file__).parents[2] / "shared" / "data"))
CORPUS = DATA_DIR / "corpus.jsonl.gz"
DOCUMENTS = 8253

pytestmark = pytest.mark.skipif(
    not CORPUS.is_file(), reason=f"no corpus at {CORPUS}; set C2KV_DATA_DIR to the folder that holds it"
)


def test_every_document_is_planned() -> None:
    plan = plan_extraction(CORPUS, {4: Stored.of(())})
    assert (plan.documents, len(plan.pending), plan.unchanged, plan.empty) == (DOCUMENTS, DOCUMENTS, 0, 0)


def test_parts_of_real_documents_keep_every_word_and_the_limit() -> None:
    tokenizer = tiny_tokenizer()
    renderer = ChatRenderer(tokenizer)
    longest = max(corpus_documents(CORPUS), key=lambda d: len(d.text))
    sample = [d for i, d in enumerate(corpus_documents(CORPUS)) if i % 150 == 0]
    for document in (longest, *sample):
        parts = document_parts(renderer, document.title, document.text, max_part_tokens=1024)
        assert max(map(len, parts)) <= 1024
        opening, closing = (renderer.document_ids("", "x")[i] for i in (0, -1))
        assert all(part[0] == opening and part[-1] == closing for part in parts)
        whole = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in parts)
        for word in document_content(document.title, document.text).split()[::97]:
            assert word in whole


def test_units_of_real_documents_waste_little_and_are_of_one_size() -> None:
    renderer = ChatRenderer(tiny_tokenizer())
    every_20th = [d for i, d in enumerate(corpus_documents(CORPUS)) if i % 20 == 0]
    units = list(gather(map(unit_document, every_20th), shard_tokens=16_384, max_documents=256))
    assert sum(map(len, units)) == len(every_20th)
    real = padded = 0
    for unit in units:
        assert len(unit) == 1 or sum(d.size_bytes for d in unit) <= 16_384 * 4 + 4 * len(unit)
        lengths = [
            len(part)
            for d in unit
            for part in document_parts(renderer, d.title, d.text, max_part_tokens=1024)
        ]
        for batch in length_batches(lengths, max_tokens=4096):
            real += sum(lengths[place] for place in batch)
            padded += len(batch) * max(lengths[place] for place in batch)
    assert 1 - real / padded < 0.1


def unit_document(source: SourceDocument) -> UnitDocument:
    return UnitDocument(
        doc_id=source.doc_id,
        title=source.title,
        text=source.text,
        metadata=None,
        content_hash="",
        ratios=(4,),
        stored=False,
    )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.faults  # a minute: beside what kills processes, out of the way of every change
def test_a_long_document_beside_short_ones(ray_cluster: None, tmp_path: Path) -> None:
    documents = list(corpus_documents(CORPUS))
    longest = max(documents, key=lambda d: len(d.text.split()))
    assert len(longest.text.split()) > 75_000
    short = [d for d in documents if len(d.text.split()) < 12][:40]
    records = [
        {"id": d.doc_id, "title": d.title, "text": d.text} for d in (*short[:20], longest, *short[20:])
    ]
    write_jsonl(tmp_path / "corpus.jsonl", list(records))
    model = save_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    config = ExtractConfig(
        corpus=str(tmp_path / "corpus.jsonl"), store=str(tmp_path / "store"), model=str(model), actors=2
    )
    report = extract(config)
    assert (report.extracted, report.failed_documents, report.unaccounted) == (41, 0, 0)
    assert report.padding_waste < 0.1 and report.slowest[0].doc_id == longest.doc_id
    units = sum(work.units for work in report.actors.values())
    assert units == 2, "the long one alone, the short ones together"


@pytest.mark.ray
@pytest.mark.slow
def test_real_documents_go_through_the_job_and_are_all_accounted_for(
    ray_cluster: None, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model")
    config = ExtractConfig(corpus=str(CORPUS), store=str(tmp_path / "store"), model=str(model), limit=24)
    report = extract(config)
    assert (report.documents, report.extracted, report.failed, report.unaccounted) == (24, 24, [], 0)
    assert extract(config).unchanged == 24


@pytest.mark.ray
@pytest.mark.soak
def test_the_whole_corpus_goes_through_the_job(ray_cluster: None, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    config = ExtractConfig(
        corpus=str(CORPUS), store=str(tmp_path / "store"), model=str(model), actors=2, threads_per_actor=1
    )
    report = extract(config)
    assert (report.documents, report.extracted, report.unaccounted) == (DOCUMENTS, DOCUMENTS, 0)
    assert report.padding_waste < 0.1
    again = extract(config)
    assert (again.unchanged, again.extracted, again.actors) == (DOCUMENTS, 0, {})
