"""The shared corpus of 8,253 real documents: everything is planned, nothing is dropped."""

import os
from pathlib import Path

import pytest

from c2kv_core.text import ChatRenderer, document_content, document_parts
from pipelines.extract import extract
from pipelines.extract_config import ExtractConfig
from pipelines.plan import Stored, corpus_documents, plan_extraction
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
