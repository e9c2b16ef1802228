"""Answers over contexts: the reference loop of R3, stopping, limits, and contexts that stay as they are."""

from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from c2kv_core.compose import ComposedContext, compose, prefill
from c2kv_core.errors import ContextLengthError, InputError
from c2kv_core.extractor import Extractor
from c2kv_core.generate import Decoder, generate
from c2kv_core.sampling import SamplingParams
from tests import oracle
from tests.oracle import Entry, assert_near
from tests.tiny_models import (
    ARCHITECTURES,
    MAX_POSITIONS,
    ROPES,
    VOCAB_SIZE,
    random_sidecar,
    tiny_model,
    token_ids,
)

RATIO = 4
NO_EOS: frozenset[int] = frozenset()
SYSTEM, QUESTION = token_ids(5, seed=9), token_ids(4, seed=50)
LENGTHS = (14, 9)


def made(
    architecture: str = "llama", rope: str = "default"
) -> tuple[PreTrainedModel, ComposedContext, list[Entry]]:
    """A model, a context of prefix and two documents, and the same context by the oracle alone."""
    model = tiny_model(architecture, rope)
    sidecar = random_sidecar(model)
    sources = [token_ids(n, seed=n) for n in LENGTHS]
    parts = Extractor(model, sidecar).extract(sources, RATIO)
    with torch.no_grad():
        _, entries = oracle.read(model, [], SYSTEM, 0)
        slots, _ = oracle.slot_entries(
            [oracle.extract(model, sidecar, ids, RATIO) for ids in sources], len(SYSTEM)
        )
    return model, compose(model, prefill(model, SYSTEM), parts), [*entries, *slots]


def answer(
    model: PreTrainedModel,
    context: ComposedContext | None,
    question: Sequence[int] = QUESTION,
    **options: object,
) -> list[int]:
    return list(
        generate(model, context, question, **{"max_new_tokens": 6, "eos_token_ids": NO_EOS, **options})
    )  # type: ignore[arg-type]


# ---------------------------------------------------------------- R3: the reference loop


@pytest.mark.parametrize("rope", sorted(ROPES))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_token_equals_a_loop_that_reads_everything_anew(architecture: str, rope: str) -> None:
    model, context, entries = made(architecture, rope)
    start = len(SYSTEM) + sum(LENGTHS)
    assert context.next_position == start
    with torch.no_grad():
        wanted = oracle.greedy(model, entries, QUESTION, start, 6)
    assert answer(model, context) == wanted


def test_logits_of_first_and_later_tokens_equal_the_loops() -> None:
    model, context, entries = made("qwen3", "yarn")
    decoder = Decoder(model, context, QUESTION, max_new_tokens=4)
    read = list(QUESTION)
    logits = decoder.prefill_question()
    for token in (17, 200, 31):
        with torch.no_grad():
            wanted, _ = oracle.read(model, entries, read, context.next_position)
        assert_near(logits, wanted[-1])
        logits = decoder.step(token)
        read.append(token)


def test_positions_count_source_tokens_not_slots() -> None:
    model, context, entries = made()
    with torch.no_grad():
        by_slots, _ = oracle.read(model, entries, QUESTION, len(entries))
    logits = Decoder(model, context, QUESTION, max_new_tokens=1).prefill_question()
    assert float((logits - by_slots[-1]).abs().max()) > 1e-2


def test_without_context_the_answer_is_the_stock_models() -> None:
    model = tiny_model("qwen2")
    stock = model.generate(
        torch.tensor([QUESTION]), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
    )
    assert answer(model, None) == stock[0, len(QUESTION) :].tolist()


def test_over_a_prefix_alone_the_answer_is_the_stock_models() -> None:
    model = tiny_model("llama", "llama3")
    stock = model.generate(
        torch.tensor([SYSTEM + QUESTION]), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
    )
    assert answer(model, prefill(model, SYSTEM)) == stock[0, len(SYSTEM + QUESTION) :].tolist()


# ---------------------------------------------------------------- contexts and requests stay apart


def test_the_context_stays_as_it_was() -> None:
    model, context, _ = made()
    before = [x.clone() for x in (*context.cache.keys, *context.cache.values)]
    first = answer(model, context)
    other = answer(model, context, token_ids(3, seed=77))
    assert answer(model, context) == first
    assert other != first
    assert all(
        torch.equal(x, y) for x, y in zip(before, (*context.cache.keys, *context.cache.values), strict=True)
    )
    assert context.cache.num_entries == len(before[0][0, 0])


def test_interleaved_answers_over_one_context_do_not_mix() -> None:
    model, context, _ = made()
    questions = [QUESTION, token_ids(3, seed=77), QUESTION[:1]]
    alone = [answer(model, context, q) for q in questions]
    streams = [generate(model, context, q, max_new_tokens=6, eos_token_ids=NO_EOS) for q in questions]
    together = list(zip(*streams, strict=True))
    assert [list(tokens) for tokens in zip(*together, strict=True)] == alone


# ---------------------------------------------------------------- stopping and limits


def test_an_end_token_ends_the_answer_and_is_not_given() -> None:
    model, context, _ = made()
    whole = answer(model, context)
    stop = next(token for token in whole[1:] if token != whole[0])
    at = whole.index(stop)
    assert answer(model, context, eos_token_ids=frozenset([stop])) == whole[:at]
    assert answer(model, context, eos_token_ids=frozenset([whole[0]])) == []


def test_the_models_own_end_token_is_the_default() -> None:
    model, context, _ = made()
    eos = answer(model, context)[0]
    own = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [eos, 1]
    try:
        assert list(generate(model, context, QUESTION, max_new_tokens=6)) == []
    finally:
        model.generation_config.eos_token_id = own


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_at_most_max_new_tokens_are_given(limit: int) -> None:
    model, context, _ = made()
    assert answer(model, context, max_new_tokens=limit) == answer(model, context)[:limit]


def test_the_last_position_can_be_used_and_no_further() -> None:
    model = tiny_model()
    cache = prefill(model, SYSTEM).cache
    context = ComposedContext(cache=cache, next_position=MAX_POSITIONS - 6)
    # 4 question tokens and 3 answer tokens, of which the last is never fed back
    assert len(answer(model, context, max_new_tokens=3)) == 3
    with pytest.raises(ContextLengthError, match=f"{MAX_POSITIONS + 1} positions"):
        generate(model, context, QUESTION, max_new_tokens=4)


def test_bad_requests_are_refused_before_the_first_token() -> None:
    model = tiny_model()
    with pytest.raises(InputError, match="question"):
        generate(model, None, [])
    with pytest.raises(InputError, match="max_new_tokens"):
        generate(model, None, QUESTION, max_new_tokens=0)
    for token in (-1, VOCAB_SIZE):
        with pytest.raises(InputError, match="no embedding"):
            generate(model, None, [*QUESTION, token])
        with pytest.raises(InputError, match="no embedding"):
            prefill(model, [*QUESTION, token])


def test_sampled_answers_repeat_with_their_seed() -> None:
    model, context, _ = made()

    def sampled(seed: int) -> list[int]:
        return answer(model, context, sampling=SamplingParams(temperature=1.5, seed=seed), max_new_tokens=12)

    assert sampled(3) == sampled(3)
    assert len({tuple(sampled(seed)) for seed in range(5)}) > 1
