"""Composition: keys at their final positions, order, prefixes and geometry (R1, R2, R4)."""

import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from c2kv_core import hf_adapter
from c2kv_core.cache import AppendCache
from c2kv_core.compose import ComposedContext, compose, prefill, token_states
from c2kv_core.document import CompressedDocument
from c2kv_core.errors import ContextLengthError, InputError
from c2kv_core.extractor import Extractor
from tests import oracle
from tests.oracle import Entry, assert_near
from tests.tiny_models import (
    ARCHITECTURES,
    MAX_POSITIONS,
    ROPES,
    documents,
    random_sidecar,
    tiny_model,
    token_ids,
)

RATIO = 4
QUESTION = token_ids(5, seed=50)


def extract(model: PreTrainedModel, lengths: Sequence[int]) -> list[CompressedDocument]:
    return Extractor(model, random_sidecar(model)).extract(documents(lengths), RATIO)


def oracle_context(
    model: PreTrainedModel, prefix: Sequence[int], parts: Sequence[CompressedDocument]
) -> tuple[list[Entry], int]:
    """Entries of prefix and documents at explicit positions, and the question's first position."""
    entries: list[Entry] = []
    if prefix:
        with torch.no_grad():
            _, entries = oracle.read(model, [], prefix, 0)
    placed = [
        oracle.OracleDocument(
            keys=d.keys,
            values=d.values,
            slot_positions=d.slot_positions.tolist(),
            num_tokens=d.num_tokens,
            token_states=torch.empty(0),
            token_keys=torch.empty(0),
            token_values=torch.empty(0),
        )
        for d in parts
    ]
    slots, cursor = oracle.slot_entries(placed, len(prefix))
    return [*entries, *slots], cursor


def question_logits(
    model: PreTrainedModel, context: ComposedContext | None, ids: Sequence[int]
) -> torch.Tensor:
    """(T, vocabulary) logits of every token of a question."""
    cache = AppendCache(context.cache if context else None)
    start = context.next_position if context else 0
    with torch.no_grad():
        hidden = token_states(model, torch.tensor([list(ids)]), cache, start=start)
        return hf_adapter.logits(model, hidden)[0]


def oracle_logits(
    model: PreTrainedModel, entries: Sequence[Entry], ids: Sequence[int], start: int
) -> torch.Tensor:
    with torch.no_grad():
        return oracle.read(model, entries, ids, start)[0]


def assert_context(
    model: PreTrainedModel, got: ComposedContext, entries: Sequence[Entry], cursor: int
) -> None:
    """Length, next position, rotated keys and values of every layer."""
    assert got.next_position == cursor
    assert got.cache.num_entries == len(entries)
    for layer, (keys, values) in enumerate(zip(got.cache.keys, got.cache.values, strict=True)):
        rotated = [oracle.rotate(model, e.keys[layer], e.position) for e in entries]
        assert_near(keys[0], torch.stack(rotated, dim=1))
        assert_near(values[0], torch.stack([e.values[layer] for e in entries], dim=1))


# ---------------------------------------------------------------- R1: positions


@pytest.mark.parametrize("rope", sorted(ROPES))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_stand_where_they_would_have_been_computed(architecture: str, rope: str) -> None:
    model = tiny_model(architecture, rope)
    system, parts = token_ids(6, seed=9), extract(model, [13, 8, 30])
    context = compose(model, prefill(model, system), parts)
    entries, cursor = oracle_context(model, system, parts)
    assert cursor == 6 + 13 + 8 + 30
    assert_context(model, context, entries, cursor)
    assert_near(question_logits(model, context, QUESTION), oracle_logits(model, entries, QUESTION, cursor))


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_far_positions_are_as_exact_as_near_ones(rope: str) -> None:
    model = tiny_model("llama", rope)
    (part,) = extract(model, [10])
    far = compose(model, ComposedContext(cache=prefill(model, [5]).cache, next_position=4000), [part])
    for j, local in enumerate(part.slot_positions.tolist()):
        wanted = oracle.rotate(model, part.keys[0, :, j], 4000 + local)
        assert_near(far.cache.keys[0][0, :, 1 + j], wanted)


