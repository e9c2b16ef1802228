"""Several answers decoded together equal each alone, whatever their lengths, and whoever joins or leaves."""

import random

import pytest
import torch
from torch import Tensor

from c2kv_core import hf_adapter
from c2kv_core.cache import AppendCache
from c2kv_core.compose import PREFILL_CHUNK_TOKENS, compose, prefill, rotated_layers, token_states
from c2kv_core.decode_batch import step_together
from c2kv_core.extractor import Extractor
from c2kv_core.generate import Decoder
from tests.core_head_slots import shared_sidecar
from tests.tiny_models import documents, random_sidecar, tiny_model, token_ids

NEW_TOKENS = 12


def decoders_over(architecture: str, rope: str, count: int) -> list[Decoder]:
    """Answers over nothing, a prefix, and documents of different numbers and lengths."""
    model = tiny_model(architecture, rope)
    # Every other answer is over documents whose heads share slots out.
    extractors = [Extractor(model, sidecar) for sidecar in (random_sidecar(model), shared_sidecar(model))]
    prefix = prefill(model, token_ids(7, seed=99))
    made = []
    for n in range(count):
        context = None if n == 0 else prefix
        if n > 1:
            lengths = [5 + 17 * ((n + i) % 5) for i in range(n % 4)]
            slots = extractors[n // 2 % 2].extract(documents(lengths), 1 + n % 5, force_ratio=True)
            context = compose(model, prefix, slots)
        made.append(Decoder(model, context, token_ids(1 + n % 9, seed=n), max_new_tokens=NEW_TOKENS))
    return made


def logits_close(got: Tensor, expected: Tensor) -> None:
    assert float((got - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(
    ("architecture", "rope"),
    [("llama", "llama3"), ("qwen2", "default"), ("qwen3", "yarn"), ("mistral", "linear")],
)
def test_a_step_together_equals_steps_alone(architecture: str, rope: str) -> None:
    model = tiny_model(architecture, rope)
    together, alone = (decoders_over(architecture, rope, 9) for _ in range(2))
    logits = [decoder.prefill_question() for decoder in together]
    for decoder in alone:
        decoder.prefill_question()
    for _ in range(NEW_TOKENS - 1):
        tokens = [int(row.argmax()) for row in logits]
        stepped = step_together(model, together, [[token] for token in tokens])
        for row, decoder, token in zip(stepped, alone, tokens, strict=True):
            logits_close(row, decoder.step(token))
        logits = list(stepped)


def test_answers_join_and_leave_between_any_two_steps() -> None:
    model = tiny_model()
    together, alone = (decoders_over("llama", "default", 8) for _ in range(2))
    for decoder in (*together, *alone):
        decoder.prefill_question()
    left = dict.fromkeys(range(8), NEW_TOKENS - 1)
    draw = random.Random(0)
    while left:
        chosen = draw.sample(sorted(left), draw.randint(1, len(left)))
        tokens = [draw.randrange(hf_adapter.vocabulary_size(model)) for _ in chosen]
        stepped = step_together(model, [together[n] for n in chosen], [[token] for token in tokens])
        for row, n, token in zip(stepped, chosen, tokens, strict=True):
            logits_close(row, alone[n].step(token))
            left[n] -= 1
        left = {n: count for n, count in left.items() if count}


@pytest.mark.parametrize(
    ("architecture", "rope"),
    [("llama", "llama3"), ("qwen2", "default"), ("qwen3", "yarn"), ("mistral", "linear")],
)
def test_questions_are_read_beside_answers_that_are_decoded(architecture: str, rope: str) -> None:
    model = tiny_model(architecture, rope)
    together, alone = (decoders_over(architecture, rope, 9) for _ in range(2))
    for place in range(0, 9, 2):
        together[place].prefill_question()
        alone[place].prefill_question()
    ids = [d.question_chunks[0] if n % 2 else (n + 3,) for n, d in enumerate(together)]
    stepped = step_together(model, together, ids)
    for n, (row, decoder) in enumerate(zip(stepped, alone, strict=True)):
        logits_close(row, decoder.prefill_question() if n % 2 else decoder.step(n + 3))
        assert together[n].position == decoder.position
    # What was read is there for the next step.
    for row, decoder in zip(step_together(model, together, [[7]] * 9), alone, strict=True):
        logits_close(row, decoder.step(7))


def test_a_step_that_fails_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    together, alone = (decoders_over("llama", "default", 3) for _ in range(2))
    for decoder in (*together, *alone):
        decoder.prefill_question()
    real = hf_adapter.finish_layer
    calls = iter(range(100))

    def fails_in_the_second_layer(*args: Tensor) -> Tensor:
        if next(calls) == 1:
            raise RuntimeError("no memory")
        return real(*args)

    monkeypatch.setattr(hf_adapter, "finish_layer", fails_in_the_second_layer)
    with pytest.raises(RuntimeError, match="no memory"):
        step_together(model, together, [[3], [4], [5]])
    monkeypatch.undo()
    stepped = step_together(model, together, [[6], [7], [8]])
    for row, decoder, token in zip(stepped, alone, [6, 7, 8], strict=True):
        logits_close(row, decoder.step(token))


def test_a_long_question_is_read_in_chunks() -> None:
    model = tiny_model()
    ids = token_ids(PREFILL_CHUNK_TOKENS + 100, seed=5)
    context = prefill(model, token_ids(9, seed=6))
    decoder = Decoder(model, context, ids, max_new_tokens=2)
    assert [len(chunk) for chunk in decoder.question_chunks] == [PREFILL_CHUNK_TOKENS, 100]
    logits = decoder.prefill_question()
    whole = prefill(model, ids, context)
    other = Decoder(model, prefill(model, ids[:-1], context), ids[-1:], max_new_tokens=2)
    logits_close(logits, other.prefill_question())
    assert whole.next_position == decoder.position


@pytest.mark.parametrize("heads", ["equal", "at once", "one by one"])
@pytest.mark.parametrize(("architecture", "rope"), [("llama", "llama3"), ("qwen3", "yarn")])
def test_documents_placed_in_an_answers_own_room_equal_those_composed(
    architecture: str, rope: str, heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if heads == "one by one":
        monkeypatch.setattr("c2kv_core.decode_cache.HEADS_READ_AT_ONCE", 0)
    model = tiny_model(architecture, rope)
    extractor = Extractor(model, random_sidecar(model) if heads == "equal" else shared_sidecar(model))
    some = extractor.extract(documents([40, 7, 33]), 4)
    other = extractor.extract(documents([12]), 8, force_ratio=True)
    text, question = token_ids(PREFILL_CHUNK_TOKENS + 9, seed=3), token_ids(5, seed=4)
    answer = token_ids(4, seed=5)
    prefix = prefill(model, token_ids(7, seed=99))
    context = compose(model, prefill(model, text, compose(model, prefix, some)), other)
    before = [k.clone() for k in prefix.cache.keys]
    decoder = Decoder(
        model,
        prefix,
        question,
        max_new_tokens=len(answer) + 1,
        # Slots that are shared out make their own room.
        more_entries=len(text) + (sum(d.num_slots for d in (*some, *other)) if heads == "equal" else 0),
        more_positions=sum(d.num_tokens for d in (*some, *other)) + len(text),
    )
    decoder.place(some)
    for start in range(0, len(text), PREFILL_CHUNK_TOKENS):
        step_together(model, [decoder], [text[start : start + PREFILL_CHUNK_TOKENS]])
    # A placement that fails half way leaves nothing behind.
    layers, _ = rotated_layers(model, other, decoder.position)
    placed = next(layers)
    decoder.cache.place(placed.keys, placed.values, 0, by_head=placed.by_head)
    decoder.place(other)
    stepped = [step_together(model, [decoder], [question])[0], *map(decoder.step, answer)]
    # The stock layers, over a cache that pads heads and masks what is padded.
    cache = AppendCache(context.cache)
    ids = torch.tensor([[*question, *answer]])
    with torch.no_grad():
        hidden = token_states(model, ids, cache, start=context.next_position)
        expected = hf_adapter.logits(model, hidden)[0, len(question) - 1 :]
    for got, wanted in zip(stepped, expected, strict=True):
        logits_close(got, wanted)
    assert decoder.position == context.next_position + ids.shape[1]
    assert all(bool((k == b).all()) for k, b in zip(prefix.cache.keys, before, strict=True))


@pytest.mark.parametrize("heads", ["equal", "at once", "one by one"])
def test_what_there_is_no_room_for_is_an_error(heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A single entry beyond the room could be broadcast into nothing: no error, and a wrong answer.
    if heads == "one by one":
        monkeypatch.setattr("c2kv_core.decode_cache.HEADS_READ_AT_ONCE", 0)
    model = tiny_model()
    sidecar = random_sidecar(model) if heads == "equal" else shared_sidecar(model)
    context = compose(model, None, Extractor(model, sidecar).extract(documents([20]), 4))
    decoder = Decoder(model, context, token_ids(3), max_new_tokens=2)
    logits = decoder.step(int(decoder.prefill_question().argmax()))
    with pytest.raises(IndexError, match="expected room for"):
        decoder.step(int(logits.argmax()))


def test_a_document_that_nothing_was_reserved_for_is_an_error() -> None:
    model = tiny_model()
    (document,) = Extractor(model, random_sidecar(model)).extract(documents([3]), 4)
    decoder = Decoder(model, None, [4], max_new_tokens=1)
    # It takes the room of the question, which has none then.
    decoder.place([document])
    with pytest.raises(IndexError, match="expected room for"):
        decoder.prefill_question()
