"""Extraction against the brute-force oracle: every kind of model, length, ratio and batch."""

from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from c2kv_core import hf_adapter, slot_attention
from c2kv_core.document import CompressedDocument
from c2kv_core.errors import (
    ContextLengthError,
    InputError,
    RatioError,
    SidecarError,
    UnsupportedModelError,
)
from c2kv_core.extractor import Extractor, _token_states
from c2kv_core.sidecar import Sidecar
from c2kv_core.sidecar_config import RESIDUALS, SELECTIONS, SidecarConfig
from tests import oracle
from tests.oracle import assert_near
from tests.tiny_models import (
    ARCHITECTURES,
    MAX_POSITIONS,
    ROPES,
    VOCAB_SIZE,
    documents,
    new_tiny_model,
    random_sidecar,
    tiny_model,
    token_ids,
)

RATIOS = tuple(range(1, 10))


@lru_cache(maxsize=256)
def extractor(
    architecture: str = "llama",
    rope: str = "default",
    overlap_tokens: int = 0,
    residual: str = "none",
    selection: str = "none",
) -> Extractor:
    model = tiny_model(architecture, rope)
    config = SidecarConfig(
        ratios=RATIOS, overlap_tokens=overlap_tokens, residual=residual, selection=selection
    )
    return Extractor(model, random_sidecar(model, config))


def expected(made_by: Extractor, ids: Sequence[int], ratio: int) -> oracle.OracleDocument:
    with torch.no_grad():
        return oracle.extract(
            made_by.model, made_by.sidecar, ids, ratio, made_by.sidecar.config.overlap_tokens
        )


def assert_same(got: CompressedDocument, wanted: oracle.OracleDocument) -> None:
    assert got.slot_positions.tolist() == wanted.slot_positions
    assert got.num_tokens == wanted.num_tokens
    assert_near(got.keys, wanted.keys)
    assert_near(got.values, wanted.values)


# ---------------------------------------------------------------- the oracle decides


@settings(max_examples=40, deadline=None)
@given(
    architecture=st.sampled_from(ARCHITECTURES),
    rope=st.sampled_from(sorted(ROPES)),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    ratio=st.integers(1, 9),
    overlap_tokens=st.integers(0, 5),
    residual=st.sampled_from(RESIDUALS),
    selection=st.sampled_from(SELECTIONS),
)
def test_extraction_equals_the_oracle(
    architecture: str,
    rope: str,
    lengths: list[int],
    ratio: int,
    overlap_tokens: int,
    residual: str,
    selection: str,
) -> None:
    tool = extractor(architecture, rope, overlap_tokens, residual, selection)
    ids = documents(lengths)
    for got, source in zip(tool.extract(ids, ratio), ids, strict=True):
        assert got.ratio == ratio
        assert_same(got, expected(tool, source, ratio))


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("rope", sorted(ROPES))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_with_every_rope(architecture: str, rope: str, selection: str) -> None:
    tool = extractor(architecture, rope, selection=selection)
    ids = token_ids(11)
    assert_same(tool.extract([ids], 4)[0], expected(tool, ids, 4))


