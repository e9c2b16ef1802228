"""Text to token ids: chat segments, long documents in parts, answers back to text."""

from typing import TYPE_CHECKING

from c2kv_core.lazy import make_lazy

if TYPE_CHECKING:
    from c2kv_core.text.document_text import SYSTEM, content_hash, document_content
    from c2kv_core.text.rendering import RENDERING_VERSION, ChatRenderer, Message
    from c2kv_core.text.splitting import SPLITTER_VERSION, document_parts
    from c2kv_core.text.streaming import TextStream

__all__ = [
    "RENDERING_VERSION",
    "SPLITTER_VERSION",
    "SYSTEM",
    "ChatRenderer",
    "Message",
    "TextStream",
    "content_hash",
    "document_content",
    "document_parts",
]

make_lazy(
    __name__,
    {
        "SYSTEM": "document_text",
        "content_hash": "document_text",
        "document_content": "document_text",
        "RENDERING_VERSION": "rendering",
        "ChatRenderer": "rendering",
        "Message": "rendering",
        "SPLITTER_VERSION": "splitting",
        "document_parts": "splitting",
        "TextStream": "streaming",
    },
)
