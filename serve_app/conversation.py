"""The layout of a request: system message, documents, then all other messages as ordinary tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from c2kv_core.text import ChatRenderer, Message
from serve_app.errors import bad_request
from serve_app.protocol import AnyRequest, ChatMessage, ChatRequest


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


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Token ids around the documents."""

    prefix_ids: tuple[int, ...]
    question_ids: tuple[int, ...]


def segments(request: AnyRequest, renderer: ChatRenderer) -> Segments:
    """What stands before and behind the documents of a request.

    Raises:
        ApiError: a chat of nothing but a system message.
        TemplateError: an order of roles that the template refuses.
    """
    if isinstance(request, ChatRequest):
        conversation = lay_out(request.messages)
        return Segments(
            prefix_ids=tuple(renderer.prefix_ids(conversation.system)),
            question_ids=tuple(renderer.question_ids(conversation.after_documents)),
        )
    prompt = renderer.answer_ids(request.prompt)
    if request.documents:
        return Segments(prefix_ids=tuple(renderer.prefix_ids(None)), question_ids=tuple(prompt))
    # Nothing before it but what the tokenizer itself puts at a beginning.
    opening = renderer.tokenizer("", add_special_tokens=True).input_ids
    return Segments(prefix_ids=(), question_ids=(*opening, *prompt))


def texts_of(request: AnyRequest) -> list[str]:
    """All text of a request but that of its documents."""
    if isinstance(request, ChatRequest):
        return [message.content for message in request.messages]
    return [request.prompt]


def _plain(message: ChatMessage) -> Message:
    role = "system" if message.role == "developer" else message.role
    return Message(role=role, content=message.content)
