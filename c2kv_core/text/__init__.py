"""Text to token ids: chat segments, long documents in parts, answers back to text."""

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
