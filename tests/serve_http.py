"""The endpoint over HTTP on a real Ray: OpenAI's form, streams, refusals, clients that leave, overload."""

import concurrent.futures
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from ray import serve

from serve_app.launch import APP_NAME, Running
from tests.serve_support import QUESTION, Reference, ask_body, wait_until

pytest_plugins = ["tests.serve_support"]
pytestmark = [pytest.mark.ray, pytest.mark.slow]

LONG_ANSWER = 2000
CHAT = "/v1/chat/completions"


@pytest.fixture
def http(endpoint: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=endpoint.url, timeout=120) as client:
        yield client


@pytest.fixture
def client(endpoint: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0)


def stats() -> dict[str, int]:
    """What the replica's engine holds and has done."""
    handle = serve.get_deployment_handle("Generator", APP_NAME)
    return dict(handle.stats.remote().result())


def sse(response: httpx.Response) -> list[str]:
    """The data of all events."""
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def streamed(http: httpx.Client, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Text and chunks of a stream that must end well."""
    with http.stream("POST", CHAT, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, done = sse(response)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in parsed if c["choices"])
    return text, parsed


def test_completion_has_openais_form(http: httpx.Client, reference: Reference) -> None:
    answer = http.post(CHAT, json=ask_body(["oak", "birch"])).json()
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    assert choice["message"]["content"] == reference.answer(reference.slots("oak", "birch"))
    assert [d["id"] for d in answer["c2kv"]["documents"]] == ["oak", "birch"]
    cached = sum(d["source_tokens"] for d in answer["c2kv"]["documents"])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_stream_gives_the_same_answer_in_chunks(http: httpx.Client) -> None:
    body = ask_body(["birch", "oak"], max_tokens=24)
    text, chunks = streamed(http, body)
    assert text == http.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert ["c2kv" in c for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["c2kv"]["timings"]["total_ms"] > 0


def test_stream_ends_with_usage_when_asked(http: httpx.Client) -> None:
    body = ask_body(["oak"], stream_options={"include_usage": True})
    _, chunks = streamed(http, body)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == http.post(CHAT, json=body).json()["usage"]
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert "c2kv" in chunks[-1] and chunks[-2]["choices"][0]["finish_reason"] == "length"


def test_official_client_reads_both_forms(client: openai.OpenAI, reference: Reference) -> None:
    expected = reference.answer(reference.slots("oak", "ash"), tokens=12)
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 12,
        "extra_body": {"documents": [{"id": "oak"}, {"id": "ash"}]},
    }
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    assert whole.model_extra is not None and len(whole.model_extra["c2kv"]["documents"]) == 2
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected
    assert client.models.list().data[0].id == "tiny"


def test_official_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(
            model="tiny", messages=messages, extra_body={"documents": [{"id": "elm"}]}
        )
    assert unknown.value.code == "document_not_found" and "elm" in unknown.value.message
    with pytest.raises(openai.NotFoundError) as model:
        client.chat.completions.create(model="gpt-4o", messages=messages)
    assert model.value.code == "model_not_found"
    extra = {"documents": [{"id": "long"}, {"id": "long"}]}
    with pytest.raises(openai.BadRequestError) as overflow:
        client.chat.completions.create(model="tiny", messages=messages, extra_body=extra)
    assert overflow.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"documents": [{"id": "elm"}]}, 404, "document_not_found"),
        ({"documents": [{"id": "long"}] * 2}, 400, "context_length_exceeded"),
        ({"n": 2}, 400, "invalid_request"),
        ({"c2kv": {"ration": 4}}, 400, "unknown_parameter"),
        ({"documents": [{"id": "long"}], "c2kv": {"deadline_ms": 1}}, 504, "deadline_exceeded"),
        ({"model": "other"}, 404, "model_not_found"),
        ({"documents": [{"text": "x" * 64_000}]}, 413, "request_too_large"),
    ],
)
def test_refusals_are_statuses_before_any_stream(
    http: httpx.Client, fields: dict[str, Any], status: int, code: str, stream: bool
) -> None:
    response = http.post(CHAT, json=ask_body(**fields, stream=stream))
    assert response.status_code == status
    error = response.json()["error"]
    assert error["code"] == code and set(error) == {"message", "type", "param", "code"}


def test_body_without_a_declared_length_is_bounded(http: httpx.Client) -> None:
    response = http.post(CHAT, content=(b"x" * 10_000 for _ in range(10)))
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", CHAT, 400, "invalid_json"),
    ],
)
def test_other_errors_have_the_same_form(
    http: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    response = http.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_health_is_well(http: httpx.Client) -> None:
    response = http.get("/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok", "reasons": []})


def test_client_that_leaves_a_stream_frees_the_replica(http: httpx.Client) -> None:
    before = stats()
    with http.stream("POST", CHAT, json=ask_body(["oak"], stream=True, max_tokens=LONG_ANSWER)) as response:
        next(response.iter_lines())
    wait_until(lambda: stats()["cancelled"] == before["cancelled"] + 1, what="the cancellation")
    assert (stats()["running"], stats()["queued"], stats()["finished"]) == (0, 0, before["finished"])
    assert http.post(CHAT, json=ask_body(["oak"])).status_code == 200


def test_client_that_gives_up_waiting_frees_the_replica(http: httpx.Client) -> None:
    before = stats()
    with pytest.raises(httpx.ReadTimeout):
        http.post(CHAT, json=ask_body(["oak"], max_tokens=LONG_ANSWER), timeout=0.5)
    wait_until(lambda: stats()["cancelled"] == before["cancelled"] + 1, what="the cancellation")
    assert (stats()["running"], stats()["queued"], stats()["finished"]) == (0, 0, before["finished"])


@pytest.mark.parametrize("stream", [True, False])
def test_overload_is_a_status_with_retry_after(http: httpx.Client, stream: bool) -> None:
    # 2 places in the replica and 2 at the ingress, so of 12 at once most must be refused, and before any headers.
    def send(_: int) -> tuple[int, str, str]:
        with http.stream("POST", CHAT, json=ask_body(["oak"], stream=stream, max_tokens=400)) as response:
            body = response.read().decode()
        return response.status_code, response.headers.get("retry-after", ""), body

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        outcomes = list(pool.map(send, range(12)))
    answered = [body for status, _, body in outcomes if status == 200]
    refused = [(wait, json.loads(body)["error"]["code"]) for status, wait, body in outcomes if status == 503]
    assert len(answered) + len(refused) == 12 and len(answered) >= 2 and refused
    assert set(refused) == {("2", "overloaded")}
    if stream:
        assert all(body.endswith("data: [DONE]\n\n") for body in answered)
    wait_until(lambda: stats()["running"] + stats()["queued"] == 0, what="an idle replica")


def test_answers_side_by_side_equal_answers_in_series(http: httpx.Client) -> None:
    bodies = [
        ask_body(docs, max_tokens=24) for docs in (["oak"], ["birch", "oak"], [], ["ash", "oak", "ash"])
    ]
    series = [choices(http, body) for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        parallel = list(pool.map(lambda body: choices(http, body), bodies))
    assert parallel == series


def choices(http: httpx.Client, body: dict[str, Any]) -> Any:
    """The answer of a client that comes again when it is told to: places that others just left count as taken."""
    answer = http.post(CHAT, json=body)
    while answer.status_code == 503:
        time.sleep(float(answer.headers["retry-after"]))
        answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_the_openai_client_sees_completions_logprobs_and_documents(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    text = client.completions.create(model="tiny", prompt="The oak", max_tokens=6, logprobs=1)
    assert text.choices[0].logprobs is not None and len(text.choices[0].logprobs.tokens or []) == 6
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=6,
        logprobs=True,
        top_logprobs=2,
    )
    told = chat.choices[0].logprobs
    assert told is not None and [len(one.top_logprobs) for one in told.content or []] == [2] * 6
    assert http.put("/v1/documents/fir", json={"text": "A fir is evergreen."}).status_code == 200
    answer = http.post(CHAT, json=ask_body(["fir"], max_tokens=4)).json()
    assert answer["c2kv"]["documents"][0]["id"] == "fir"
    assert http.delete("/v1/documents/fir").json()["deleted"]
    assert http.get("/v1/documents/fir").status_code == 404
