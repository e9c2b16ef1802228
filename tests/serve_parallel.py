"""A thousand mixed requests side by side give token for token what each gives alone (R28); 64 on the default model."""

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from c2kv_core.generate import Decoder
from c2kv_core.store import KVStore
from pipelines.plan import corpus_documents
from serve_app.loading import load_service
from serve_app.protocol import ChatRequest
from serve_app.service import ChatService
from tests.serve_support import (
    QUESTION,
    RATIO,
    Answer,
    Reference,
    World,
    ask_body,
    collect,
    put_documents,
    wait_until,
)

pytest_plugins = ["tests.serve_support"]

SMALLEST_GAP = 1e-4
"""Between the two likeliest tokens: below it, the rounding of a matrix product of another shape may decide."""
AT_ONCE = 48
EXAMPLES = Path(__file__).parent.parent / "examples"


def mixed_request(random_: random.Random) -> dict[str, Any]:
    """Documents in any number and order, now and then given in full, and answers of different lengths."""
    ids = random_.choices(["oak", "birch", "ash", "naked"], k=random_.randrange(5))
    if random_.random() < 0.02:
        ids.append("long")
    documents: list[Any] = list(ids)
    if random_.random() < 0.2:
        documents.append({"title": "Note", "text": f"Note {random_.randrange(20)} about the larch."})
    question = random_.choice(
        [QUESTION, "Which bark is white?", "And what of the others, old and tall? " * 3]
    )
    return ask_body(
        documents,
        messages=[{"role": "user", "content": question}],
        max_tokens=random_.randint(1, 24),
        stop=random_.choice([None, None, ["e"]]),
    )


async def run(
    service: ChatService, bodies: list[dict[str, Any]], *, at_once: int, quitters: bool
) -> list[Answer]:
    """All answers, with at most some at once; quitters leave others half way in between."""
    places = asyncio.Semaphore(at_once)

    async def one(body: dict[str, Any]) -> Answer:
        async with places:
            return await collect(service, body)

    async def quit_early(body: dict[str, Any]) -> None:
        async with places, aclosing(service.answer(ChatRequest.model_validate(body))) as events:
            await anext(events)

    leaving = [quit_early(body) for body in bodies[::10]] if quitters else []
    answers, _ = await asyncio.gather(
        asyncio.gather(*(one(body) for body in bodies)), asyncio.gather(*leaving)
    )
    return list(answers)


def smallest_gap(reference: Reference, body: dict[str, Any]) -> float:
    """Between the two likeliest tokens over the whole answer, by plain calls."""
    ids = [document["id"] for document in body.get("documents", ()) if "id" in document]
    assert len(ids) == len(body.get("documents", ())), "only stored documents are compared here"
    compressor = reference.world.compressor
    question = compressor.renderer.question_ids(body["messages"])
    context = reference.slots(*ids) if ids else reference.prefix()
    decoder = Decoder(compressor.model, context, question, max_new_tokens=body["max_tokens"])
    logits, gaps = decoder.prefill_question(), []
    for _ in range(body["max_tokens"]):
        first, second = torch.topk(logits, 2).values.tolist()
        gaps.append(first - second)
        if len(gaps) < body["max_tokens"]:
            logits = decoder.step(int(logits.argmax()))
    return min(gaps)


@pytest.mark.faults
def test_a_thousand_requests_side_by_side_equal_those_in_series(world: World, reference: Reference) -> None:
    random_ = random.Random(0)
    bodies = [mixed_request(random_) for _ in range(1000)]
    service, engine = load_service(world.config(max_running=24, max_ongoing_requests=2 * AT_ONCE))
    series = asyncio.run(run(service, bodies, at_once=1, quitters=False))
    parallel = asyncio.run(run(service, bodies, at_once=AT_ONCE, quitters=True))
    wait_until(lambda: engine.stats().running == 0, what="the last that left")
    stats = engine.stats()
    service.close()
    assert (stats.running, stats.queued, stats.failed, stats.running_bytes) == (0, 0, 0, 0)
    assert stats.finished + stats.cancelled == 2100 and stats.finished >= 2000
    different = those_that_differ(bodies, series, parallel)
    assert all(smallest_gap(reference, body) < SMALLEST_GAP for body in different), different
    assert len(different) < 10


def those_that_differ(
    bodies: list[dict[str, Any]], series: list[Answer], parallel: list[Answer]
) -> list[dict[str, Any]]:
    """Requests that got another answer among others than alone."""
    return [
        body
        for body, alone, among in zip(bodies, series, parallel, strict=True)
        if (alone.text, alone.end["finish_reason"]) != (among.text, among.end["finish_reason"])
    ]


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_64_requests_of_the_default_model_side_by_side_equal_those_in_series(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    world = World(model="smollm2-135m-instruct", store=str(tmp_path / "store"))
    sources = list(corpus_documents(EXAMPLES / "corpus"))[:12]
    identity = world.compressor.identities[RATIO]
    put_documents(world, KVStore.open(world.store, identity=identity, create=True), sources)
    random_ = random.Random(0)
    questions = [
        json.loads(line)["question"] for line in (EXAMPLES / "questions.jsonl").read_text().splitlines()
    ]
    bodies = [
        ask_body(
            random_.sample([source.doc_id for source in sources], k=random_.randrange(5)),
            messages=[{"role": "user", "content": random_.choice(questions)}],
            max_tokens=random_.randint(1, 24),
        )
        for _ in range(64)
    ]
    service, _ = load_service(world.config())
    series = asyncio.run(run(service, bodies, at_once=1, quitters=False))
    parallel = asyncio.run(run(service, bodies, at_once=24, quitters=True))
    service.close()
    different = those_that_differ(bodies, series, parallel)
    record_property("different", len(different))
    reference = Reference(world=world)
    assert all(smallest_gap(reference, body) < SMALLEST_GAP for body in different), different
    assert len(different) <= 2
