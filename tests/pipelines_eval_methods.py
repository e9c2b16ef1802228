"""Each method's context against the obvious slow one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from c2kv_core import ComposedContext, Extractor, SidecarConfig, compose, prefill
from c2kv_core.generate import Decoder
from c2kv_core.slots import slot_count
from pipelines.eval.answering import answer
from pipelines.eval.case import Case, end_of_answer
from pipelines.eval.methods import Setup
from pipelines.eval.methods.reuse import token_documents
from pipelines.eval.methods.truncate import beginning_ids
from tests.eval_kit import OAK, QUESTION, case, contexts, load, one_document
from tests.tiny_models import random_sidecar

MAX_NEW_TOKENS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def setup(models: Path) -> Setup:
    return load(models, ratios=[4, 8], slot_dtype="float32")


@pytest.fixture(scope="module")
def without_prefix(models: Path) -> Setup:
    """The template puts nothing before the documents."""
    return load(models, style="qwen3", system=None, slot_dtype="float32")


def close(got: Tensor, expected: Tensor) -> bool:
    return bool((got - expected).abs().max() <= 1e-5 * expected.abs().max())


def same(got: ComposedContext | None, expected: ComposedContext | None) -> bool:
    assert got is not None and expected is not None
    pairs = zip(
        (*got.cache.keys, *got.cache.values), (*expected.cache.keys, *expected.cache.values), strict=True
    )
    return got.next_position == expected.next_position and all(close(a, b) for a, b in pairs)


def only(name: str, setup: Setup, given: Case) -> ComposedContext:
    (made,) = contexts(name, setup, given)
    assert made.context is not None
    return made.context


def plain_answer(setup: Setup, ids: list[int], accepted: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
    """Greedy answer and likelihood by the stock model without any cache."""
    model = setup.compressor.model
    said: list[int] = []
    while len(said) < MAX_NEW_TOKENS:
        token = int(model(torch.tensor([ids + said])).logits[0, -1].argmax())
        if token == end_of_answer(setup.compressor):
            break
        said.append(token)
    logits = model(torch.tensor([[*ids, *accepted]])).logits[0].log_softmax(-1)
    loss = -sum(float(logits[len(ids) - 1 + i, token]) for i, token in enumerate(accepted))
    return tuple(said), loss / len(accepted)


def asked(setup: Setup, given: Case, context: ComposedContext | None) -> tuple[tuple[int, ...], float]:
    found = answer(
        setup.compressor.model,
        context,
        given.question_ids,
        given.answer_ids,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    return found.token_ids, found.nll


def test_segments_are_the_chat_template(setup: Setup) -> None:
    given = case(setup)
    messages = [{"role": "system", "content": setup.config.system}]
    messages += [{"role": "user", "content": f"{d.title}\n\n{d.text}"} for d in QUESTION.documents]
    messages += [{"role": "user", "content": QUESTION.text}]
    expected = setup.compressor.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    prefix = setup.compressor.renderer.prefix_ids(setup.config.system)
    assert [*prefix, *given.source_ids, *given.question_ids] == expected


@pytest.mark.parametrize("style", ["smollm2", "qwen3", "llama3", "mistral"])
def test_full_compute_is_the_stock_model(models: Path, style: str) -> None:
    setup = load(models, style=style)
    given = case(setup)
    (made,) = contexts("full", setup, given)
    prefix = setup.compressor.renderer.prefix_ids(setup.config.system)
    said, nll = plain_answer(setup, [*prefix, *given.source_ids, *given.question_ids], given.answer_ids)
    assert asked(setup, given, made.context) == (said, pytest.approx(nll, rel=1e-4))
    assert (made.ratio, made.entries) == (None, given.source_tokens)


def test_no_documents_is_the_stock_model_without_them(setup: Setup) -> None:
    given = case(setup)
    (made,) = contexts("none", setup, given)
    prefix = setup.compressor.renderer.prefix_ids(setup.config.system)
    said, nll = plain_answer(setup, [*prefix, *given.question_ids], given.answer_ids)
    assert asked(setup, given, made.context) == (said, pytest.approx(nll, rel=1e-4))
    assert made.entries == 0


def test_no_documents_and_no_prefix_leaves_the_question_alone(without_prefix: Setup) -> None:
    given = case(without_prefix)
    assert given.prefix is None
    said, nll = plain_answer(without_prefix, list(given.question_ids), given.answer_ids)
    assert asked(without_prefix, given, None) == (said, pytest.approx(nll, rel=1e-4))


def test_the_end_token_counts(setup: Setup) -> None:
    given = case(setup)
    assert given.answer_ids[-1] == setup.compressor.tokenizer.eos_token_id
    assert setup.compressor.tokenizer.decode(given.answer_ids[:-1]) == "20 metres"


def test_reuse_of_one_document_alone_is_full_compute(without_prefix: Setup) -> None:
    given = case(without_prefix, one_document())
    assert same(only("reuse", without_prefix, given), only("full", without_prefix, given))


def test_reuse_is_right_for_the_first_document_and_wrong_after_it(without_prefix: Setup) -> None:
    given = case(without_prefix)
    reused, full = only("reuse", without_prefix, given), only("full", without_prefix, given)
    first = len(given.parts[0])
    for layer, (got, expected) in enumerate(zip(reused.cache.values, full.cache.values, strict=True)):
        assert close(got[:, :, :first], expected[:, :, :first])
        assert close(got[:, :, first:], expected[:, :, first:]) == (layer == 0)
    # keys of the first layer depend on token and place alone: they stand where full compute has them
    assert close(reused.cache.keys[0], full.cache.keys[0])


def test_reuse_after_a_prefix_is_not_full_compute(setup: Setup) -> None:
    given = case(setup, one_document())
    reused, full = only("reuse", setup, given), only("full", setup, given)
    assert reused.next_position == full.next_position
    assert close(reused.cache.keys[0], full.cache.keys[0])
    assert not close(reused.cache.keys[1], full.cache.keys[1])


def test_documents_in_one_batch_are_as_each_alone(setup: Setup) -> None:
    parts = [list(range(3, 3 + n)) for n in (20, 19, 20, 5)]
    together = token_documents(setup.compressor.model, parts)
    for ids, got in zip(parts, together, strict=True):
        (alone,) = token_documents(setup.compressor.model, [ids])
        assert close(got.keys, alone.keys) and close(got.values, alone.values)


def test_cacheblend_of_every_token_is_full_compute(models: Path) -> None:
    setup = load(models, slot_dtype="float32", recompute_share=1.0)
    given = case(setup)
    assert same(only("cacheblend", setup, given), only("full", setup, given))


def test_cacheblend_recomputes_its_share_and_comes_nearer_to_full_compute(models: Path) -> None:
    setup = load(models, slot_dtype="float32", recompute_share=0.25)
    given = case(setup)
    full, reused, blended = (
        only(name, setup, given).cache.values for name in ("full", "reuse", "cacheblend")
    )
    for layer in (0, 1):
        assert close(blended[layer], full[layer])
    changed = (blended[2] != reused[2]).any(dim=-1).any(dim=1)[0]
    assert int(changed.sum()) == int(0.25 * given.source_tokens)
    assert given.prefix is not None
    assert not changed[: given.prefix.cache.num_entries].any()
    # the chosen tokens are those whose values at layer 1 were furthest off
    off = (full[1] - reused[1])[0].square().sum(dim=(0, 2))
    assert off[changed].min() >= off[~changed].max()
    assert (blended[2] - full[2]).square().sum() < (reused[2] - full[2]).square().sum()


def test_slots_are_extracted_alone_and_composed(setup: Setup) -> None:
    given = case(setup)
    made = contexts("c2kv", setup, given)
    assert [m.ratio for m in made] == [4, 8]
    model, sidecar = setup.compressor.model, setup.compressor.sidecar
    for found in made:
        assert found.ratio is not None
        alone = [Extractor(model, sidecar).extract([ids], found.ratio)[0] for ids in given.parts]
        assert same(found.context, compose(model, given.prefix, alone))
        assert found.entries == sum(slot_count(len(ids), found.ratio) for ids in given.parts)


def test_slots_at_ratio_1_are_as_many_as_tokens(models: Path) -> None:
    setup = load(models, ratios=[1])
    given = case(setup)
    (made,) = contexts("c2kv", setup, given)
    assert (made.ratio, made.entries) == (1, given.source_tokens)


def test_untrained_forgets_what_the_sidecar_learned(models: Path, tmp_path: Path) -> None:
    fresh = load(models)
    settings = replace(fresh.compressor.sidecar.config, ratios=(2, 4), trained=True)
    random_sidecar(fresh.compressor.model, settings).save(tmp_path / "sidecar")
    setup = load(models, sidecar=str(tmp_path / "sidecar"))
    given = case(setup)
    assert not same(only("c2kv", setup, given), only("c2kv", fresh, given))
    assert same(only("untrained", setup, given), only("c2kv", fresh, given))
    assert same(only("untrained", fresh, given), only("c2kv", fresh, given))


def test_untrained_keeps_the_settings_of_the_sidecar(models: Path, tmp_path: Path) -> None:
    plain = load(models)
    settings = SidecarConfig(ratios=(4,), overlap_tokens=3, max_part_tokens=24, trained=True)
    random_sidecar(plain.compressor.model, settings).save(tmp_path / "sidecar")
    setup = load(models, sidecar=str(tmp_path / "sidecar"))
    given = case(setup)
    assert len(given.parts) > len(given.documents) and max(map(len, given.parts)) <= 24
    assert not same(only("untrained", setup, given), only("untrained", plain, given))


@pytest.mark.parametrize("style", ["smollm2", "llama3", "mistral"])
def test_truncation_keeps_its_budget_and_whole_turns(models: Path, style: str) -> None:
    setup = load(models, style=style, ratios=[1, 2, 4, 8, 16])
    given = case(setup)
    made = {m.ratio: m for m in contexts("truncate", setup, given)}
    start = given.prefix.cache.num_entries if given.prefix else 0
    for ratio in (1, 2, 4, 8, 16):
        assert made[ratio].entries <= sum(slot_count(len(ids), ratio) for ids in given.parts)
        context = made[ratio].context
        assert context is not None
        assert context.cache.num_entries == start + made[ratio].entries
    assert made[1].entries == given.source_tokens
    assert made[2].entries >= given.source_tokens // 2 - 4
    assert made[16].entries < made[4].entries < made[2].entries


def test_a_cut_document_is_a_turn_with_the_beginning_of_its_text(setup: Setup) -> None:
    renderer, tokenizer = setup.compressor.renderer, setup.compressor.tokenizer
    content = f"{OAK.title}\n\n{OAK.text}"
    whole = renderer.document_ids(OAK.title, OAK.text)
    assert beginning_ids(renderer, content, len(whole)) == whole
    for budget in range(len(whole)):
        ids = beginning_ids(renderer, content, budget)
        assert len(ids) <= budget
        if ids:
            text = tokenizer.decode(ids)
            said = text.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n")
            assert len(said) == len(text) - len("<|im_start|>user\n<|im_end|>\n")
            assert content.startswith(said)
    assert beginning_ids(renderer, content, 3) == []


def test_a_cut_inside_a_character_keeps_the_budget(setup: Setup) -> None:
    """Characters of several tokens are kept or left whole, so a cut can be longer than its share of tokens."""
    renderer = setup.compressor.renderer
    content = "🌳 橡树 🌳🌳 bark"
    sizes = [len(beginning_ids(renderer, content, budget)) for budget in range(40)]
    assert all(size <= budget for budget, size in enumerate(sizes))
    assert len(set(sizes)) > 5


def test_a_budget_too_small_for_any_turn_leaves_the_prefix(models: Path) -> None:
    setup = load(models, ratios=[64])
    given = case(setup)
    (made,) = contexts("truncate", setup, given)
    assert (made.context, made.entries) == (given.prefix, 0)


@pytest.mark.parametrize("name", ["full", "none", "c2kv", "truncate", "reuse", "cacheblend"])
def test_answering_changes_no_context_and_likelihood_is_that_of_single_steps(setup: Setup, name: str) -> None:
    given = case(setup)
    context = contexts(name, setup, given)[0].context
    assert context is not None
    before = [x.clone() for x in (*context.cache.keys, *context.cache.values)]
    _, nll = asked(setup, given, context)
    assert all(
        torch.equal(a, b) for a, b in zip(before, (*context.cache.keys, *context.cache.values), strict=True)
    )

    model, losses, at = setup.compressor.model, [], context
    feed = list(given.question_ids)
    for token in given.answer_ids:
        # one more step each: the token's probability after everything before it, by a prefill of its own
        seen = prefill(model, feed[:-1], at) if len(feed) > 1 else at
        logits = last_logits(setup, seen, feed[-1])
        losses.append(-float(logits.log_softmax(-1)[token]))
        at, feed = seen, [feed[-1], token]
    assert nll == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def last_logits(setup: Setup, context: ComposedContext, token: int) -> Tensor:
    return Decoder(setup.compressor.model, context, [token], max_new_tokens=1).prefill_question()