@pytest.mark.parametrize(
    ("length", "ratio"),
    [(1, 1), (1, 5), (3, 5), (5, 5), (10, 5), (11, 5), (6, 1), (14, 5)],
    ids=lambda value: str(value),
)
def test_edges_of_length_and_ratio(length: int, ratio: int) -> None:
    tool = extractor("qwen3")
    ids = token_ids(length)
    got = tool.extract([ids], ratio)[0]
    assert got.num_slots == -(-length // ratio)
    assert int(got.slot_positions[-1]) == length - 1
    assert_same(got, expected(tool, ids, ratio))


def test_untrained_slots_of_embed_last_are_tokens() -> None:
    model = tiny_model("llama")
    sidecar = Sidecar.from_base(model, SidecarConfig(ratios=(1,), residual="embed_last"), eos_token_id=0)
    ids = token_ids(1)
    got = Extractor(model, sidecar).extract([ids], 1)[0]
    token = expected(Extractor(model, sidecar), ids, 1)
    assert_near(got.values, token.token_values)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_low_rank_sidecar_equals_the_oracle(selection: str) -> None:
    model = tiny_model("qwen2")
    config = SidecarConfig(ratios=(4,), rank=3, selection=selection)
    tool = Extractor(model, random_sidecar(model, config))
    ids = token_ids(18)
    with torch.no_grad():
        for layer in tool.sidecar.layers:
            layer["k_proj"].up.copy_(torch.randn(layer["k_proj"].up.shape))
    assert_same(tool.extract([ids], 4)[0], expected(tool, ids, 4))


def test_untrained_sidecar_is_the_base_with_the_eos_embedding() -> None:
    model = tiny_model("qwen2")
    sidecar = Sidecar.from_base(model, SidecarConfig(ratios=(4,)))
    assert torch.equal(sidecar.slot_embedding, model.get_input_embeddings().weight[2])
    for layer, base in zip(sidecar.layers, model.model.layers, strict=True):
        for name, projection in layer.items():
            assert torch.equal(projection.weight, getattr(base.self_attn, name).weight)
            assert torch.equal(projection.bias, getattr(base.self_attn, name).bias)


# ---------------------------------------------------------------- tokens are the base's own


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_token_states_are_the_stock_models(architecture: str, last: bool) -> None:
    tool = extractor(architecture, "yarn")
    ids = token_ids(23)
    joint = expected(tool, ids, 4)
    cache = DynamicCache()
    with torch.no_grad():
        stock = tool.model(torch.tensor([ids]), cache=cache, output_hidden_states=True)
        read = list(_token_states(tool.model, torch.tensor([ids]), last=last))
    # The last of the stock states has been through the final norm.
    for layer, state in enumerate(stock.hidden_states[:-1]):
        assert_near(joint.token_states[layer], state[0])
    assert_near(tool.model.model.norm(joint.token_states[-1]), stock.hidden_states[-1][0])
    assert len(read) == len(cache.layers) - (not last)
    for layer, (hidden, keys, values) in enumerate(read):
        assert_near(hidden, stock.hidden_states[layer])
        assert_near(keys, cache.layers[layer].keys)
        assert_near(values, cache.layers[layer].values)
        assert_near(joint.token_keys[layer], cache.layers[layer].keys[0])
        assert_near(joint.token_values[layer], cache.layers[layer].values[0])


def test_eager_attention_is_refused() -> None:
    model = new_tiny_model()
    model.set_attn_implementation("eager")
    sidecar, ids = random_sidecar(model), token_ids(9)
    # Without a mask only SDPA is causal of itself; eager attention would see the future.
    with pytest.raises(UnsupportedModelError, match="eager"):
        Extractor(model, sidecar).extract([ids], 4)


# ---------------------------------------------------------------- batches, ratios, chunks


def test_a_batch_gives_what_each_document_alone_gives() -> None:
    tool = extractor("qwen2", "llama3", 2)
    ids = documents([17, 1, 18, 40, 16, 3, 39])
    together = tool.extract(ids, 5)
    for got, source in zip(together, ids, strict=True):
        alone = tool.extract([source], 5)[0]
        assert torch.equal(got.slot_positions, alone.slot_positions)
        assert_near(got.keys, alone.keys)
        assert_near(got.values, alone.values)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("overlap_tokens", [0, 3])
def test_padding_is_seen_by_nobody_however_much_there_is(overlap_tokens: int, selection: str) -> None:
    tool = extractor("llama", "default", overlap_tokens, selection=selection)
    ids = documents([3, 17, 8, 1, 5])
    for states in tool.states(ids, (5, 9)):
        for got, source in zip(states.documents(), ids, strict=True):
            assert_same(got, expected(tool, source, states.ratio))


def test_documents_of_a_batch_keep_no_padded_batch_alive() -> None:
    got = extractor().extract(documents([20, 20, 19]), 4)
    assert all(d.keys.untyped_storage().nbytes() == d.keys.nbytes for d in got)


def test_small_batches_keep_the_order() -> None:
    model = tiny_model()
    tool = Extractor(model, extractor().sidecar, max_batch_tokens=40)
    ids = documents([30, 5, 31, 6, 60, 5])
    got = tool.extract(ids, 3)
    assert [d.num_tokens for d in got] == [30, 5, 31, 6, 60, 5]
    for document, source in zip(got, ids, strict=True):
        assert_near(document.keys, extractor().extract([source], 3)[0].keys)


def test_several_ratios_in_one_pass_equal_separate_passes() -> None:
    tool = extractor("llama", "yarn", 1)
    ids = documents([21, 8, 22])
    both = tool.extract_ratios(ids, (4, 8))
    assert list(both) == [4, 8]
    for ratio, made in both.items():
        for got, alone in zip(made, tool.extract(ids, ratio), strict=True):
            assert got.ratio == ratio
            assert torch.equal(got.slot_positions, alone.slot_positions)
            assert_near(got.keys, alone.keys)
            assert_near(got.values, alone.values)


@pytest.mark.parametrize("chunk_slots", [1, 3, 4])
def test_chunks_of_slots_change_nothing(monkeypatch: pytest.MonkeyPatch, chunk_slots: int) -> None:
    tool = extractor("qwen3", "default", 2)
    ids = documents([40, 37])
    whole = tool.extract(ids, 4)
    monkeypatch.setattr(slot_attention, "CHUNK_SLOTS", chunk_slots)
    for got, wanted in zip(tool.extract(ids, 4), whole, strict=True):
        assert_near(got.keys, wanted.keys)
        assert_near(got.values, wanted.values)


# ---------------------------------------------------------------- refusals


def test_an_empty_document_is_refused_by_its_place() -> None:
    with pytest.raises(InputError, match="document 1"):
        extractor().extract([[5, 6], [], [7]], 4)


def test_a_document_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ContextLengthError, match=f"document 1 has {MAX_POSITIONS + 1} tokens"):
        extractor().extract([[5], [5] * (MAX_POSITIONS + 1)], 4)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_a_token_without_an_embedding_is_refused(token: int) -> None:
    with pytest.raises(InputError, match=f"token id {token} has no embedding"):
        extractor().extract([[5], [6, token, 7]], 4)


