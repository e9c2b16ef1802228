"""Errors of routing and of the routes in OpenAI's form."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from serve_app.access_log import access_of
from serve_app.errors import INTERNAL, ApiError, Fault, bad_request

logger = logging.getLogger(__name__)

_NO_LIST = "no list of documents is given; /v1/documents/{id} is one of them"
_HINTS = {
    "/v1/documents": _NO_LIST,
    "/v1/documents/": _NO_LIST,
    "/metrics": "not here, but on each node's Prometheus port, through Ray; `c2kv serve` prints its address and takes "
    "--metrics-port",
}
"""What else than "not found" is to be said of paths that do not exist."""


def add_error_handlers(api: FastAPI) -> None:
    """Every error leaves as JSON with a stable code."""

    async def own(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _error_response(request, error.fault)

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return _error_response(request, bad_request(f"{place}: {first['msg']}", param=place).fault)

    async def routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        message = f"{request.method} {path}: {_HINTS.get(path, error.detail)}"
        response = _error_response(request, Fault(status=error.status_code, code=code, message=message))
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join(sorted(_methods(request)))
        return response

    async def client_left(request: Request, error: Exception) -> Response:
        access_of(request).body_broke_off = True
        return Response(status_code=400)  # to nobody

    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("request %s failed", access_of(request).request_id, exc_info=error)
        return _error_response(request, INTERNAL)

    api.add_exception_handler(500, unexpected)
    api.add_exception_handler(ApiError, own)
    api.add_exception_handler(ClientDisconnect, client_left)
    api.add_exception_handler(RequestValidationError, validation)
    api.add_exception_handler(HTTPException, routing)


def _methods(request: Request) -> set[str]:
    """What can be done with the path of a request; each method of a document is a route of its own."""
    scope = request.scope
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    return {m for r in routes if r.matches(scope)[0] is not Match.NONE for m in r.methods or ()}


def _error_response(request: Request, fault: Fault) -> Response:
    access_of(request).code = fault.code
    return JSONResponse(fault.body, status_code=fault.status, headers=fault.headers)
