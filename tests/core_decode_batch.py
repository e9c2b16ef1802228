"""Several answers decoded together equal each alone, whatever their lengths, and whoever joins or leaves."""

import random

import pytest
from torch import Tensor

from c2kv_core import hf_adapter
from c2kv_core.compose import PREFILL_CHUNK_TOKENS, compose, prefill
from c2kv_core.decode_batch import step_together
from c2kv_core.extractor import Extractor
from c2kv_core.generate import Decoder
from tests.tiny_models import documents, random_sidecar, tiny_model, token_ids

NEW_TOKENS = 12


def decoders_over(architecture: str, rope: str, count: int) -> list[Decoder]:
    """Answers over nothing, a prefix, and documents of different numbers and lengths."""
    model = tiny_model(architecture, rope)
    extractor = Extractor(model, random_sidecar(model))
    prefix = prefill(model, token_ids(7, seed=99))
    made = []
    for n in range(count):
        context = None if n == 0 else prefix
        if n > 1:
            lengths = [5 + 17 * ((n + i) % 5) for i in range(n % 4)]
            context = compose(model, prefix, extractor.extract(documents(lengths), 1 + n % 5))
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
        stepped = step_together(model, together, tokens)
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
        stepped = step_together(model, [together[n] for n in chosen], tokens)
        for row, n, token in zip(stepped, chosen, tokens, strict=True):
            logits_close(row, alone[n].step(token))
            left[n] -= 1
        left = {n: count for n, count in left.items() if count}


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
        step_together(model, together, [3, 4, 5])
    monkeypatch.undo()
    stepped = step_together(model, together, [6, 7, 8])
    for row, decoder, token in zip(stepped, alone, [6, 7, 8], strict=True):
        logits_close(row, decoder.step(token))


def test_a_long_question_is_read_in_chunks() -> None:
    model = tiny_model()
    ids = token_ids(PREFILL_CHUNK_TOKENS + 100, seed=5)
    context = prefill(model, token_ids(9, seed=6))
    decoder = Decoder(model, context, ids, max_new_tokens=2)
    assert decoder.prefill_chunk() is None
    logits = decoder.prefill_chunk()
    assert logits is not None
    whole = prefill(model, ids, context)
    other = Decoder(model, prefill(model, ids[:-1], context), ids[-1:], max_new_tokens=2)
    logits_close(logits, other.prefill_question())
    assert whole.next_position == decoder.position
