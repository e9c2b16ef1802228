"""Bytes to a checked request, or the error that tells the client what to change."""

import difflib
import json
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from serve_app.errors import ApiError, Fault, bad_request
from serve_app.protocol import C2KVOptions, ChatRequest, DocumentBody, DocumentRef, TextRequest

B = TypeVar("B", bound=BaseModel)

_OWN_KEYS = ("documents", "c2kv")
"""Keys that OpenAI does not have: near misses of these are typos, any other unknown key is a client's habit."""
_NEAR = 0.75
_COMPARED_KEYS = 100
_COMPARED_CHARACTERS = 100
"""Of unknown keys: likenesses are costly, and a body has room for a million keys, or for one of megabytes."""

_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "frequency_penalty": lambda value: value == 0,
    "presence_penalty": lambda value: value == 0,
    "logit_bias": lambda value: value == {},
    "tools": lambda value: value == [],
    "functions": lambda value: value == [],
    "tool_choice": lambda value: value in ("none", "auto"),
    "function_call": lambda value: value in ("none", "auto"),
    "response_format": lambda value: value == {"type": "text"},
    "modalities": lambda value: value == ["text"],
    "audio": lambda value: False,
    "suffix": lambda value: value == "",
}
"""OpenAI fields that change the answer and that this server does not have: the values that mean "off"."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, read no further than the limit.

    Raises:
        ApiError: 413.
    """
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


def parse_request(body: bytes) -> ChatRequest:
    """The chat request in a body.

    Raises:
        ApiError: 400, naming the field at fault.
    """
    return _parse(ChatRequest, body)


def parse_text_request(body: bytes) -> TextRequest:
    """The completion request in a body.

    Raises:
        ApiError: 400, naming the field at fault.
    """
    return _parse(TextRequest, body)


def _parse(kind: type[B], body: bytes) -> B:
    data = _json_object(body)
    _check_top_level(data, kind)
    return _validated(kind, data)


def parse_document(body: bytes) -> DocumentBody:
    """The document in a body.

    Raises:
        ApiError: 400, naming the field at fault.
    """
    return _validated(DocumentBody, _json_object(body))


def _validated(kind: type[B], data: dict[str, Any]) -> B:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _first_fault(kind, error.errors(include_url=False)[0]) from error


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body, parse_constant=_refuse_constant)
        # json lets halves of surrogate pairs pass; no tokenizer and no answer can hold one.
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        message = "expected text in the JSON body, got half a surrogate pair (\\ud800 to \\udfff)"
        raise bad_request(message, code="invalid_json") from error
    except ValueError as error:
        raise bad_request(f"expected a JSON object as body: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise bad_request("expected a JSON object as body: nested too deeply", code="invalid_json") from error
    if not isinstance(data, dict):
        raise bad_request(f"expected a JSON object as body, got {type(data).__name__}", code="invalid_json")
    return data


def _refuse_constant(name: str) -> None:
    # Python's reader takes NaN and Infinity, which are no JSON.
    raise ValueError(f"{name} is no JSON number")


def _check_top_level(data: dict[str, Any], kind: type[BaseModel]) -> None:
    for name, is_neutral in _NEUTRAL.items():
        if data.get(name) is not None and not is_neutral(data[name]):
            raise bad_request(
                f"{name} is not supported by this server; leave it out",
                code="unsupported_parameter",
                param=name,
            )
    for name in islice((name for name in data if name not in kind.model_fields), _COMPARED_KEYS):
        near = difflib.get_close_matches(name[:_COMPARED_CHARACTERS], _OWN_KEYS, n=1, cutoff=_NEAR)
        if near:
            raise _unknown(name, name, near)


def _first_fault(kind: type[BaseModel], fault: ErrorDetails) -> ApiError:
    param = ".".join(str(step)[:_COMPARED_CHARACTERS] for step in fault["loc"])
    if fault["type"] == "extra_forbidden":
        last = str(fault["loc"][-1])[:_COMPARED_CHARACTERS]
        inner: dict[Any, type[BaseModel]] = {"c2kv": C2KVOptions, "documents": DocumentRef}
        owner = inner.get(fault["loc"][0], kind) if len(fault["loc"]) > 1 else kind
        return _unknown(param, last, difflib.get_close_matches(last, owner.model_fields, n=1, cutoff=0.0))
    if fault["type"] == "missing":
        return bad_request(f"missing {param!r}, which is required", param=param)
    # pydantic puts "Value error, " before our own messages.
    text = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "model_type":  # which would name a class of ours
        is_document = fault["ctx"]["class_name"] == DocumentRef.__name__
        text = "expected an object" + (" with `id` or `text`" if is_document else "")
    message = f"{param}: {text[0].lower()}{text[1:]}" if param else text
    if not isinstance(fault["input"], dict | list | BaseModel):
        message += f", got {fault['input']!r:.100}"
    return bad_request(message, param=param or None)


def _unknown(param: str, name: str, near: list[str]) -> ApiError:
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return bad_request(f"unknown key {name!r} at {param!r}{hint}", code="unknown_parameter", param=param)
