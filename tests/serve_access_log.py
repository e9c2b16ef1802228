"""Request ids and the access log: one line a request, what it tells, and what it must never tell."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from fastapi import FastAPI
from ray.exceptions import TaskCancelledError

from serve_app.access_log import LOGGER_NAME
from serve_app.api import create_api
from serve_app.caller import Caller
from serve_app.errors import unavailable
from serve_app.events import ReplicaEvent, error_event
from serve_app.ingress import Disconnects
from serve_app.launch import Running
from serve_app.loading import load_service
from serve_app.protocol import AnyRequest
from serve_app.serve_logs import log_with_serve
from serve_app.store_watch import StoreWatch
from tests.serve_local import LocalClient, client, local_api, send
from tests.serve_support import World, ask_body, make_world, wait_until

pytest_plugins = ["tests.serve_support"]

CHAT = "/v1/chat/completions"
FIELDS = {
    "time",
    "request_id",
    "method",
    "route",
    "status",
    "outcome",
    "code",
    "key",
    "namespace",
    "stream",
    "documents",
    "prompt_tokens",
    "completion_tokens",
    "ttft_ms",
    "total_ms",
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("access"))


@pytest.fixture(scope="module")
def api(own: World) -> Iterator[FastAPI]:
    with local_api(own.config(max_request_bytes=20_000, max_new_tokens_limit=4000)) as made:
        yield made


class _Keeping(logging.Handler):
    """Keeps records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    keeping, logger = _Keeping(), logging.getLogger(LOGGER_NAME)
    logger.addHandler(keeping)
    logger.setLevel(logging.INFO)
    yield keeping.records
    logger.removeHandler(keeping)
    logger.setLevel(logging.NOTSET)


def told(lines: list[logging.LogRecord]) -> dict[str, Any]:
    """The only line so far, which is then forgotten."""
    (line,) = [json.loads(record.getMessage()) for record in lines]
    lines.clear()
    assert set(line) == FIELDS
    return line


def test_every_response_carries_an_id(api: FastAPI) -> None:
    async def ids(given: str) -> set[str]:
        headers = [(b"x-request-id", given.encode("latin-1"))] if given else []
        async with client(api) as http:
            answers = [
                await http.get("/healthz", headers=headers),
                await http.get("/v1/nothing", headers=headers),
                await http.post(CHAT, content=b"{", headers=headers),
                await http.post(CHAT, json=ask_body(["oak"], stream=True), headers=headers),
            ]
        assert all(len(answer.headers.get_list("x-request-id")) == 1 for answer in answers)
        return {answer.headers["x-request-id"] for answer in answers}

    assert asyncio.run(ids("Root=1-67891233/a.b@c:d+e")) == {"Root=1-67891233/a.b@c:d+e"}
    for given in ("", "two words", 'a"b', "x" * 129, "\u00e9"):
        made = asyncio.run(ids(given))
        assert len(made) == 4 and all(len(one) == 32 for one in made)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_told_by_numbers(api: FastAPI, lines: list[logging.LogRecord], stream: bool) -> None:
    body = ask_body(["oak", "birch"], stream=stream, max_tokens=5)
    answer = send(api, "POST", CHAT, body)
    line = told(lines)
    assert (line["method"], line["route"], line["status"]) == ("POST", CHAT, 200)
    assert (line["outcome"], line["code"], line["stream"]) == ("finished", None, stream)
    assert (line["key"], line["namespace"], line["documents"]) == ("anybody", "default", 2)
    assert line["completion_tokens"] == 5 and line["prompt_tokens"] > 20
    assert 0 < line["ttft_ms"] <= line["total_ms"]
    assert line["request_id"] == answer.headers["x-request-id"] and line["time"].endswith("+00:00")


