"""The OpenAPI page is true: requests made from it, valid and not, are answered as it says, and never by a failure."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
import yaml
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error, positive_data_acceptance
from schemathesis.generation.modes import GenerationMode

from serve_app.api import create_api
from serve_app.config import ServeConfig
from serve_app.keys import hash_key
from tests.serve_local import local_api
from tests.serve_support import World, make_world

pytest_plugins = ["tests.serve_support"]

KEY = "c2kv-fuzz"
EXAMPLES = 40
"""Of each route, beside those that cover every limit of its schema."""
HONEST = (503, 504)
"""Statuses above 500 that say what is wrong and pass."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(scope="module")
def api(own: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    keys = tmp_path_factory.mktemp("ring") / "keys.yaml"
    entry = {"name": "fuzz", "sha256": hash_key(KEY), "namespace": "default", "roles": ["query", "write"]}
    keys.write_text(yaml.safe_dump({"keys": [entry]}))
    with local_api(own.config(keys_file=str(keys), max_request_bytes=64_000, commit_gather_s=0.0)) as made:
        served.api = made
        yield made
        served.api = None


class _Served:
    """The application that the fixture makes; tests are collected from the page before there is one."""

    def __init__(self) -> None:
        self.api: FastAPI | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert self.api is not None, "the fixture sets it"
        await self.api(scope, receive, send)


served = _Served()
# The page is the same whatever is configured and whoever answers.
nobody: Any = None
schema = schemathesis.openapi.from_dict(create_api(ServeConfig(store="anywhere"), nobody, nobody).openapi())
schema.app = served
schema.config.generation.update(deterministic=True)


def within_reach(body: Any) -> Any:
    """A valid body as it is, but for what only the server knows: its model, its documents and its limits."""
    if not isinstance(body, dict):
        return body
    known = {"max_tokens": 3, "max_completion_tokens": None, "model": "tiny"}
    documents = [
        {"id": ["oak", "birch"][index % 2]} if isinstance(one, dict) and one.get("id") else one
        for index, one in enumerate(body.get("documents") or ())
    ]
    return {**body, **known, "documents": documents[:3]}


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_requests_made_from_the_page_are_answered_as_it_says(api: FastAPI, case: schemathesis.Case) -> None:
    if case.path.endswith("completions") and case.meta.generation.mode == GenerationMode.POSITIVE:
        case.body = within_reach(case.body)
    response = case.call(headers={"Authorization": f"Bearer {KEY}"})
    # What is consistent is more than a schema says, so not all that it allows is accepted.
    excluded = [positive_data_acceptance]
    if response.status_code in HONEST:
        excluded.append(not_a_server_error)
    case.validate_response(response, excluded_checks=excluded, headers={"Authorization": f"Bearer {KEY}"})
    assert len(response.headers["x-request-id"]) == 1
