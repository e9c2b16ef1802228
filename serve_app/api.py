"""The HTTP API, over whatever makes the answers."""

import re
import time
from typing import Any

from fastapi import FastAPI, Request, Security
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPBearer
from starlette.routing import Route
from starlette.types import ASGIApp

from serve_app.access_log import AccessLog, access_of
from serve_app.api_schema import (
    ChatCompletion,
    ModelList,
    TextCompletion,
    body,
    components,
    health_responses,
    responses,
)
from serve_app.caller import Role
from serve_app.completion import CompletionForm
from serve_app.config import ServeConfig
from serve_app.document_service import DocumentDeleted, DocumentStatus
from serve_app.error_handlers import add_error_handlers
from serve_app.errors import ApiError, Fault
from serve_app.generator_client import GeneratorClient
from serve_app.keys import Grant, key_ring
from serve_app.protocol import AnyRequest, ChatRequest, DocumentBody, TextRequest
from serve_app.quotas import Quotas
from serve_app.request_body import parse_document, parse_request, parse_text_request, read_body
from serve_app.request_limits import check_limits
from serve_app.responses import Account, Form, streamed, whole
from serve_app.store_watch import StoreWatch
from serve_app.text_completion import TextForm

_DOCUMENT = "/v1/documents/{doc_id:path}"
_KEYED = [Security(HTTPBearer(auto_error=False, description="A key of the key file."))]
"""Only for the OpenAPI page: ``Doorkeeper`` decides."""


class Doorkeeper:
    """Lets requests in: keys, roles, quotas."""

    def __init__(self, config: ServeConfig) -> None:
        self._keys = key_ring(config)
        self.quotas = Quotas()

    def admit(self, request: Request, role: Role) -> Grant:
        """Who sends a request that needs a role.

        Raises:
            ApiError: 401, 403 or 429.
        """
        host = request.client.host if request.client is not None else None
        grant = self._keys.grant(request.headers.get("authorization"), host, request.headers.get("host"))
        access_of(request).caller = grant.caller
        if role not in grant.caller.roles:
            message = f"this key does not have the role {role!r}; ask for one that does"
            raise ApiError(Fault(status=403, code="role_required", message=message))
        self.quotas.begin(grant)
        return grant

    def open_account(self, request: Request) -> Account:
        """Where the answer to a question is entered.

        Raises:
            ApiError: as ``admit``.
        """
        grant = self.admit(request, "query")
        return Account(access=access_of(request), grant=grant, quotas=self.quotas)


