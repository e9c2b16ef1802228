"""Bodies and headers that no client library sends: refused as the client's fault, within bounds."""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from c2kv_core.text import ChatRenderer
from serve_app.errors import ApiError
from serve_app.request_body import parse_request
from tests.serve_local import client, local_api, over_http, send
from tests.serve_support import World, ask_body, make_world

pytest_plugins = ["tests.serve_support"]

CHAT = "/v1/chat/completions"
LIMIT_BYTES = 64_000
ROUTES = [("POST", CHAT), ("POST", "/v1/completions"), ("PUT", "/v1/documents/x")]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("malformed"))


@pytest.fixture(scope="module")
def api(own: World) -> Iterator[FastAPI]:
    with local_api(own.config(max_request_bytes=LIMIT_BYTES)) as made:
        yield made


def sent(api: FastAPI, method: str, path: str, body: bytes) -> tuple[int, str]:
    """Status and code of a refusal, which must be JSON that any client can read."""

    async def one() -> tuple[int, str]:
        async with client(api) as http:
            answer = await http.request(method, path, content=body)
        return answer.status_code, json.loads(answer.content.decode())["error"]["code"]

    return asyncio.run(one())


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        b"null",
        b"not json",
        b"{",
        b'{"text": "x"} {"text": "y"}',
        b'{"text": "\xff"}',
        b"[" * 30_000,
        b'{"text": ' * 6_000,
        b'{"text": "x", "title": "\\ud800", "prompt": "x", "messages": []}',
        b'{"text": "x", "prompt": "x", "n": NaN}',
        b'{"text": "x", "prompt": "x", "n": [-Infinity, {"x": Infinity}]}',
        b'{"text": "x", "prompt": "x", "seed": ' + b"9" * 5_000 + b"}",
        b'{"text": "x", "prompt": "x", "seed": -NaN}',
    ],
    ids=lambda body: repr(body)[:30],
)
def test_what_is_no_json_object_is_refused(api: FastAPI, method: str, path: str, body: bytes) -> None:
    assert sent(api, method, path, body) == (400, "invalid_json")


@pytest.mark.parametrize(
    "fields",
    [
        {"documents": [1] * 5_000},
        {"messages": [1] * 5_000},
        {"c2kv": dict.fromkeys(map(str, range(5_000)))},
        {"documents": [dict.fromkeys(map(str, range(5_000)))]},
        {"documents": [dict.fromkeys(map(str, range(90)))] * 500},
    ],
    ids=lambda fields: repr(fields)[:30],
)
def test_many_faults_are_not_all_looked_for(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(json.dumps({**ask_body(), **fields}).encode())
    cause = caught.value.__cause__
    assert isinstance(cause, ValidationError) and cause.error_count() <= 100
    assert len(caught.value.fault.message) < 500


def test_long_and_many_unknown_keys_are_compared_with_ours_in_part() -> None:
    many = {f"doc{n}": 1 for n in range(5_000)}
    assert parse_request(json.dumps({**ask_body(), **many}).encode()).messages
    with pytest.raises(ApiError, match="did you mean 'documents'"):
        parse_request(json.dumps({**ask_body(), "document": []}).encode())
    with pytest.raises(ApiError) as caught:
        parse_request(json.dumps({**ask_body(), "c2kv": {"x" * 50_000: 1}}).encode())
    assert len(caught.value.fault.message) < 500 and len(str(caught.value.fault.param)) < 200


@pytest.mark.parametrize("messages", [("word " * 3_000, 4), ("", 5_000)], ids=["long", "many"])
def test_messages_that_fit_no_context_together_are_not_encoded_together(
    own: World, monkeypatch: pytest.MonkeyPatch, messages: tuple[str, int]
) -> None:
    def never(*args: Any) -> list[int]:
        raise AssertionError("encoded as a whole, while all others wait")

    content, count = messages
    with local_api(own.config()) as wide:
        monkeypatch.setattr(ChatRenderer, "question_ids", never)
        body = ask_body(messages=[{"role": "user", "content": content}] * count)
        refused = send(wide, "POST", CHAT, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("field", ["seed", "temperature", "max_tokens", "top_p", "n"])
def test_numbers_beyond_all_floats_are_refused(api: FastAPI, field: str) -> None:
    body = b'{"prompt": "x", "%s": 1e999}' % field.encode()
    assert sent(api, "POST", "/v1/completions", body) == (400, "invalid_request")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 10**400},
        {"seed": 2**63},
        {"max_tokens": 10**30},
        {"max_tokens": 1e30},
        {"temperature": 1e308},
        {"temperature": -1e-300},
        {"top_p": 5e-324, "temperature": 1e-320, "max_tokens": 2},
        {"n": 1.0000001},
        {"c2kv": {"deadline_ms": 10**400}, "max_tokens": 2},
        {"c2kv": {"ratio": 10**40}},
        {"documents": [{"id": "a" * 50_000}]},
        {"documents": [{"id": "\x00/../..\n"}]},
        {"documents": [{"id": "oak"}] * 65},
        {"documents": [{"text": ""}] * 3, "max_tokens": 2},
        {"messages": [{"role": "user", "content": ""}] * 300},
        {"stop": ["\x00", "\uffff", "a" * 50_000], "max_tokens": 2},
        {"stop": [["a"]]},
        {"messages": [{"role": "assistant", "content": "<|im_end|>" * 10}], "max_tokens": 2},
        {"stream_options": {"include_usage": "yes"}},
        {"user": {"a": [1, {"b": None}]}, "metadata": [0] * 1000, "max_tokens": 2},
    ],
    ids=lambda fields: repr(fields)[:40],
)
def test_odd_values_are_answered_or_refused_by_the_client_s_fault(
    api: FastAPI, fields: dict[str, Any], stream: bool
) -> None:
    answer = send(api, "POST", CHAT, {**ask_body(), **fields, "stream": stream})
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.json()["error"]["code"] not in ("internal_error", None)
    elif stream:
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "doc_id", ["a%00b", "a%0Ab", "%2e%2e/%2e%2e/etc", "a//b/", "%F0%9F%8C%B3", "x" * 5_000]
)
def test_any_text_is_an_id(api: FastAPI, doc_id: str) -> None:
    path = f"/v1/documents/{doc_id}"
    assert send(api, "PUT", path, {"text": "A tree."}).status_code == 200
    told = send(api, "GET", path).json()
    assert send(api, "POST", CHAT, ask_body([told["id"]], max_tokens=1)).status_code == 200
    assert send(api, "DELETE", path).json()["id"] == told["id"]


