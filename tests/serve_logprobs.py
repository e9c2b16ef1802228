"""Logprobs: those of the model, a token each, in OpenAI's form, streamed and not."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI

from c2kv_core.generate import Decoder
from tests.serve_local import local_api, send
from tests.serve_support import QUESTION, Reference, World, ask_body

pytest_plugins = ["tests.serve_support"]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def api(world: World) -> Iterator[FastAPI]:
    with local_api(world.config()) as made:
        yield made


def post(api: FastAPI, body: dict[str, Any]) -> httpx.Response:
    return send(api, "POST", CHAT, body)


def streamed(api: FastAPI, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = post(api, {**body, "stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_they_are_the_models_own(
    api: FastAPI, world: World, reference: Reference, temperature: float
) -> None:
    asked = {"logprobs": True, "top_logprobs": 3, "temperature": temperature, "seed": 5}
    body = ask_body(["oak", "birch"], max_tokens=20, **asked)
    (choice,) = post(api, body).json()["choices"]
    told = choice["logprobs"]["content"]
    assert len(told) == 20 and choice["logprobs"]["refusal"] is None
    compressor = world.compressor
    question = compressor.renderer.question_ids([{"role": "user", "content": QUESTION}])
    decoder = Decoder(compressor.model, reference.slots("oak", "birch"), question, max_new_tokens=20)
    logits = decoder.prefill_question()
    tokenizer = compressor.tokenizer.backend_tokenizer
    for place, one in enumerate(told):
        expected = torch.log_softmax(logits.double(), dim=-1)
        values, ids = torch.topk(expected, 3)
        assert [t["token"] for t in one["top_logprobs"]] == [
            tokenizer.decode([i], skip_special_tokens=False) for i in ids.tolist()
        ]
        assert [t["logprob"] for t in one["top_logprobs"]] == pytest.approx(values.tolist(), abs=1e-4)
        assert bytes(one["bytes"]).decode() == one["token"]
        near = (expected - one["logprob"]).abs() < 1e-4
        drawn = [i for i in near.nonzero().flatten().tolist() if tokenizer.decode([i]) == one["token"]]
        assert drawn, "the token has the logprob that is told"
        if temperature == 0:
            assert drawn[0] == int(logits.argmax())
        if place < 19:
            logits = decoder.step(drawn[0])


def test_a_stream_tells_each_token_once_and_no_more_than_asked(api: FastAPI) -> None:
    body = ask_body(["oak"], max_tokens=12, logprobs=True)
    (whole,) = post(api, body).json()["choices"]
    chunks = streamed(api, body)
    told = [one for chunk in chunks for one in (chunk["logprobs"] or {"content": []})["content"]]
    assert told == whole["logprobs"]["content"] and len(told) == 12
    assert all(one["top_logprobs"] == [] for one in told)
    (plain,) = post(api, ask_body(["oak"], max_tokens=12)).json()["choices"]
    assert plain["logprobs"] is None and plain["message"] == whole["message"]
    assert all(chunk["logprobs"] is None for chunk in streamed(api, ask_body(["oak"], max_tokens=12)))


def test_tokens_behind_a_stop_string_are_not_told(api: FastAPI) -> None:
    (long,) = post(api, ask_body(["oak"], max_tokens=24)).json()["choices"]
    stop = long["message"]["content"][3:5]
    (choice,) = post(api, ask_body(["oak"], max_tokens=24, stop=stop, logprobs=True)).json()["choices"]
    told = [one["token"] for one in choice["logprobs"]["content"]]
    shown = choice["message"]["content"]
    # The last token may reach into the stop string, none lies behind its beginning.
    assert "".join(told).startswith(shown) and len("".join(told[:-1])) < len(shown)
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields", [{"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": 3}]
)
def test_what_makes_no_sense_is_refused(api: FastAPI, fields: dict[str, Any]) -> None:
    refused = post(api, ask_body(["oak"], **fields))
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_the_end_token_can_be_ignored(api: FastAPI) -> None:
    answer = post(api, ask_body(["oak"], max_tokens=40, ignore_eos=True)).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (40, "length")