class Api(FastAPI):
    """Routes within the access log, which is outermost so that it sees every response."""

    ids_echoed_outside = False

    def openapi(self) -> dict[str, Any]:
        """See FastAPI."""
        if self.openapi_schema is None:
            page = super().openapi()
            page["components"]["schemas"] = components()
            for operations in page["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)  # FastAPI's; here they are 400
        return super().openapi()

    def build_middleware_stack(self) -> ASGIApp:
        """See FastAPI."""
        return AccessLog(super().build_middleware_stack(), echoed_outside=self.ids_echoed_outside)


def create_api(
    config: ServeConfig, client: GeneratorClient, watch: StoreWatch, *, ids_echoed_outside: bool = False
) -> FastAPI:
    """The application's routes.

    Args:
        config: of the application.
        client: makes the answers.
        watch: knows whether the store answers.
        ids_echoed_outside: see ``AccessLog``.

    Raises:
        ConfigError: a key file that cannot be read.
    """
    api = Api(title="C2KV", docs_url=None, redoc_url=None)
    api.ids_echoed_outside = ids_echoed_outside
    add_error_handlers(api)
    door = Doorkeeper(config)
    _add_answers(api, config, client, door)
    _add_documents(api, config, client, door)
    _add_states(api, config, client, door, watch)
    return api


def _add_answers(api: FastAPI, config: ServeConfig, client: GeneratorClient, door: Doorkeeper) -> None:
    async def answer(request: AnyRequest, account: Account, form: Form) -> Response:
        account.access.asked(request)
        _check_model(request, config)
        check_limits(request, config)
        events = client.events(request, account.grant.caller)
        return await (streamed if request.stream else whole)(form, events, account)

    errors = (400, 404, 413, 503, 504)

    @api.post(
        "/v1/chat/completions",
        openapi_extra=body(ChatRequest),
        responses=responses(ChatCompletion, *errors, is_streamed=True),
        dependencies=_KEYED,
    )
    async def chat_completions(request: Request) -> Response:
        account = door.open_account(request)
        chat = parse_request(await read_body(request, config.max_request_bytes))
        form = CompletionForm(
            model=config.model_id, wants_usage_chunk=chat.wants_usage_chunk, wants_logprobs=chat.logprobs
        )
        return await answer(chat, account, form)

    @api.post(
        "/v1/completions",
        openapi_extra=body(TextRequest),
        responses=responses(TextCompletion, *errors, is_streamed=True),
        dependencies=_KEYED,
    )
    async def completions(request: Request) -> Response:
        account = door.open_account(request)
        text = parse_text_request(await read_body(request, config.max_request_bytes))
        form = TextForm(
            model=config.model_id,
            wants_usage_chunk=text.wants_usage_chunk,
            wants_logprobs=text.logprobs is not None,
        )
        return await answer(text, account, form)


def _add_documents(api: FastAPI, config: ServeConfig, client: GeneratorClient, door: Doorkeeper) -> None:
    @api.put(
        _DOCUMENT,
        openapi_extra=body(DocumentBody),
        responses=responses(DocumentStatus, 400, 413, 503, 504),
        dependencies=_KEYED,
    )
    async def put_document(request: Request, doc_id: str) -> Response:
        grant = door.admit(request, "write")
        document = parse_document(await read_body(request, config.max_request_bytes))
        status = await client.document("put", grant.caller, doc_id, document)
        # Also of one that was there already: whether it was is known only afterwards, and looking costs something too.
        door.quotas.used(grant, status["source_tokens"])
        return JSONResponse(status)

    @api.get(_DOCUMENT, responses=responses(DocumentStatus, 400, 404, 503), dependencies=_KEYED)
    async def get_document(request: Request, doc_id: str) -> Response:
        grant = door.admit(request, "query")
        return JSONResponse(await client.document("get", grant.caller, doc_id))

    @api.delete(_DOCUMENT, responses=responses(DocumentDeleted, 400, 404, 503), dependencies=_KEYED)
    async def delete_document(request: Request, doc_id: str) -> Response:
        grant = door.admit(request, "write")
        return JSONResponse(await client.document("delete", grant.caller, doc_id))

    for route in api.routes:
        if isinstance(route, Route) and route.path == _DOCUMENT:
            # Ids may hold line breaks, and none is empty. Not by a convertor of our own, which Serve's proxy, which
            # knows routes by their templates, would not have.
            pattern = route.path_regex.pattern.replace("(?P<doc_id>.*)", "(?P<doc_id>.+)")
            route.path_regex = re.compile(pattern, re.DOTALL)


def _add_states(
    api: FastAPI, config: ServeConfig, client: GeneratorClient, door: Doorkeeper, watch: StoreWatch
) -> None:
    started = int(time.time())

    @api.get("/v1/models", responses=responses(ModelList), response_model=None, dependencies=_KEYED)
    async def models(request: Request) -> dict[str, Any]:
        door.admit(request, "query")
        model = {"id": config.model_id, "object": "model", "created": started, "owned_by": "c2kv"}
        return {"object": "list", "data": [model]}

    @api.get("/healthz", responses=health_responses())
    async def healthz() -> Response:
        reasons = await client.faults()
        if (fault := watch.fault()) is not None:
            reasons = [*reasons, fault]
        health = {"status": "unhealthy" if reasons else "ok", "reasons": reasons}
        return JSONResponse(health, status_code=503 if reasons else 200)


def _check_model(request: AnyRequest, config: ServeConfig) -> None:
    if request.model not in (None, config.model_id, config.model):
        message = f"expected model {config.model_id!r}, the one served here, got {request.model!r}"
        raise ApiError(Fault(status=404, code="model_not_found", message=message, param="model"))
