"""Extraction needs memory linear in the document: no tensor of (tokens + slots)² ever exists."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from c2kv_core import slot_attention
from c2kv_core.extractor import Extractor
from tests.tiny_models import random_sidecar, tiny_model, token_ids


class LargestTensor(TorchDispatchMode):
    """Records the largest memory behind any tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.bytes = max([self.bytes, *(x.untyped_storage().nbytes() for x in made)])
        return out


def largest_bytes(tokens: int, ratio: int) -> int:
    model = tiny_model()
    extractor = Extractor(model, random_sidecar(model))
    with LargestTensor() as record:
        extractor.extract([token_ids(tokens)], ratio)
    return record.bytes


@pytest.mark.parametrize("ratio", [1, 4, 8])
def test_the_largest_tensor_grows_linearly(monkeypatch: pytest.MonkeyPatch, ratio: int) -> None:
    monkeypatch.setattr(slot_attention, "CHUNK_SLOTS", 32)
    sizes = [largest_bytes(tokens, ratio) for tokens in (512, 1024, 2048)]
    for small, large in pairwise(sizes):
        assert large < 2.5 * small
    assert sizes[-1] < 4 * 2048**2


def test_it_does_so_with_the_chunks_we_ship() -> None:
    assert largest_bytes(4096, 4) < 2.5 * largest_bytes(2048, 4)


def test_the_probe_sees_a_full_score_matrix() -> None:
    with LargestTensor() as record:
        torch.ones(100, 8) @ torch.ones(8, 100)
    assert record.bytes == 4 * 100**2
