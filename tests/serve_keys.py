"""Keys: who asks, what they may do, how much, and that nobody sees another's documents."""

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI

from c2kv_core.errors import ConfigError
from serve_app.access_log import Access
from serve_app.caller import Caller
from serve_app.completion import CompletionForm
from serve_app.errors import ApiError
from serve_app.keys import KEYS_VARIABLE, Grant, KeyRing, hash_key, new_key
from serve_app.loading import load_service
from serve_app.quotas import Quotas
from serve_app.request_body import parse_request
from serve_app.responses import Account, streamed
from tests import serve_local
from tests.serve_local import local_api
from tests.serve_support import World, ask_body, make_world, wait_until

pytest_plugins = ["tests.serve_support"]

ANYBODY = Caller(name="anybody", namespace="default")
ALICE, BOB, READER = ("c2kv-" + name * 8 for name in ("alice", "bob", "reader"))
ENTRIES: list[dict[str, Any]] = [
    {
        "name": "alice",
        "sha256": hash_key(ALICE),
        "namespace": "a",
        "shared": ["default"],
        "roles": ["query", "write"],
    },
    {"name": "bob", "sha256": hash_key(BOB), "namespace": "b", "roles": ["query", "write"]},
    {"name": "reader", "sha256": hash_key(READER), "namespace": "a", "requests_per_minute": 5},
]


def write_keys(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text(yaml.safe_dump({"keys": entries}))
    return path


def ring(path: Path | None, *, allow_anonymous: bool = False) -> KeyRing:
    return KeyRing(path=None if path is None else str(path), anybody=ANYBODY, allow_anonymous=allow_anonymous)


def refusal(keys: KeyRing, authorization: str | None, host: str | None = "10.0.0.1") -> tuple[int, str]:
    with pytest.raises(ApiError) as caught:
        keys.grant(authorization, host)
    return caught.value.fault.status, caught.value.fault.code


def test_a_key_says_who_asks(tmp_path: Path) -> None:
    keys = ring(write_keys(tmp_path / "keys.yaml", ENTRIES))
    caller = keys.grant(f"Bearer {ALICE}", "10.0.0.1").caller
    assert (caller.name, caller.readable, caller.roles) == ("alice", ("a", "default"), {"query", "write"})
    assert keys.grant(f"bearer  {BOB} ", None).caller.namespace == "b"
    for wrong in (
        None,
        "",
        ALICE,
        f"Basic {ALICE}",
        "Bearer",
        "Bearer ",
        f"Bearer {ALICE}x",
        "Bearer \udcff",
    ):
        assert refusal(keys, wrong, "127.0.0.1") == (401, "invalid_api_key"), wrong


def test_without_keys_only_this_machine_is_answered() -> None:
    keys = ring(None)
    assert keys.grant(None, "127.0.0.1") == Grant(caller=ANYBODY) == keys.grant("Bearer any", "::1")
    for host in ("10.0.0.1", "example.org", None, ""):
        assert refusal(keys, None, host) == (403, "keys_required")
    assert ring(None, allow_anonymous=True).grant(None, "10.0.0.1").caller == ANYBODY


def test_without_keys_a_page_of_another_site_is_not_answered() -> None:
    keys = ring(None)
    for own in (None, "localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000"):
        assert keys.grant(None, "127.0.0.1", own) == Grant(caller=ANYBODY), own
    for other in (
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "[::1",
        "localhost@evil.example",
    ):
        with pytest.raises(ApiError, match="asked as localhost"):
            keys.grant(None, "127.0.0.1", other)
    assert ring(None, allow_anonymous=True).grant(None, "127.0.0.1", "rag.example").caller == ANYBODY


def test_anonymous_requests_beside_keys_when_allowed(tmp_path: Path) -> None:
    keys = ring(write_keys(tmp_path / "keys.yaml", ENTRIES), allow_anonymous=True)
    assert keys.grant(None, "10.0.0.1").caller == ANYBODY
    assert refusal(keys, "Bearer wrong") == (401, "invalid_api_key")


def test_keys_come_and_go_without_a_restart(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.yaml", ENTRIES[:1])
    keys = ring(path)
    assert refusal(keys, f"Bearer {BOB}") == (401, "invalid_api_key")
    write_keys(path, ENTRIES[1:])
    os.utime(path, ns=(1, time.time_ns() + 10**9))

    def swapped() -> bool:
        try:
            return keys.grant(f"Bearer {BOB}", None).caller.name == "bob"
        except ApiError:
            return False

    wait_until(swapped, what="the new keys")
    assert refusal(keys, f"Bearer {ALICE}") == (401, "invalid_api_key")
    path.write_text("keys: [")
    os.utime(path, ns=(1, time.time_ns() + 2 * 10**9))
    time.sleep(1.1)
    assert keys.grant(f"Bearer {BOB}", None).caller.name == "bob"
    path.unlink()
    time.sleep(1.1)
    assert keys.grant(f"Bearer {BOB}", None).caller.name == "bob"


def test_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, json.dumps({"keys": ENTRIES}))
    assert ring(None).grant(f"Bearer {ALICE}", None).caller.name == "alice"
    assert refusal(ring(None), None, "127.0.0.1") == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "expected a mapping"),
        ("keys: [", "expected YAML"),
        ("keys: [{name: a, sha256: x, namespace: a}]", "sha256"),
        (f"keys: [{{name: a, sha256: {'a' * 64}, namespace: A/B}}]", "namespace"),
        (f"keys: [{{name: a, sha256: {'a' * 64}, namespace: ..}}]", "namespace"),
        (f"keys: [{{name: a, sha256: {'a' * 64}, namespace: a, shared: [Handbook]}}]", "shared.0"),
        (
            yaml.safe_dump({"keys": ENTRIES[:1]}) + yaml.safe_dump({"keys": ENTRIES[1:]}),
            "one list 'keys', got 2",
        ),
        (
            f"keys: [{{name: a, sha256: {'a' * 64}, namespace: a, role: query}}]",
            "did you mean 'keys.0.roles'",
        ),
        (yaml.safe_dump({"keys": [ENTRIES[0], {**ENTRIES[1], "name": "alice"}]}), "each name once"),
        (yaml.safe_dump({"keys": [ENTRIES[0], {**ENTRIES[0], "name": "other"}]}), "each sha256 once"),
    ],
)
def test_a_key_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        ring(path)