def test_no_documents_give_no_documents() -> None:
    assert extractor().extract([], 4) == []


def test_an_untrained_ratio_needs_force() -> None:
    with pytest.raises(RatioError, match=r"ratio 12 .*, or force_ratio=true"):
        extractor().extract([token_ids(30)], 12)
    got = extractor().extract([token_ids(30)], 12, force_ratio=True)[0]
    assert_same(got, expected(extractor(), token_ids(30), 12))


@pytest.mark.parametrize("ratio", [0, -1, 2.0, True])
def test_a_ratio_that_is_no_positive_integer_is_refused(ratio: int) -> None:
    with pytest.raises(RatioError):
        extractor().extract([token_ids(5)], ratio, force_ratio=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 2},
        {"num_key_value_heads": 4},
        {"head_dim": 16},
        {"hidden_size": 40, "head_dim": 8},
        {"num_attention_heads": 2, "head_dim": 8},
        {"attention_bias": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_sidecar_of_another_base_is_refused(changes: dict[str, int]) -> None:
    sidecar = random_sidecar(tiny_model())
    with pytest.raises(SidecarError):
        Extractor(new_tiny_model(**changes), sidecar)


def test_the_bases_scale_is_that_of_its_head_dim() -> None:
    for architecture in ARCHITECTURES:
        attention = tiny_model(architecture).model.layers[0].self_attn
        assert hf_adapter.attention_scale(attention) == pytest.approx(attention.head_dim**-0.5)