@pytest.mark.parametrize(
    ("method", "path", "body", "route", "status", "code"),
    [
        ("GET", "/v1/nothing/secret", None, None, 404, "not_found"),
        ("POST", "/v1/models", None, "/v1/models", 405, "method_not_allowed"),
        ("POST", CHAT, {"messages": "secret"}, CHAT, 400, "invalid_request"),
        ("POST", CHAT, ask_body(["secret"]), CHAT, 404, "document_not_found"),
        ("POST", CHAT, ask_body(["secret"], stream=True), CHAT, 404, "document_not_found"),
        ("POST", CHAT, ask_body([{"text": "secret " * 4000}]), CHAT, 413, "request_too_large"),
        ("GET", "/v1/documents/secret", None, "/v1/documents/{doc_id}", 404, "document_not_found"),
    ],
)
def test_refusals_are_told_by_their_code(
    api: FastAPI,
    lines: list[logging.LogRecord],
    method: str,
    path: str,
    body: Any,
    route: str | None,
    status: int,
    code: str,
) -> None:
    assert send(api, method, path, body).status_code == status
    assert "secret" not in "".join(record.getMessage() for record in lines)
    line = told(lines)
    assert (line["route"], line["status"], line["code"]) == (route, status, code)
    assert line["outcome"] == "failed"


def test_no_text_of_anybody_is_told(api: FastAPI, lines: list[logging.LogRecord]) -> None:
    secret = {"title": "secret", "text": "A secret."}
    send(api, "PUT", "/v1/documents/secret", secret)
    asked = ask_body(["secret", secret], messages=[{"role": "user", "content": "secret?"}], user="secret")
    answer = send(api, "POST", f"{CHAT}?secret=secret", asked).json()
    send(api, "POST", "/v1/completions", {"prompt": "secret", "documents": [{"id": "secret"}]})
    send(api, "DELETE", "/v1/documents/secret")
    assert len(lines) == 4
    log = "".join(record.getMessage() for record in lines)
    assert "secret" not in log and answer["choices"][0]["message"]["content"] not in log


@pytest.mark.parametrize("by_serve", [False, True])
def test_a_stream_whose_client_left_is_told_as_such(
    api: FastAPI, lines: list[logging.LogRecord], by_serve: bool
) -> None:
    body = json.dumps(ask_body(["oak"], stream=True, max_tokens=3900)).encode()

    async def leave() -> None:
        begun = asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await begun.wait()
            if by_serve:  # now and then, after it has cancelled the request
                raise TaskCancelledError
            return {"type": "http.disconnect"}

        async def take(message: Any) -> None:
            if message["type"] == "http.response.body":
                begun.set()

        # Outside of the log here, inside of it in Serve: both come to the same for what is raised by ``receive``.
        await Disconnects(api)(scope(), receive, take)

    asyncio.run(leave())
    line = told(lines)
    assert (line["status"], line["outcome"], line["code"]) == (200, "client_left", None)
    assert line["completion_tokens"] is None


def test_a_body_that_breaks_off_is_no_failure_of_the_server(
    api: FastAPI, lines: list[logging.LogRecord]
) -> None:
    async def leave() -> None:
        messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return messages.pop(0)

        async def take(message: Any) -> None:
            pass

        await api(scope(), receive, take)

    asyncio.run(leave())
    line = told(lines)
    assert (line["outcome"], line["code"]) == ("client_left", None)


def scope() -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1234),
        "server": ("test", 80),
    }


class BreakingClient(LocalClient):
    """Loses its replica in the middle of every answer."""

    async def events(self, request: AnyRequest, caller: Caller) -> AsyncGenerator[ReplicaEvent, None]:
        async for event in super().events(request, caller):
            yield event
            if event["event"] == "text":
                yield error_event(unavailable("gone", retry_after_s=1).fault)
                return