@settings(max_examples=25, deadline=None)
@given(
    architecture=st.sampled_from(ARCHITECTURES),
    rope=st.sampled_from(sorted(ROPES)),
    prefix_tokens=st.integers(0, 9),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    question_tokens=st.integers(1, 6),
)
def test_any_composition_equals_the_oracle(
    architecture: str, rope: str, prefix_tokens: int, lengths: list[int], question_tokens: int
) -> None:
    model = tiny_model(architecture, rope)
    system, parts = token_ids(prefix_tokens, seed=9), extract(model, lengths)
    prefix = prefill(model, system) if system else None
    context = compose(model, prefix, parts)
    entries, cursor = oracle_context(model, system, parts)
    assert_context(model, context, entries, cursor)
    question = QUESTION[:question_tokens]
    assert_near(question_logits(model, context, question), oracle_logits(model, entries, question, cursor))


def test_swapping_documents_changes_positions_only() -> None:
    model = tiny_model("qwen3", "yarn")
    first, second = extract(model, [13, 8])
    one, other = compose(model, None, [first, second]), compose(model, None, [second, first])
    assert one.next_position == other.next_position
    split, swapped = first.num_slots, second.num_slots
    for layer in range(len(one.cache.keys)):
        values, moved = one.cache.values[layer], other.cache.values[layer]
        assert torch.equal(values[:, :, :split], moved[:, :, swapped:])
        assert torch.equal(values[:, :, split:], moved[:, :, :swapped])
        for j in range(split):
            unmoved = oracle.rotate(model, first.keys[layer, :, j], int(first.slot_positions[j]))
            shifted = oracle.rotate(model, first.keys[layer, :, j], 8 + int(first.slot_positions[j]))
            assert_near(one.cache.keys[layer][0, :, j], unmoved)
            assert_near(other.cache.keys[layer][0, :, swapped + j], shifted)


def test_composing_twice_gives_the_same_and_changes_nothing() -> None:
    model = tiny_model("qwen2", "llama3")
    prefix, parts = prefill(model, token_ids(7)), extract(model, [13, 8])
    before = [x.clone() for d in parts for x in (d.keys, d.values, d.slot_positions)]
    prefix_before = [x.clone() for x in (*prefix.cache.keys, *prefix.cache.values)]
    one, other = compose(model, prefix, parts), compose(model, prefix, parts)
    for got, again in zip(
        (*one.cache.keys, *one.cache.values), (*other.cache.keys, *other.cache.values), strict=True
    ):
        assert torch.equal(got, again)
    after = [x for d in parts for x in (d.keys, d.values, d.slot_positions)]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    prefix_after = (*prefix.cache.keys, *prefix.cache.values)
    assert all(torch.equal(x, y) for x, y in zip(prefix_before, prefix_after, strict=True))
    assert prefix.next_position == 7 and prefix.cache.num_entries == 7


# ---------------------------------------------------------------- R2: nothing is dropped silently


def test_documents_are_counted_and_change_the_answer() -> None:
    model = tiny_model()
    prefix, parts = prefill(model, token_ids(7)), extract(model, [13, 8])
    context = compose(model, prefix, parts)
    assert context.cache.num_entries == 7 + 4 + 2
    assert all(x.shape[2] == 13 for x in (*context.cache.keys, *context.cache.values))
    assert context.cache.nbytes == sum(x.nbytes for x in (*context.cache.keys, *context.cache.values))
    without = question_logits(model, prefix, QUESTION)
    for chosen in (parts, parts[:1], parts[1:]):
        got = question_logits(model, compose(model, prefix, chosen), QUESTION)
        assert float((got - without).abs().max()) > 1e-2


# ---------------------------------------------------------------- R4: unusual contexts


def test_a_repeated_document_stands_twice() -> None:
    model = tiny_model("llama", "linear")
    (part,) = extract(model, [9])
    context = compose(model, None, [part, part])
    entries, cursor = oracle_context(model, [], [part, part])
    assert_context(model, context, entries, cursor)
    assert_near(question_logits(model, context, QUESTION), oracle_logits(model, entries, QUESTION, cursor))


def test_gaps_leave_positions_free() -> None:
    model = tiny_model()
    prefix, (first, second) = prefill(model, token_ids(4)), extract(model, [9, 6])
    got = compose(model, prefix, [first, second], gaps=[7, 30])
    step = compose(model, replace(prefix, next_position=prefix.next_position + 7), [first])
    wanted = compose(model, replace(step, next_position=step.next_position + 30), [second])
    assert got.next_position == wanted.next_position == 4 + 7 + 9 + 30 + 6
    for one, other in zip(got.cache.keys, wanted.cache.keys, strict=True):
        assert_near(one, other)
    with pytest.raises(ContextLengthError):
        compose(model, prefix, [first, second], gaps=[0, MAX_POSITIONS])


