"""The HTTP API, over whatever makes the answers."""

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from serve_app.completion import STREAM_END, CompletionForm, error_chunk
from serve_app.config import ServeConfig
from serve_app.errors import INTERNAL, ApiError, Fault, bad_request
from serve_app.events import ReplicaEvent, fault_in
from serve_app.generator_client import GeneratorClient
from serve_app.protocol import ChatRequest
from serve_app.request_body import parse_request

Events = AsyncGenerator[ReplicaEvent, None]


def create_api(config: ServeConfig, client: GeneratorClient) -> FastAPI:
    """The application's routes."""
    api = FastAPI(title="C2KV", docs_url=None, redoc_url=None)
    _add_error_handlers(api)
    started = int(time.time())

    @api.post("/v1/chat/completions", openapi_extra=_BODY_SCHEMA)
    async def chat_completions(request: Request) -> Response:
        chat = parse_request(await _read_body(request, config.max_request_bytes))
        _check_model(chat, config)
        form = CompletionForm(model=config.model_id, wants_usage_chunk=chat.wants_usage_chunk)
        events = client.events(chat)
        if chat.stream:
            return await _streamed(form, events)
        return await _whole(form, events)

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": config.model_id, "object": "model", "created": started, "owned_by": "c2kv"}
        return {"object": "list", "data": [model]}

    @api.get("/healthz")
    async def healthz() -> Response:
        reasons = await client.faults()
        body = {"status": "unhealthy" if reasons else "ok", "reasons": reasons}
        return JSONResponse(body, status_code=503 if reasons else 200)

    return api


_BODY_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": ChatRequest.model_json_schema()}},
    }
}


async def _read_body(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(
        Fault(
            status=413,
            code="request_too_large",
            message=f"expected a body of at most {max_bytes} bytes; store large documents and name them by id",
        )
    )
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        # Whatever the header says: a chunked body has none.
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def _check_model(chat: ChatRequest, config: ServeConfig) -> None:
    if chat.model not in (None, config.model_id, config.model):
        message = f"expected model {config.model_id!r}, the one served here, got {chat.model!r}"
        raise ApiError(Fault(status=404, code="model_not_found", message=message, param="model"))


async def _whole(form: CompletionForm, events: Events) -> Response:
    text = ""
    async with aclosing(events):
        async for event in events:
            match event["event"]:
                case "text":
                    text += event["text"]
                case "error":
                    raise ApiError(fault_in(event))
                case "end":
                    return JSONResponse(form.whole(text, event))
    raise ApiError(INTERNAL)


async def _streamed(form: CompletionForm, events: Events) -> Response:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(aclosing(events))
        # Headers wait for the first event: until then a refusal is still a status of its own.
        first = await anext(events, None)
        if first is None:
            raise ApiError(INTERNAL)
        if first["event"] == "error":
            raise ApiError(fault_in(first))
        stack.pop_all()
    return StreamingResponse(
        _chunks(form, events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


async def _chunks(form: CompletionForm, events: Events) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        yield form.first_chunk()
        try:
            async for event in events:
                match event["event"]:
                    case "text":
                        yield form.text_chunk(event["text"])
                    case "error":
                        yield error_chunk(fault_in(event))
                        return
                    case "end":
                        for chunk in form.last_chunks(event):
                            yield chunk
                        yield STREAM_END
                        return
        except ApiError as error:
            yield error_chunk(error.fault)


def _add_error_handlers(api: FastAPI) -> None:
    async def own(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _error_response(error.fault)

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return _error_response(bad_request(f"{place}: {first['msg']}", param=place).fault)

    async def routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        message = f"{request.method} {request.url.path}: {error.detail}"
        return _error_response(Fault(status=error.status_code, code=code, message=message))

    async def unexpected(request: Request, error: Exception) -> Response:
        return _error_response(INTERNAL)

    api.add_exception_handler(500, unexpected)
    api.add_exception_handler(ApiError, own)
    api.add_exception_handler(RequestValidationError, validation)
    api.add_exception_handler(HTTPException, routing)


def _error_response(fault: Fault) -> Response:
    return JSONResponse(fault.body, status_code=fault.status, headers=fault.headers)