def test_new_keys_are_long_and_their_hash_is_theirs() -> None:
    (first, digest), (second, _) = new_key(), new_key()
    assert first != second and len(first) > 40 and hash_key(first) == digest


def test_quotas_refill_steadily() -> None:
    now = [0.0]
    quotas = Quotas(clock=lambda: now[0])
    grant = Grant(caller=ANYBODY, requests_per_minute=2, tokens_per_minute=100)
    quotas.begin(grant)
    quotas.begin(grant)
    with pytest.raises(ApiError) as caught:
        quotas.begin(grant)
    fault = caught.value.fault
    assert (fault.status, fault.code, fault.retry_after_s) == (429, "rate_limit_exceeded", 30)
    now[0] = 30.0
    quotas.begin(grant)
    quotas.used(grant, 250)  # overdraws
    now[0] = 90.0
    with pytest.raises(ApiError, match="100 tokens a minute"):
        quotas.begin(grant)
    now[0] = 122.0
    quotas.begin(grant)
    quotas.begin(Grant(caller=Caller(name="other", namespace="a"), requests_per_minute=1))
    for _ in range(100):
        quotas.begin(Grant(caller=ANYBODY))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def api(own: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    keys = write_keys(tmp_path_factory.mktemp("ring") / "keys.yaml", ENTRIES)
    with local_api(own.config(keys_file=str(keys))) as made:
        yield made


def send(api: FastAPI, key: str | None, method: str, path: str, body: Any = None) -> httpx.Response:
    return serve_local.send(api, method, path, body, key=key)


def test_tenants_see_their_own_and_what_is_shared_with_them(api: FastAPI) -> None:
    chat = "/v1/chat/completions"
    for key, text in ((ALICE, "Alice's elm is old."), (BOB, "Bob's elm is young, and much taller.")):
        assert send(api, key, "PUT", "/v1/documents/elm", {"text": text}).status_code == 200
    hers = send(api, ALICE, "POST", chat, ask_body(["elm", "oak"])).json()
    given = send(api, ALICE, "POST", chat, ask_body([{"text": "Alice's elm is old."}, "oak"])).json()
    assert hers["choices"] == given["choices"]
    assert [d["id"] for d in hers["c2kv"]["documents"]] == ["elm", "oak"]
    status = send(api, ALICE, "GET", "/v1/documents/oak").json()
    assert status["namespace"] == "default"
    # What is shared can be read, not changed.
    assert send(api, ALICE, "DELETE", "/v1/documents/oak").status_code == 404
    his = send(api, BOB, "GET", "/v1/documents/elm").json()
    assert (
        his["namespace"] == "b"
        and his["content_hash"] != send(api, ALICE, "GET", "/v1/documents/elm").json()["content_hash"]
    )
    only_hers = send(api, ALICE, "PUT", "/v1/documents/secret", {"text": "A secret."})
    assert only_hers.status_code == 200
    for doc_id in ("secret", "oak", "never-was"):
        for method, path, body in (
            ("GET", f"/v1/documents/{doc_id}", None),
            ("DELETE", f"/v1/documents/{doc_id}", None),
            ("POST", chat, ask_body([doc_id])),
        ):
            refused = send(api, BOB, method, path, body)
            assert refused.status_code == 404
            assert refused.json()["error"]["message"] == f"no document {doc_id!r}"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/documents/elm"),
        ("PUT", "/v1/documents/x"),
    ],
)
def test_without_a_key_nothing_is_told(api: FastAPI, method: str, path: str) -> None:
    for key in (None, "c2kv-wrong"):
        refused = send(api, key, method, path, {"text": "x"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert send(api, None, "GET", "/healthz").status_code == 200


def test_roles_and_quotas_of_a_key(api: FastAPI) -> None:
    refused = send(api, READER, "PUT", "/v1/documents/x", {"text": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "role_required")
    codes = [send(api, READER, "GET", "/v1/models").status_code for _ in range(6)]
    assert codes == [200] * 5 + [429]
    last = send(api, READER, "GET", "/v1/models")
    assert last.json()["error"]["type"] == "rate_limit_error" and int(last.headers["retry-after"]) >= 1


def test_no_request_can_name_a_namespace(api: FastAPI) -> None:
    body = {**ask_body(["secret"]), "namespace": "a", "c2kv": {"namespace": "a"}}
    assert send(api, BOB, "POST", "/v1/chat/completions", body).status_code == 400
    body = {**ask_body(["secret"]), "namespace": "a", "user": "alice"}
    assert send(api, BOB, "POST", "/v1/chat/completions", body).status_code == 404


@pytest.mark.parametrize("until", ["the first text", "an error"])
def test_an_answer_that_is_given_up_half_way_counts_for_what_it_took(own: World, until: str) -> None:
    service, _ = load_service(own.config(max_new_tokens_limit=4000))
    quotas, grant = Quotas(clock=lambda: 0.0), Grant(caller=ANYBODY, tokens_per_minute=10)
    account = Account(access=Access(request_id="", method="POST"), grant=grant, quotas=quotas)
    deadline_ms = None if until == "the first text" else 1000
    body = ask_body(["oak"], max_tokens=3500, ignore_eos=True, stream=True, c2kv={"deadline_ms": deadline_ms})

    async def give_up() -> None:
        events = service.answer(parse_request(json.dumps(body).encode()))
        response = await streamed(CompletionForm(model="tiny"), events, account)
        async for chunk in response.body_iterator:  # type: ignore[attr-defined]
            if until == "the first text" and b'"content": ""' not in chunk:
                break
        await response.body_iterator.aclose()  # type: ignore[attr-defined]

    quotas.begin(grant)
    asyncio.run(give_up())
    assert account.access.usage is None
    with pytest.raises(ApiError, match="10 tokens a minute"):
        quotas.begin(grant)
    service.close()


def test_documents_that_are_put_count_as_tokens(own: World, tmp_path: Path) -> None:
    entry = {**ENTRIES[0], "tokens_per_minute": 20}
    with local_api(own.config(keys_file=str(write_keys(tmp_path / "keys.yaml", [entry])))) as api:
        long = {"text": "An elm of many words. " * 8}
        assert send(api, ALICE, "PUT", "/v1/documents/elm", long).status_code == 200
        refused = send(api, ALICE, "PUT", "/v1/documents/elm-2", long)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert send(api, ALICE, "GET", "/v1/documents/elm-2").status_code == 429