class BuggyClient(LocalClient):
    """Fails as nobody foresaw."""

    def events(self, request: AnyRequest, caller: Caller) -> AsyncGenerator[ReplicaEvent, None]:
        raise AttributeError("secret")


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [(BreakingClient, 200, "replica_unavailable"), (BuggyClient, 500, "internal_error")],
)
def test_failures_are_told_also_after_the_header(
    own: World, lines: list[logging.LogRecord], kind: type[LocalClient], status: int, code: str
) -> None:
    config = own.config()
    service, _ = load_service(config)
    watch = StoreWatch(config.store)
    transport = httpx.ASGITransport(create_api(config, kind(service), watch), raise_app_exceptions=False)

    async def one() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.post(CHAT, json=ask_body(["oak"], stream=True))

    answer = asyncio.run(one())
    watch.close()
    service.close()
    line = told(lines)
    assert (answer.status_code, line["status"]) == (status, status)
    assert (line["outcome"], line["code"]) == ("failed", code)
    assert line["request_id"] == answer.headers["x-request-id"]


@pytest.fixture
def own_loggers() -> Iterator[None]:
    """Afterwards as they were."""
    loggers = [logging.getLogger(name) for name in ("serve_app", "c2kv_core", LOGGER_NAME, "ray.serve")]
    were = [(each.handlers, each.level, each.propagate, each.disabled) for each in loggers]
    yield
    for logger, (handlers, level, propagate, disabled) in zip(loggers, were, strict=True):
        logger.handlers, logger.propagate, logger.disabled = handlers, propagate, disabled
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("access", "level", "expected"),
    [
        (True, "INFO", ["a line", "a remark"]),
        (False, "INFO", ["a remark"]),
        (True, "WARNING", []),
    ],
)
def test_own_loggers_write_to_serves_as_configured(
    own_loggers: None, access: bool, level: str, expected: list[str]
) -> None:
    keeping, serves = _Keeping(), logging.getLogger("ray.serve")
    serves.handlers = [keeping]
    serves.setLevel(level)
    log_with_serve(access=access)
    logging.getLogger(LOGGER_NAME).info("a line")
    logging.getLogger("serve_app.keys").info("a remark")
    logging.getLogger("serve_app.keys").debug("a detail")
    assert [record.getMessage() for record in keeping.records] == expected


@pytest.mark.ray
@pytest.mark.slow
def test_lines_are_in_the_log_files_of_serves_replicas(endpoint: Running) -> None:
    with httpx.Client(base_url=endpoint.url, timeout=60) as http:
        headers = {"x-request-id": "given-by-a-client"}
        answer = http.post(CHAT, json=ask_body(["oak"], stream=True, max_tokens=3), headers=headers)
        refused = http.get("/v1/documents/a-secret-id")
        odd = http.get("/v1/models", headers={"x-request-id": "two words"})
    assert answer.headers.get_list("x-request-id") == ["given-by-a-client"]
    made = refused.headers.get_list("x-request-id")
    assert len(made) == 1 and len(made[0]) > 20
    # Serve's proxy echoes whatever came; the server's own id stands before it.
    own_id = odd.headers.get_list("x-request-id")[0]
    assert "two words" not in own_id
    folder = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs/serve"

    def found() -> dict[str, dict[str, Any]]:
        texts = [line for file in folder.glob("replica_*Ingress*") for line in file.read_text().splitlines()]
        parsed = [json.loads(text[text.index("{") :]) for text in texts if '"request_id"' in text]
        return {line["request_id"]: line for line in parsed}

    wait_until(lambda: {"given-by-a-client", made[0], own_id} <= found().keys(), what="the lines")
    # Serve's own line does not say it once more.
    ingress = "".join(file.read_text() for file in folder.glob("replica_*Ingress*"))
    assert ingress.count(made[0]) == 2  # in the prefix and in the line
    line = found()["given-by-a-client"]
    assert (line["outcome"], line["completion_tokens"], line["stream"]) == ("finished", 3, True)
    assert found()[made[0]]["code"] == "document_not_found"
    for file in folder.glob("replica_*"):
        assert "a-secret-id" not in file.read_text(), file
    # What the generator's loggers say is where operators look for it, in Serve's form.
    said = [line for file in folder.glob("replica_*Generator*") for line in file.read_text().splitlines()]
    assert any(re.match(r"WARNING 20\S+ \S+ .* -- the sidecar for .* is untrained", line) for line in said)
