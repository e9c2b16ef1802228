"""Heads that share a document's slots out: how many each gets, which tokens it keeps, what answers see of it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core import ComposedContext, compose, generate, hf_adapter, prefill
from c2kv_core.cache import AppendCache
from c2kv_core.compose import token_states
from c2kv_core.document import CompressedDocument
from c2kv_core.errors import InputError, SidecarError
from c2kv_core.extractor import Extractor
from c2kv_core.head_slots import FRACTIONS, HeadLayout, entry_positions, head_slots
from c2kv_core.sidecar import Sidecar
from c2kv_core.sidecar_config import SidecarConfig
from pipelines.eval.methods.reuse import token_documents
from tests.oracle import assert_near
from tests.tiny_models import (
    ARCHITECTURES,
    ROPES,
    documents,
    new_tiny_model,
    random_sidecar,
    tiny_model,
    token_ids,
)

RATIO = 4


def shared_sidecar(model: PreTrainedModel, *, trained: bool = False, seed: int = 5) -> Sidecar:
    """Scores and shares of heads at random, projections the base's unless ``trained``."""
    config = SidecarConfig(ratios=(1, RATIO), rank=3, selection="heads", residual="embed_last")
    sidecar = random_sidecar(model, config, seed=seed) if trained else Sidecar.from_base(model, config)
    give_shares(sidecar, seed=seed)
    return sidecar


