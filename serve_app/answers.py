"""What is told about an answer: the ``c2kv`` block and OpenAI's ``usage``."""

from typing import Literal, NotRequired

# pydantic describes the other one only from Python 3.12 on.
from typing_extensions import TypedDict

FinishReason = Literal["stop", "length"]


class DocumentReport(TypedDict):
    """How one document of the request was served."""

    id: str | None
    """Null for a document given in full."""
    index: int
    """Its place in the request, from 0."""
    tier: str
    """``memory``, ``store``, ``extracted`` (compressed for this request), ``text`` (ordinary tokens) or ``skipped``."""
    ratio: int | None
    """Source tokens per slot; null where it was not placed as slots."""
    slots: int
    """0 where it was not placed as slots."""
    source_tokens: int
    """Positions it takes in the context, its turn included."""
    bytes: int
    """Bytes of its keys and values: of the slots as stored, or of ordinary tokens as computed."""
    fallback_reason: str | None
    """Why its stored slots were not used; null where nothing went wrong."""


class Timings(TypedDict):
    """Milliseconds. All but the last two count only this request's own work, not others' turns in between."""

    queue_ms: float
    """Waiting in the replica for a place among the running requests."""
    fetch_ms: float
    """Looking documents up and reading them from memory or the store, and cutting up those given in full."""
    verify_ms: float
    """Checking what came from the store; a local store reads the disk while it checks, since files are mapped."""
    extract_ms: float
    """Compressing documents given in full or missing from the store."""
    compose_ms: float
    """Placing documents: rotation and concatenation, the system message and text documents prefilled."""
    first_token_ms: float
    """From arrival in the replica to the first answer token."""
    total_ms: NotRequired[float]
    """From arrival in the replica to the last answer token."""


class C2KVBlock(TypedDict):
    """The ``c2kv`` block of an answer."""

    ratio: int
    """Source tokens per slot of the served sidecar."""
    sidecar: Literal["trained", "untrained"]
    fingerprint: str
    """Of the identity under which documents are read."""
    documents: list[DocumentReport]
    """In the order of the request."""
    timings: Timings


class PromptTokensDetails(TypedDict):
    """OpenAI's."""

    cached_tokens: int
    """Source tokens of documents whose slots came from memory or the store."""


class Usage(TypedDict):
    """OpenAI's ``usage``, in source tokens."""

    prompt_tokens: int
    """System message, documents (source tokens, not slots) and question."""
    completion_tokens: int
    """Tokens drawn, without the one that ends the answer."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(*, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> Usage:
    """Usage from its parts."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )
