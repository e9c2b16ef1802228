"""The layout of a request: system message, documents, then all other messages as ordinary tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from c2kv_core.text import Message
from serve_app.errors import bad_request
from serve_app.protocol import ChatMessage


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages by their place around the documents."""

    system: str | None
    """The first message, if it is a system message; None leaves the template its default."""
    after_documents: tuple[Message, ...]
    """All other messages in order, at least one."""


def lay_out(messages: Sequence[ChatMessage]) -> Conversation:
    """Put the system message before the documents, the rest behind them.

    Raises:
        ApiError: nothing but a system message.
    """
    plain = [_plain(message) for message in messages]
    system = None
    if plain[0]["role"] == "system":
        system = plain[0]["content"]
        plain = plain[1:]
    if not plain:
        raise bad_request("expected a user message after the system message, got none", param="messages")
    return Conversation(system=system, after_documents=tuple(plain))


def _plain(message: ChatMessage) -> Message:
    role = "system" if message.role == "developer" else message.role
    return Message(role=role, content=message.content)
