"""``/v1/completions``: a prompt as it is, alone and behind documents."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from c2kv_core.generate import generate
from tests.serve_local import local_api, send
from tests.serve_support import Reference, World

pytest_plugins = ["tests.serve_support"]
PROMPT = "The oak is tall and the birch"


@pytest.fixture(scope="module")
def api(world: World) -> Iterator[FastAPI]:
    with local_api(world.config()) as made:
        yield made


def post(api: FastAPI, body: dict[str, Any]) -> httpx.Response:
    return send(api, "POST", "/v1/completions", {"model": "tiny", **body})


def test_a_prompt_goes_on_as_the_stock_model_would(api: FastAPI, world: World) -> None:
    compressor = world.compressor
    answer = post(api, {"prompt": PROMPT, "max_tokens": 16}).json()
    ids = compressor.tokenizer(PROMPT).input_ids
    expected = compressor.tokenizer.decode(list(generate(compressor.model, None, ids, max_new_tokens=16)))
    (choice,) = answer["choices"]
    assert choice["text"] == expected
    assert (answer["object"], choice["finish_reason"], choice["logprobs"]) == (
        "text_completion",
        "length",
        None,
    )
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert post(api, {"prompt": [PROMPT], "max_tokens": 16}).json()["choices"] == answer["choices"]


def test_documents_stand_before_it(api: FastAPI, world: World, reference: Reference) -> None:
    compressor = world.compressor
    answer = post(
        api, {"prompt": PROMPT, "max_tokens": 16, "documents": [{"id": "oak"}, {"id": "ash"}]}
    ).json()
    ids = compressor.renderer.answer_ids(PROMPT)
    drawn = list(generate(compressor.model, reference.slots("oak", "ash"), ids, max_new_tokens=16))
    assert answer["choices"][0]["text"] == compressor.tokenizer.decode(drawn)
    assert [d["tier"] for d in answer["c2kv"]["documents"]] == ["store", "store"]


def test_a_stream_gives_the_same(api: FastAPI) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 2, "documents": [{"id": "oak"}]}
    whole = post(api, body).json()
    sent = post(api, {**body, "stream": True, "stream_options": {"include_usage": True}})
    lines = sent.text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == whole["choices"][0]["text"]
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    told = whole["choices"][0]["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == 12
    assert all(len(top) <= 2 for top in told["top_logprobs"])
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"] and c["choices"][0]["logprobs"]]
    assert [t for part in streamed for t in part["tokens"]] == told["tokens"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": ""},
        {"prompt": ["a", "b"]},
        {"prompt": [1, 2]},
        {"prompt": 5},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "n": 2},
        {"prompt": "a", "best_of": 3},
        {"prompt": "a", "logprobs": 6},
        {"prompt": "a", "document": []},
    ],
)
def test_what_is_not_supported_is_refused(api: FastAPI, body: dict[str, Any]) -> None:
    refused = post(api, body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error"), (
        refused.text
    )


def test_control_tokens_in_a_prompt_are_text(api: FastAPI, world: World) -> None:
    prompt = f"{PROMPT}<|im_end|>"
    answer = post(api, {"prompt": prompt, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] > len(world.compressor.tokenizer(prompt).input_ids)
