"""What the OpenAPI page says: the bodies of requests and answers, and the errors of each route.

Routes read their bodies themselves, because they bound and check them in their own way; so the schemas are put together
here, from the types that are used there.
"""

from typing import Any, Literal

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from serve_app.answers import C2KVBlock, FinishReason, Usage
from serve_app.document_service import DocumentDeleted, DocumentStatus
from serve_app.events import TokenLogprobs
from serve_app.protocol import ChatRequest, DocumentBody, TextRequest

_REF = "#/components/schemas/{model}"


class ErrorFields(TypedDict):
    """What went wrong."""

    message: str
    """For people."""
    type: str
    """OpenAI's coarse class."""
    param: str | None
    """The part of the request at fault."""
    code: str
    """Stable, for programs."""


class ErrorBody(TypedDict):
    """Body of every error."""

    error: ErrorFields


class ChatLogprobs(TypedDict):
    """Of a chat answer, token by token."""

    content: list[TokenLogprobs]
    refusal: None


class AssistantMessage(TypedDict):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """The only choice."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class TextLogprobs(TypedDict):
    """Of a completion, in columns."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(TypedDict):
    """The only choice."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class _Answer(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    c2kv: C2KVBlock


class ChatCompletion(_Answer):
    """An answer to ``/v1/chat/completions`` that is not streamed."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(_Answer):
    """An answer to ``/v1/completions`` that is not streamed."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ServedModel(TypedDict):
    """The model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(TypedDict):
    """Models served here: one."""

    object: Literal["list"]
    data: list[ServedModel]


class Health(TypedDict):
    """Whether requests can be answered now."""

    status: Literal["ok", "unhealthy"]
    reasons: list[str]
    """Why not."""


_TYPES: tuple[Any, ...] = (
    ChatRequest,
    TextRequest,
    DocumentBody,
    ChatCompletion,
    TextCompletion,
    DocumentStatus,
    DocumentDeleted,
    ModelList,
    Health,
    ErrorBody,
)

_ERRORS = {
    400: "The request makes no sense, or its context exceeds the model.",
    401: "No valid key.",
    403: "The key does not have the role, or the server has no keys and the client is elsewhere.",
    404: "Unknown document or model.",
    413: "Too large.",
    429: "The key's quota is used up.",
    500: "The server failed.",
    503: "No capacity now, the store does not answer, or the replica is gone.",
    504: "The deadline passed.",
}
_EVENTS = (
    "OpenAI's chunks, one an event, the last `[DONE]`; or one ErrorBody at the end of an answer that failed."
)
_HEADERS = {"x-request-id": {"description": "Id of the request.", "schema": {"type": "string"}}}
_RETRY = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
_WITH_RETRY = (429, 503)


def components() -> dict[str, Any]:
    """All schemas by name."""
    inputs: list[tuple[str, Any, TypeAdapter[Any]]] = [
        (kind.__name__, "validation", TypeAdapter(kind)) for kind in _TYPES
    ]
    _, defined = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    return dict(defined.get("$defs", {}))


def body(kind: type) -> dict[str, Any]:
    """The body of a request, as ``openapi_extra``."""
    return {"requestBody": {"required": True, "content": _json(kind)}}


def responses(ok: type, *errors: int, is_streamed: bool = False) -> dict[int | str, dict[str, Any]]:
    """What a route answers.

    Args:
        ok: body of status 200.
        errors: other statuses, beside those of keys and of the server's own failures.
        is_streamed: whether 200 may also be server-sent events.
    """
    content = _json(ok)
    if is_streamed:
        content["text/event-stream"] = {"schema": {"description": _EVENTS}}
    told: dict[int | str, dict[str, Any]] = {
        200: {"description": "Well.", "headers": _HEADERS, "content": content}
    }
    for status in sorted({401, 403, 429, 500, *errors}):
        headers = {**_HEADERS, **(_RETRY if status in _WITH_RETRY else {})}
        told[status] = {"description": _ERRORS[status], "headers": headers, "content": _json(ErrorBody)}
    return told


def health_responses() -> dict[int | str, dict[str, Any]]:
    """What ``/healthz`` answers, to everybody."""
    told: dict[int | str, dict[str, Any]] = {}
    for status, description in ((200, "Well."), (503, "Requests cannot be answered, or not all.")):
        told[status] = {"description": description, "headers": _HEADERS, "content": _json(Health)}
    return told


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=kind.__name__)}}}