def give_shares(sidecar: Sidecar, *, seed: int = 5) -> None:
    """Scores and shares of heads at random."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in sidecar.layers:
            scores = layer["scores"]
            scores.weight.copy_(torch.randn(scores.weight.shape, generator=random))
            scores.shares.copy_(torch.rand(scores.shares.shape, generator=random) ** 3)


def as_topk(sidecar: Sidecar, *, added: bool) -> Sidecar:
    """The same weights where all heads have as many, with or without what is added to the tokens."""
    header = replace(sidecar.header, config=replace(sidecar.config, selection="topk"))
    tensors = {n: t.clone() for n, t in sidecar.state_dict().items() if not n.endswith("shares")}
    for name, tensor in tensors.items():
        if name.endswith(".up") and not added:
            tensor.zero_()
    return Sidecar.from_tensors(header, tensors, source="test")


# ---------------------------------------------------------------- how many


@pytest.mark.parametrize(
    ("tokens", "slots"), [(1, 1), (5, 2), (61, 16), (300, 75), (300, 19), (1024, 64), (7, 7)]
)
def test_entries_are_as_many_as_slots_and_no_head_has_more_than_there_are_tokens(
    tokens: int, slots: int
) -> None:
    shares = torch.rand(5, 3, len(FRACTIONS), generator=torch.Generator().manual_seed(tokens)) ** 4
    counts = head_slots(shares, num_tokens=tokens, slots=slots)
    assert (counts.shape, counts.dtype) == ((5, 3), torch.int64)
    assert int(counts.sum()) == 5 * 3 * slots
    assert 1 <= int(counts.min()) <= int(counts.max()) <= tokens


def test_heads_get_what_their_shares_say_and_full_ones_leave_the_rest_to_the_others() -> None:
    shares = torch.tensor([[0.8, 0.1], [0.05, 0.05]])[..., None].expand(-1, -1, len(FRACTIONS))
    assert head_slots(shares, num_tokens=1000, slots=250).tolist() == [[800, 100], [50, 50]]
    # Twice as much: the first head has all tokens, and the others share what it cannot take.
    assert head_slots(shares, num_tokens=1000, slots=500).tolist() == [[1000, 500], [250, 250]]
    assert head_slots(shares, num_tokens=10, slots=10).tolist() == [[10, 10], [10, 10]]


def test_shares_of_a_fraction_lie_between_those_that_are_known() -> None:
    shares = torch.tensor([[[0.5, 0.4, 0.2, 0.1, 0.05], [0.5, 0.1, 0.05, 0.025, 0.0125]]])
    known = [head_slots(shares, num_tokens=10_000, slots=10_000 // k) for k in (4, 8)]
    assert known[0].tolist() == [[4000, 1000]]
    assert known[1].tolist() == [[2000, 500]]
    # At the geometric mean of both fractions shares are their means: 0.3 to 0.075.
    between = head_slots(shares, num_tokens=10_000, slots=round(10_000 / math.sqrt(32)))
    assert between[0, 0] / between[0, 1] == pytest.approx(4.0, rel=1e-3)
    last = head_slots(shares, num_tokens=10_000, slots=10)
    assert last[0, 0] / last[0, 1] == pytest.approx(4.0, rel=0.1), "beyond the last, the last holds"


def test_equal_shares_are_equal_numbers_and_start_every_sidecar() -> None:
    model = tiny_model()
    config = SidecarConfig(ratios=(RATIO,), selection="heads")
    counts = head_slots(Sidecar.from_base(model, config).shares(), num_tokens=30, slots=8)
    assert counts.unique().tolist() == [8]


def test_a_layer_is_laid_out_head_after_head_documents_in_order() -> None:
    layout = HeadLayout([torch.tensor([[2, 1], [1, 3]]), torch.tensor([[1, 2], [2, 2]])])
    assert [layout.span(1, 0), layout.span(1, 1)] == [slice(0, 3), slice(3, 7)]
    order, counts = layout.by_head(0)
    # Entries of layer 0: document 0 has 0, 1 | 2, document 1 has 3 | 4, 5.
    assert (order.tolist(), counts) == ([0, 1, 3, 2, 4, 5], [3, 3])
    order, counts = layout.by_head(1)
    assert (order.tolist(), counts) == ([0, 4, 5, 1, 2, 3, 6, 7], [3, 5])


def test_entries_stand_evenly_and_those_of_a_full_head_where_their_tokens_were() -> None:
    positions = entry_positions(torch.tensor([[5, 1], [2, 0]]), num_tokens=5)
    assert positions.tolist() == [0, 1, 2, 3, 4, 2, 1, 3]


def test_keys_of_a_head_that_has_all_tokens_are_those_before_rope() -> None:
    model = tiny_model()
    sidecar = shared_sidecar(model)
    with torch.no_grad():
        for layer in sidecar.layers:
            layer["scores"].shares.copy_(torch.tensor([1.0, 0.01])[:, None].expand(-1, len(FRACTIONS)))
    (made,) = Extractor(model, sidecar).extract(documents([24]), 2, force_ratio=True)
    (tokens,) = token_documents(model, documents([24]))
    assert made.head_slots is not None
    assert made.head_slots[:, 0].unique().tolist() == [23]
    sidecar.layers[0]["scores"].shares.data[0] = 100.0
    (made,) = Extractor(model, sidecar).extract(documents([24]), 2, force_ratio=True)
    keys, _, stands = entries_of(made)[0, 0]
    assert stands == list(range(24))
    assert_near(keys, tokens.keys[0, 0])


# ---------------------------------------------------------------- which, and what is added


def entries_of(document: CompressedDocument) -> dict[tuple[int, int], tuple[Tensor, Tensor, list[int]]]:
    """For each layer and head its entries and where they stand, one by one; keys as they are in the document."""
    assert document.head_slots is not None
    layers, heads, _, dim = document.keys.shape
    keys, values = document.keys.reshape(-1, dim), document.values.reshape(-1, dim)
    found, start = {}, 0
    for layer in range(layers):
        for head in range(heads):
            count = int(document.head_slots[layer, head])
            stands = [int((i + 0.5) * document.num_tokens / count + 1e-9) for i in range(count)]
            found[layer, head] = (keys[start : start + count], values[start : start + count], stands)
            start += count
    assert start == len(keys)
    return found


@pytest.mark.parametrize(
    ("architecture", "rope"), [("llama", "llama3"), ("qwen3", "yarn"), ("qwen2", "default")]
)
def test_a_kept_token_has_what_the_slot_of_its_block_adds(architecture: str, rope: str) -> None:
    model = tiny_model(architecture, rope)
    sidecar = shared_sidecar(model, trained=True)
    ids = documents([30])
    (made,) = Extractor(model, sidecar).extract(ids, RATIO)
    (with_added,) = Extractor(model, as_topk(sidecar, added=True)).extract(ids, RATIO)
    (without,) = Extractor(model, as_topk(sidecar, added=False)).extract(ids, RATIO)
    (tokens,) = token_documents(model, ids)
    blocks = hf_adapter.rotation(model, made.slot_positions[None])
    own = hf_adapter.rotation(model, torch.arange(30)[None])
    token_keys = hf_adapter.rotate(tokens.keys, own)
    added_keys = hf_adapter.rotate(with_added.keys - without.keys, blocks)
    for (layer, head), (keys, values, stands) in entries_of(made).items():
        turned = hf_adapter.rotate(keys[None, None], (own[0][:, stands], own[1][:, stands]))[0, 0]
        kept = []
        for key, value in zip(turned, values, strict=True):
            expected_keys = token_keys[layer, head] + added_keys[layer, head][torch.arange(30) // RATIO]
            kept.append(int((expected_keys - key).square().sum(dim=1).argmin()))
            assert_near(key, expected_keys[kept[-1]], 1e-4)
            block = kept[-1] // RATIO
            more = with_added.values[layer, head, block] - without.values[layer, head, block]
            assert_near(value, tokens.values[layer, head, kept[-1]] + more, 1e-4)
        assert kept == sorted(set(kept)), "each token once, in their order"


def test_heads_keep_the_tokens_they_score_highest() -> None:
    model = tiny_model()
    sidecar = shared_sidecar(model)
    (made,) = Extractor(model, sidecar).extract(documents([25]), RATIO)
    (tokens,) = token_documents(model, documents([25]))
    for layer, states in enumerate(layer_inputs(model, documents([25])[0])):
        scores = sidecar.scores(layer, model.model.layers[layer].input_layernorm(states))[0]
        for head in range(scores.shape[1]):
            _, values, _ = entries_of(made)[layer, head]
            best = scores[:, head].topk(len(values)).indices.sort().values
            assert_near(values, tokens.values[layer, head, best])


def layer_inputs(model: PreTrainedModel, ids: list[int]) -> Sequence[Tensor]:
    with torch.no_grad():
        states: Sequence[Tensor] = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[:-1]
    return states


def test_padding_takes_part_in_nothing() -> None:
    model = tiny_model()
    tool = Extractor(model, shared_sidecar(model, trained=True))
    ids = documents([7, 31, 4, 18])
    (padded,) = tool.states(ids, (RATIO,))
    for together, one in zip(padded.documents(), ids, strict=True):
        (alone,) = tool.extract([one], RATIO)
        assert together.head_slots is not None
        assert alone.head_slots is not None
        assert torch.equal(together.head_slots, alone.head_slots)
        assert_near(together.keys, alone.keys)
        assert_near(together.values, alone.values)


def test_gradients_reach_projections_and_neither_scores_nor_shares() -> None:
    model = new_tiny_model()
    sidecar = shared_sidecar(model, trained=True)
    found = []
    for recompute in (False, True):
        sidecar.zero_grad()
        (states,) = Extractor(model, sidecar, recompute=recompute).states(documents([13, 9]), (RATIO,))
        (states.keys.square().sum() + states.values.square().sum()).backward()
        for layer in sidecar.layers:
            assert layer["scores"].weight.grad is None
            assert layer["scores"].shares.grad is None
            assert float(layer["v_proj"].up.grad.abs().sum()) > 0
        found.append(sidecar.layers[0]["k_proj"].up.grad.clone())
    assert_near(found[1], found[0])


# ---------------------------------------------------------------- what answers see


class Masked:
    """Keys and values of all tokens, whatever heads keep."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values

    def update(self, keys: Tensor, values: Tensor, layer: int, **extra: object) -> tuple[Tensor, Tensor]:
        return torch.cat([self._keys, keys], dim=2), torch.cat([self._values, values], dim=2)


