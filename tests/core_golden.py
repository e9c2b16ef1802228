"""Reference vectors of an independent implementation (see the README of the golden folder)."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core import hf_adapter
from c2kv_core.cache import AppendCache
from c2kv_core.compose import ComposedContext, compose, prefill, token_states
from c2kv_core.document import CompressedDocument
from c2kv_core.extractor import Extractor
from c2kv_core.generate import generate
from c2kv_core.sidecar import Sidecar
from c2kv_core.sidecar_config import SidecarConfig

TOLERANCE = 1e-4


class GoldenCase:
    """One file, with the model and sidecar it describes."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata()
            self.tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self.ratio = int(meta["ratio"])
        self.num_docs = int(meta["num_docs"])
        kind = getattr(transformers, meta["architecture"])
        self.model: PreTrainedModel = kind(kind.config_class(**json.loads(meta["config"]))).eval()
        base = {n.removeprefix("base."): t for n, t in self.tensors.items() if n.startswith("base.")}
        missing, unexpected = self.model.load_state_dict(base, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        self.sidecar = Sidecar.from_base(self.model, SidecarConfig(ratios=(self.ratio,)))
        side = {n.removeprefix("sidecar."): t for n, t in self.tensors.items() if n.startswith("sidecar.")}
        self.sidecar.load_state_dict(side)

    def ids(self, name: str) -> list[int]:
        return self.tensors[name].tolist()

    def extract(self) -> list[CompressedDocument]:
        ids = [self.ids(f"doc.{i}.ids") for i in range(self.num_docs)]
        return Extractor(self.model, self.sidecar).extract(ids, self.ratio)

    def orders(self) -> list[str]:
        return sorted({name.split(".")[1] for name in self.tensors if name.startswith("order.")})


@pytest.fixture
def case(golden_file: Path) -> GoldenCase:
    assert golden_file.is_file(), f"no golden vectors (*.safetensors) in {golden_file}"
    return GoldenCase(golden_file)


def assert_near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0.0)


def test_extraction_gives_the_reference_slots(case: GoldenCase) -> None:
    for i, document in enumerate(case.extract()):
        assert document.slot_positions.tolist() == case.ids(f"doc.{i}.slot_positions")
        assert_near(document.keys, case.tensors[f"doc.{i}.keys_pre_rope"])
        assert_near(document.values, case.tensors[f"doc.{i}.values"])


def composed(case: GoldenCase, order: str, documents: list[CompressedDocument]) -> ComposedContext:
    prefix = prefill(case.model, case.ids("system_ids"))
    return compose(case.model, prefix, [documents[i] for i in case.ids(f"order.{order}.indices")])


def test_composition_gives_the_reference_cache_and_positions(case: GoldenCase) -> None:
    documents = case.extract()
    for order in case.orders():
        context = composed(case, order, documents)
        assert_near(torch.cat(context.cache.keys), case.tensors[f"order.{order}.keys"])
        assert_near(torch.cat(context.cache.values), case.tensors[f"order.{order}.values"])
        assert context.next_position == case.ids(f"order.{order}.query_positions")[0]


def test_question_gives_the_reference_logits_and_continuation(case: GoldenCase) -> None:
    documents = case.extract()
    query = case.ids("query_ids")
    for order in case.orders():
        context = composed(case, order, documents)
        with torch.no_grad():
            hidden = token_states(
                case.model,
                torch.tensor([query]),
                AppendCache(context.cache),
                start=context.next_position,
            )
            logits = hf_adapter.logits(case.model, hidden)[0]
        assert_near(logits, case.tensors[f"order.{order}.query_logits"])
        greedy = generate(case.model, context, query, max_new_tokens=8, eos_token_ids=frozenset())
        assert list(greedy) == case.ids(f"order.{order}.greedy_ids")
