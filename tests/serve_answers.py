"""Answers of the service equal those of plain calls, token for token."""

import asyncio
import dataclasses
import json
import shutil
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest

from c2kv_core.generate import generate
from c2kv_core.sampling import SamplingParams
from serve_app.caller import Caller
from serve_app.jobs import Step, Turns, Work
from serve_app.loading import load_service
from serve_app.protocol import ChatRequest
from serve_app.service import ChatService
from tests.serve_support import QUESTION, Answer, Reference, World, ask, ask_body, collect, make_world

pytest_plugins = ["tests.serve_support"]


@pytest.fixture(scope="module", params=[False, True], ids=["equal-heads", "shared-heads"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Answers are the same calls' whether heads have equal numbers of entries or share them out."""
    return make_world(tmp_path_factory.mktemp("world"), shared_heads=request.param)


@pytest.fixture(scope="module")
def reference(world: World) -> Reference:
    return Reference(world=world)


@pytest.mark.parametrize(
    "doc_ids", [["oak"], ["oak", "birch"], ["birch", "oak"], ["oak", "oak", "ash"], ["long"]], ids="-".join
)
def test_answer_over_documents_equals_compose_and_generate(
    service: ChatService, reference: Reference, doc_ids: list[str]
) -> None:
    answer = ask(service, doc_ids, max_tokens=24)
    assert answer.text == reference.answer(reference.slots(*doc_ids), tokens=24)


def test_order_of_documents_matters(service: ChatService) -> None:
    assert (
        ask(service, ["oak", "birch"], max_tokens=24).text
        != ask(service, ["birch", "oak"], max_tokens=24).text
    )


def test_answer_without_documents(service: ChatService, reference: Reference) -> None:
    answer = ask(service)
    assert answer.text == reference.answer(reference.prefix()) and answer.documents == []


@pytest.mark.parametrize("question", ["a", ""], ids=["one-token", "only-documents"])
def test_shortest_questions(service: ChatService, reference: Reference, question: str) -> None:
    answer = ask(service, ["oak"], messages=[{"role": "user", "content": question}])
    assert answer.text == reference.answer(reference.slots("oak"), question)


def test_several_turns_follow_the_documents(service: ChatService, reference: Reference, world: World) -> None:
    system = {"role": "system", "content": "Answer briefly."}
    turns: list[Any] = [
        {"role": "user", "content": "How tall is it?"},
        {"role": "assistant", "content": "20 metres."},
        {"role": "user", "content": "And its bark?"},
    ]
    with_documents = ask(service, ["oak"], messages=[system, *turns])
    assert with_documents.text == ask(service, ["oak"], messages=[system, *turns]).text
    without = ask(service, messages=[system, *turns])
    assert without.text == reference.answer(reference.prefix("Answer briefly."), turns)
    # Without documents the layout is the template's own for the whole conversation.
    tokenizer = world.compressor.tokenizer
    whole = tokenizer.apply_chat_template([system, *turns], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert without.end["usage"]["prompt_tokens"] == len(ids)


def test_equal_seeds_draw_equal_answers(service: ChatService, reference: Reference) -> None:
    drawn = {"temperature": 1.3, "top_p": 0.9, "max_tokens": 24}
    first, again, other = (ask(service, ["oak"], seed=seed, **drawn) for seed in (5, 5, 6))
    assert first.text == again.text != other.text
    sampling = SamplingParams(temperature=1.3, top_p=0.9, seed=5)
    assert first.text == reference.answer(reference.slots("oak"), tokens=24, sampling=sampling)


def test_max_tokens_ends_the_answer(service: ChatService) -> None:
    end = ask(service, ["oak"], max_tokens=3).end
    assert (end["finish_reason"], end["usage"]["completion_tokens"]) == ("length", 3)


def test_end_token_ends_the_answer_before_it(world: World, reference: Reference, tmp_path: Path) -> None:
    compressor = world.compressor
    question = compressor.renderer.question_ids([{"role": "user", "content": QUESTION}])
    ids = list(generate(compressor.model, reference.slots("oak"), question, max_new_tokens=8))
    # The same weights, by whose generation settings a token from the middle of that answer ends answers.
    shutil.copytree(world.model, tmp_path / "model")
    settings = {"eos_token_id": [compressor.tokenizer.eos_token_id, ids[4]]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    ending, _ = load_service(dataclasses.replace(world, model=str(tmp_path / "model")).config())
    end = ask(ending, ["oak"]).end
    ending.close()
    assert (end["finish_reason"], end["usage"]["completion_tokens"]) == ("stop", ids.index(ids[4]))


@pytest.mark.parametrize("as_list", [True, False])
def test_stop_string_is_not_shown(service: ChatService, as_list: bool) -> None:
    whole = ask(service, ["oak"], max_tokens=24).text
    stop = whole[len(whole) // 2 :][:3]
    stopped = ask(service, ["oak"], max_tokens=24, stop=[stop, "never to be met"] if as_list else stop)
    assert stopped.text == whole[: whole.index(stop)]
    assert stopped.end["finish_reason"] == "stop"


def test_context_beyond_the_models_positions_is_refused(service: ChatService) -> None:
    fault = ask(service, ["long", "long"]).fault
    assert (fault["status"], fault["code"]) == (400, "context_length_exceeded")
    assert "4096" in fault["message"]


def test_answer_that_would_not_fit_is_refused_only_when_asked_for(service: ChatService, world: World) -> None:
    filler = {"role": "user", "content": QUESTION * 80}
    used = ask(service, ["long"], messages=[filler], max_tokens=1).end["usage"]["prompt_tokens"]
    room = 4096 - used + 1
    assert 1 < room < 2048, "the prompt must leave less room than the limit for this test to mean something"
    assert (
        ask(service, ["long"], messages=[filler], max_tokens=room + 1).fault["code"]
        == "context_length_exceeded"
    )
    roomy, _ = load_service(world.config(default_max_new_tokens=2048))
    end = ask(roomy, ["long"], messages=[filler]).end
    roomy.close()
    assert end["usage"]["completion_tokens"] <= room


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"c2kv": {"ratio": 8}}, "ratio_not_served"),
        ({"max_tokens": 4000}, "invalid_request"),
        ({"documents": [{"id": "oak"}] * 65}, "too_many_documents"),
        ({"messages": [{"role": "system", "content": "x"}]}, "invalid_request"),
    ],
)
def test_limits_of_the_server(service: ChatService, fields: dict[str, Any], code: str) -> None:
    fault = ask(service, **fields).fault
    assert (fault["status"], fault["code"]) == (400, code)


def test_served_ratio_may_be_named(service: ChatService) -> None:
    assert ask(service, ["oak"], c2kv={"ratio": 4}).end["c2kv"]["ratio"] == 4


def test_timings_are_those_of_the_answer(service: ChatService) -> None:
    block = ask(service, ["oak", {"text": "An elm."}]).end["c2kv"]
    timings = block["timings"]
    assert timings["verify_ms"] > 0
    assert timings["first_token_ms"] <= timings["total_ms"]
    parts = [timings[name] for name in ("queue_ms", "fetch_ms", "verify_ms", "extract_ms", "compose_ms")]
    assert all(part >= 0 for part in parts) and sum(parts) <= timings["first_token_ms"]
    assert timings["extract_ms"] > 0
    assert block["sidecar"] == "untrained"


MIXED: list[dict[str, Any]] = [
    ask_body(["oak", "birch"], max_tokens=24),
    ask_body(["birch", "oak"], max_tokens=24),
    ask_body(["long"], max_tokens=5),
    ask_body(max_tokens=24),
    ask_body(["ash", {"title": "Elm", "text": "The elm is tall."}], max_tokens=24),
    ask_body([{"text": "The elm is tall."}, "oak"], max_tokens=12, c2kv={"on_missing": "text"}),
    ask_body(["oak", "oak"], max_tokens=24, temperature=1.0, seed=3),
    ask_body(["naked"], max_tokens=24, temperature=0.7, top_p=0.8, seed=4),
    ask_body(["oak", "elm"], max_tokens=8),
    ask_body(["birch"], max_tokens=24, stop=["e", "q"]),
]


def test_requests_side_by_side_equal_requests_in_series(world: World) -> None:
    async def side_by_side(service: ChatService) -> list[Answer]:
        return await asyncio.gather(*(collect(service, body) for body in MIXED * 3))

    service, engine = load_service(world.config(max_running=5, max_ongoing_requests=40))
    series = [asyncio.run(collect(service, body)) for body in MIXED]
    parallel = asyncio.run(side_by_side(service))
    stats = engine.stats()
    service.close()
    assert [a.text for a in parallel] == [a.text for a in series] * 3
    assert [a.events[-1]["event"] for a in parallel] == [a.events[-1]["event"] for a in series] * 3
    assert (stats.running, stats.queued, stats.failed, stats.cancelled) == (0, 0, 0, 0)


def test_a_long_system_message_is_read_in_pieces_and_answers_equal(
    service: ChatService, reference: Reference
) -> None:
    system = "You know all about trees. " * 220
    turns = []
    real = service._engine._turns  # type: ignore[attr-defined]

    def counting(work: Work) -> Turns:
        told, logits = real(work), None
        with suppress(StopIteration):
            while True:
                turn = told.send(logits)
                turns.append(turn)
                logits = yield turn

    service._engine._turns = counting  # type: ignore[attr-defined]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    answer = ask(service, messages=messages)
    pieces = -(-len(reference.world.compressor.renderer.prefix_ids(system)) // 512)
    assert pieces > 2 and turns[:pieces].count(None) == pieces - 1
    assert answer.text == reference.answer(reference.prefix(system))


def test_tenants_do_not_share_prefilled_system_messages(service: ChatService) -> None:
    async def one(namespace: str) -> None:
        request = ChatRequest.model_validate(ask_body(max_tokens=1))
        async with aclosing(service.answer(request, Caller(name=namespace, namespace=namespace))) as events:
            async for _ in events:
                pass

    for namespace, held in (("a", 1), ("a", 1), ("b", 2)):
        asyncio.run(one(namespace))
        assert len(service._shared.prefixes) == held


@pytest.mark.parametrize(
    ("documents", "on_missing"),
    [
        (["long"], "extract"),
        (["oak", "birch", {"text": "An elm is a tree. " * 40}], "extract"),
        # As text before, between and behind slots.
        ([{"text": "An elm is a tree. " * 40}, "oak", {"text": "A yew is a tree. " * 40}, "birch"], "text"),
    ],
)
def test_a_cache_takes_no_more_memory_than_the_engine_counts(
    service: ChatService, documents: list[str | dict[str, Any]], on_missing: str
) -> None:
    engine: Any = service._engine
    counted, taken = [], []
    real = engine._turns

    def watching(work: Work) -> Turns:
        counted.append(engine._size_bytes(work))
        told, logits = real(work), None
        with suppress(StopIteration):
            while True:
                turn = told.send(logits)
                if isinstance(turn, Step):
                    taken.append(turn.decoder.cache.nbytes)
                logits = yield turn

    engine._turns = watching
    assert ask(service, documents, c2kv={"on_missing": on_missing}).end
    assert 0.9 * counted[0] < max(taken) <= counted[0]
