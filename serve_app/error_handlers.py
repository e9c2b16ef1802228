"""Errors of routing and of the routes in OpenAI's form."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from serve_app.errors import INTERNAL, ApiError, Fault, bad_request


def add_error_handlers(api: FastAPI) -> None:
    """Every error leaves as JSON with a stable code."""

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