def test_no_documents_give_the_prefix_back() -> None:
    model = tiny_model()
    prefix = prefill(model, token_ids(4))
    assert compose(model, prefix, []) is prefix
    with pytest.raises(InputError, match="neither"):
        compose(model, None, [])


def test_a_one_token_question_over_documents_alone() -> None:
    model = tiny_model("mistral")
    parts = extract(model, [9, 6])
    entries, cursor = oracle_context(model, [], parts)
    got = question_logits(model, compose(model, None, parts), QUESTION[:1])
    assert_near(got, oracle_logits(model, entries, QUESTION[:1], cursor))


def test_a_question_alone_is_the_stock_models() -> None:
    model = tiny_model("qwen2", "yarn")
    with torch.no_grad():
        stock = model(torch.tensor([QUESTION])).logits[0]
    assert_near(question_logits(model, None, QUESTION), stock)


# ---------------------------------------------------------------- prefill


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 512])
def test_text_among_documents_is_prefilled_over_what_stands_before(
    monkeypatch: pytest.MonkeyPatch, chunk_tokens: int
) -> None:
    monkeypatch.setattr(sys.modules[compose.__module__], "PREFILL_CHUNK_TOKENS", chunk_tokens)
    model = tiny_model("qwen3", "llama3")
    system, text = token_ids(6, seed=9), token_ids(7, seed=10)
    first, second = extract(model, [13, 8])
    context = compose(model, prefill(model, system), [first])
    context = compose(model, prefill(model, text, context), [second])

    entries, cursor = oracle_context(model, system, [first])
    with torch.no_grad():
        _, read = oracle.read(model, entries, text, cursor)
    later = [replace(e, position=e.position + cursor + 7) for e in oracle_context(model, [], [second])[0]]
    entries = [*entries, *read, *later]
    assert_context(model, context, entries, cursor + 7 + 8)
    got = question_logits(model, context, QUESTION)
    assert_near(got, oracle_logits(model, entries, QUESTION, cursor + 7 + 8))


def test_a_prefix_in_two_steps_is_the_prefix_in_one() -> None:
    model = tiny_model("llama", "yarn")
    ids = token_ids(12)
    whole, half = prefill(model, ids), prefill(model, ids[:5])
    steps = prefill(model, ids[5:], half)
    assert half.cache.num_entries == half.next_position == 5
    assert steps.next_position == whole.next_position == 12
    for got, wanted in zip(steps.cache.keys, whole.cache.keys, strict=True):
        assert_near(got, wanted)


def test_prefill_needs_tokens() -> None:
    with pytest.raises(InputError, match="at least one token"):
        prefill(tiny_model(), [])


# ---------------------------------------------------------------- refusals


def test_a_context_beyond_the_models_positions_is_refused() -> None:
    model = tiny_model()
    (part,) = extract(model, [10])
    full = ComposedContext(cache=prefill(model, [5]).cache, next_position=MAX_POSITIONS - 10)
    assert compose(model, full, [part]).next_position == MAX_POSITIONS
    over = replace(full, next_position=MAX_POSITIONS - 9)
    with pytest.raises(ContextLengthError, match=f"{MAX_POSITIONS + 1} positions"):
        compose(model, over, [part])
    with pytest.raises(ContextLengthError):
        prefill(model, token_ids(11), full)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "mistral"])
def test_documents_of_another_geometry_are_refused(architecture: str) -> None:
    good, bad = extract(tiny_model(), [9])[0], extract(tiny_model(architecture), [9])[0]
    with pytest.raises(InputError, match="document 1"):
        compose(tiny_model(), None, [good, bad])


def test_tensors_that_disagree_with_each_other_are_refused() -> None:
    model = tiny_model()
    (part,) = extract(model, [9])
    for broken in (
        replace(part, values=part.values[:, :, :-1]),
        replace(part, slot_positions=part.slot_positions[:-1]),
        replace(part, keys=part.keys[:, :, :-1]),
    ):
        with pytest.raises(InputError, match="document 0"):
            compose(model, None, [broken])


def test_slots_of_another_dtype_are_read_in_the_models() -> None:
    model = tiny_model()
    (part,) = extract(model, [9])
    half = part.to(torch.bfloat16)
    context = compose(model, None, [half])
    assert context.cache.keys[0].dtype == torch.float32
    entries, cursor = oracle_context(model, [], [half.to(torch.float32)])
    assert_context(model, context, entries, cursor)