def masked_states(
    model: PreTrainedModel,
    sidecar: Sidecar,
    prefix: ComposedContext,
    sources: list[list[int]],
    question: list[int],
) -> Tensor:
    """The slow way: every token of every document is there, and heads do not see those they did not keep."""
    tokens = token_documents(model, sources)
    cursor, places, keeps = prefix.next_position, [], []
    for ids in sources:
        places.append(torch.arange(cursor, cursor + len(ids)))
        cursor += len(ids)
        counts = head_slots(sidecar.shares(), num_tokens=len(ids), slots=-(-len(ids) // RATIO))
        keep = torch.zeros(*counts.shape, len(ids), dtype=torch.bool)
        for layer, states in enumerate(layer_inputs(model, ids)):
            scores = sidecar.scores(layer, model.model.layers[layer].input_layernorm(states))[0]
            for head, count in enumerate(counts[layer].tolist()):
                keep[layer, head, scores[:, head].topk(count).indices] = True
        keeps.append(keep)
    size = len(question)
    positions = torch.arange(cursor, cursor + size)[None]
    angles, hidden = hf_adapter.rotation(model, positions), hf_adapter.embed(model, torch.tensor([question]))
    where = hf_adapter.rotation(model, torch.cat(places)[None])
    for index, layer in enumerate(hf_adapter.decoder_layers(model)):
        keys = hf_adapter.rotate(torch.cat([d.keys[index] for d in tokens], dim=1)[None], where)
        keys = torch.cat([prefix.cache.keys[index], keys], dim=2)
        values = torch.cat([prefix.cache.values[index], *(d.values[index][None] for d in tokens)], dim=2)
        kept = torch.cat([k[index] for k in keeps], dim=1)
        kept = torch.cat(
            [torch.ones(len(kept), keys.shape[2] - kept.shape[1], dtype=torch.bool), kept], dim=1
        )
        causal = torch.ones(size, size, dtype=torch.bool).tril().expand(len(kept), -1, -1)
        mask = torch.cat([kept[:, None].expand(-1, size, -1), causal], dim=2)[None]
        hidden = hf_adapter.run_layer(
            layer,
            hidden,
            positions=positions,
            angles=angles,
            cache=Masked(keys, values),
            mask=hf_adapter.for_query_heads(layer.self_attn, mask),
        )
    return hf_adapter.final_norm(model, hidden)


@pytest.mark.parametrize("rope", sorted(ROPES))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_question_sees_the_tokens_that_heads_kept_and_no_others(architecture: str, rope: str) -> None:
    model = tiny_model(architecture, rope)
    sidecar = shared_sidecar(model)
    sources, question = documents([21, 3, 34]), token_ids(6, seed=9)
    prefix = prefill(model, token_ids(5, seed=8))
    context = compose(model, prefix, Extractor(model, sidecar).extract(sources, RATIO))
    with torch.no_grad():
        expected = masked_states(model, sidecar, prefix, sources, question)
        got = token_states(
            model, torch.tensor([question]), AppendCache(context.cache), start=context.next_position
        )
    assert_near(got, expected)
    # Read in two pieces, the first of which is part of the context then.
    longer = prefill(model, question[:4], context)
    with torch.no_grad():
        rest = token_states(
            model, torch.tensor([question[4:]]), AppendCache(longer.cache), start=longer.next_position
        )
    assert_near(rest, expected[:, 4:])


def test_at_ratio_one_heads_keep_all_and_answers_are_those_over_all_tokens() -> None:
    model = tiny_model()
    tool = Extractor(model, shared_sidecar(model))
    ids, question = documents([9, 14]), token_ids(5, seed=9)
    answers = [
        list(generate(model, compose(model, None, d), question, max_new_tokens=8))
        for d in (tool.extract(ids, 1), token_documents(model, ids))
    ]
    assert answers[0] == answers[1]


def test_documents_of_both_kinds_stand_in_one_context_in_any_order() -> None:
    model = tiny_model()
    sidecar = shared_sidecar(model)
    ids, question = documents([9, 26]), token_ids(5, seed=9)
    (shared,) = Extractor(model, sidecar).extract(ids[:1], RATIO)
    (plain,) = token_documents(model, ids[1:])
    # All of its tokens, said in the other way.
    layers, heads, slots, _ = plain.keys.shape
    told = replace(plain, head_slots=torch.full((layers, heads), slots))
    for order in ((0, 1), (1, 0)):
        answers = [
            list(generate(model, compose(model, None, [pair[i] for i in order]), question, max_new_tokens=8))
            for pair in ((shared, plain), (shared, told))
        ]
        assert answers[0] == answers[1]


def test_gaps_are_left_before_documents_as_for_others() -> None:
    model = tiny_model()
    (document,) = Extractor(model, shared_sidecar(model)).extract(documents([9]), RATIO)
    moved = compose(model, None, [document], gaps=[7])
    padded = compose(model, prefill(model, token_ids(7)), [document])
    assert moved.next_position == padded.next_position == 16
    for a, b in zip(moved.cache.keys, padded.cache.keys, strict=True):
        assert_near(a, b[:, :, 7:])


# ---------------------------------------------------------------- files


def test_a_saved_sidecar_comes_back_with_its_shares(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    sidecar = shared_sidecar(model, trained=True)
    sidecar.save(tmp_path / "saved")
    loaded = Sidecar.load(tmp_path / "saved")
    assert torch.equal(loaded.shares(), sidecar.shares())
    assert loaded.digest() == sidecar.digest()
    header = tmp_path / "saved" / "sidecar.json"
    header.write_text(header.read_text().replace('"heads"', '"topk"'))
    with pytest.raises(SidecarError, match=r"expected no layers.0.scores.shares, as selection is topk"):
        Sidecar.load(tmp_path / "saved")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1])
def test_shares_that_nothing_can_be_shared_out_by_are_refused(tmp_path: Path, value: float) -> None:
    sidecar = shared_sidecar(tiny_model())
    sidecar.layers[1]["scores"].shares.data[0, 2] = value
    sidecar.save(tmp_path / "saved")
    with pytest.raises(SidecarError, match=r"finite numbers of 0 or more in layers\.1\.scores\.shares"):
        Sidecar.load(tmp_path / "saved")


@pytest.mark.parametrize("counts", ["shape", "sum", "negative"])
def test_documents_whose_numbers_do_not_add_up_are_refused(counts: str) -> None:
    model = tiny_model()
    (document,) = Extractor(model, shared_sidecar(model)).extract(documents([9]), RATIO)
    assert document.head_slots is not None
    wrong = document.head_slots.clone()
    if counts == "shape":
        wrong = wrong[:-1]
    else:
        wrong[0, 0] += 1
        if counts == "negative":
            wrong[0, 0], wrong[0, 1] = int(wrong[0].sum()), -1
    with pytest.raises(InputError, match=r"document 0 has head_slots"):
        compose(model, None, [replace(document, head_slots=wrong)])
