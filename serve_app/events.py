"""What a replica streams to the ingress: plain dicts, told apart by ``event``."""

from typing import Any, Literal

from typing_extensions import TypedDict

from serve_app.answers import C2KVBlock, FinishReason, Usage
from serve_app.errors import Fault


class StartEvent(TypedDict):
    """Always first, unless the request failed: from here on status 200 is right."""

    event: Literal["start"]
    c2kv: C2KVBlock
    """Without the total time."""
    prompt_tokens: int
    """As ``usage`` has them at the end."""


class Likeliest(TypedDict):
    """A token that might have been drawn, in OpenAI's form."""

    token: str
    logprob: float
    bytes: list[int]
    """UTF-8 of the token."""


class TokenLogprobs(Likeliest):
    """A drawn token."""

    top_logprobs: list[Likeliest]


class TextEvent(TypedDict):
    """More of the answer."""

    event: Literal["text"]
    text: str
    logprobs: list[TokenLogprobs]
    """Of the tokens behind it; empty where they were not asked for."""
    completion_tokens: int
    """Drawn so far."""


class EndEvent(TypedDict):
    """Last, of an answer that is complete."""

    event: Literal["end"]
    finish_reason: FinishReason
    usage: Usage
    c2kv: C2KVBlock


class ErrorEvent(TypedDict):
    """Last, of a request that failed."""

    event: Literal["error"]
    fault: dict[str, Any]
    """Fields of ``Fault``."""


class DoneEvent(TypedDict):
    """The result of a request that is no answer."""

    event: Literal["done"]
    result: dict[str, Any]


Reply = DoneEvent | ErrorEvent
"""What becomes of a request that is no answer."""

ReplicaEvent = StartEvent | TextEvent | EndEvent | ErrorEvent


def error_event(fault: Fault) -> ErrorEvent:
    """The event that carries a fault."""
    # Not ``asdict``: a fault is flat, and its properties are no part of it.
    return ErrorEvent(event="error", fault=dict(vars(fault)))


def fault_in(event: ErrorEvent) -> Fault:
    """The fault in an event."""
    return Fault(**event["fault"])
