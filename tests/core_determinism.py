"""A document's slots do not depend on what is extracted beside it, nor on the order; to the bit where that is asked."""

from random import Random

import pytest
import torch

from c2kv_core import CompressedDocument, Compressor, CompressorSpec
from tests.tiny_models import random_sidecar, save_tiny_model

TEXTS = {f"d{i}": f"The birch {i} is white. " * (1 + 7 * i % 23) for i in range(14)}
SHUFFLES = 4


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> CompressorSpec:
    folder = tmp_path_factory.mktemp("model")
    model = save_tiny_model(folder / "tiny", max_position_embeddings=2048)
    loaded = Compressor.load(CompressorSpec(model=str(model)))
    random_sidecar(loaded.model).save(folder / "sidecar")
    return CompressorSpec(
        model=str(model), sidecar=str(folder / "sidecar"), ratios=(4,), slot_dtype="float32"
    )


def slots(spec: CompressorSpec, ids: list[str]) -> dict[str, tuple[CompressedDocument, ...]]:
    """Slots of some documents, extracted together in this order by an extractor loaded anew."""
    compressor = Compressor.load(spec)
    parts = [compressor.part_ids("", TEXTS[doc_id]) for doc_id in ids]
    return dict(zip(ids, compressor.compress(parts)[4], strict=True))


def orders() -> list[list[str]]:
    drawn = Random(0)
    return [drawn.sample(list(TEXTS), drawn.randint(1, len(TEXTS))) for _ in range(SHUFFLES)]


def test_batch_mates_order_and_process_change_rounding_only(spec: CompressorSpec) -> None:
    alone = {doc_id: slots(spec, [doc_id])[doc_id] for doc_id in TEXTS}
    for order in orders():
        for doc_id, parts in slots(spec, order).items():
            for got, expected in zip(parts, alone[doc_id], strict=True):
                for name in ("keys", "values"):
                    a, b = getattr(got, name), getattr(expected, name)
                    assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_alone_in_its_pass_a_part_is_the_same_bytes(spec: CompressorSpec) -> None:
    alone_in_pass = CompressorSpec(**{**vars(spec), "max_batch_tokens": 1})
    alone = {doc_id: slots(alone_in_pass, [doc_id])[doc_id] for doc_id in TEXTS}
    for order in orders():
        for doc_id, parts in slots(alone_in_pass, order).items():
            for got, expected in zip(parts, alone[doc_id], strict=True):
                assert torch.equal(got.keys, expected.keys) and torch.equal(got.values, expected.values)