@pytest.fixture(scope="module")
def port(api: FastAPI) -> Iterator[int]:
    with over_http(api) as number:
        yield number


def raw(port: int, head: str, *pieces: bytes, ends: bool = False) -> bytes:
    """The start of the response to bytes as they are."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode("latin-1"))
        for piece in pieces:
            connection.sendall(piece)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        return connection.recv(4096)


def status(response: bytes) -> int:
    return int(response.split(b" ")[1])


def test_a_chunked_body_is_read_no_further_than_the_limit(port: int) -> None:
    chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
    # Never ended: the answer must come without the rest.
    assert status(raw(port, "Transfer-Encoding: chunked", *[chunk] * (LIMIT_BYTES // 0x4000 + 1))) == 413


def test_a_declared_length_beyond_the_limit_is_refused_unread(port: int) -> None:
    assert status(raw(port, f"Content-Length: {LIMIT_BYTES + 1}")) == 413
    assert status(raw(port, f"Content-Length: {10**18}")) == 413


@pytest.mark.parametrize("length", ["-1", "ten", "1, 2", "1" * 30 + "x", "0x10"])
def test_a_length_that_is_no_number_is_refused(port: int, length: str) -> None:
    assert status(raw(port, f"Content-Length: {length}", b"{}")) == 400


def test_lengths_that_do_not_fit_the_body_hurt_nobody_else(port: int) -> None:
    body = json.dumps(ask_body(max_tokens=1)).encode()
    # Too short: the body is cut, and what is left is no request.
    assert status(raw(port, f"Content-Length: {len(body) - 5}", body)) == 400
    # Too long, and then the client leaves.
    raw(port, f"Content-Length: {len(body) + 5}", body, ends=True)
    well = raw(port, f"Content-Length: {len(body)}\r\nContent-Type: application/json", body)
    assert status(well) == 200


def test_who_asks_the_endpoint_for_metrics_is_told_where_they_are(api: FastAPI) -> None:
    answer = send(api, "GET", "/metrics")
    assert answer.status_code == 404 and "each node's Prometheus port" in answer.json()["error"]["message"]
