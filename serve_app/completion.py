"""OpenAI's JSON for an answer, whole or in chunks."""

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from serve_app.answers import C2KVBlock, Usage
from serve_app.errors import Fault
from serve_app.events import EndEvent, TokenLogprobs

STREAM_END = b"data: [DONE]\n\n"
"""What ends every stream that did not fail."""


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """The constant fields of one answer, whatever its kind."""

    model: str
    wants_usage_chunk: bool = False
    """Whether a stream ends with a chunk of usage (``stream_options.include_usage``)."""
    wants_logprobs: bool = False
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since the epoch."""

    def _head(self, kind: str, c2kv: C2KVBlock | None) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        if c2kv is not None:
            head["system_fingerprint"] = c2kv["fingerprint"]
        return head


@dataclass(frozen=True, kw_only=True)
class CompletionForm(AnswerForm):
    """An answer to ``/v1/chat/completions``."""

    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")

    def whole(self, text: str, logprobs: list[TokenLogprobs], end: EndEvent) -> dict[str, Any]:
        """The answer as one ``chat.completion``."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(logprobs),
            "finish_reason": end["finish_reason"],
        }
        return {
            **self._head("chat.completion", end["c2kv"]),
            "choices": [choice],
            "usage": end["usage"],
            "c2kv": end["c2kv"],
        }

    def first_chunk(self) -> bytes:
        """The chunk that opens a stream."""
        return self._chunk({"role": "assistant", "content": ""})

    def text_chunk(self, text: str, logprobs: list[TokenLogprobs]) -> bytes:
        """A chunk with more of the answer."""
        return self._chunk({"content": text}, logprobs=logprobs)

    def last_chunks(self, end: EndEvent) -> list[bytes]:
        """The finish reason, then usage if asked for; the ``c2kv`` block rides the last of them."""
        c2kv, reason = end["c2kv"], end["finish_reason"]
        if not self.wants_usage_chunk:
            return [self._chunk({}, finish_reason=reason, c2kv=c2kv)]
        return [self._chunk({}, finish_reason=reason), self._usage_chunk(end["usage"], c2kv)]

    def _chunk(
        self,
        delta: dict[str, str],
        *,
        finish_reason: str | None = None,
        c2kv: C2KVBlock | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> bytes:
        told = self._logprobs(logprobs) if logprobs else None
        choice = {"index": 0, "delta": delta, "logprobs": told, "finish_reason": finish_reason}
        chunk = {**self._head("chat.completion.chunk", c2kv), "choices": [choice]}
        if self.wants_usage_chunk:
            chunk["usage"] = None
        if c2kv is not None:
            chunk["c2kv"] = c2kv
        return sse(chunk)

    def _logprobs(self, logprobs: list[TokenLogprobs]) -> dict[str, Any] | None:
        return {"content": logprobs, "refusal": None} if self.wants_logprobs else None

    def _usage_chunk(self, usage: Usage, c2kv: C2KVBlock) -> bytes:
        head = self._head("chat.completion.chunk", c2kv)
        return sse({**head, "choices": [], "usage": usage, "c2kv": c2kv})


def error_chunk(fault: Fault) -> bytes:
    """The line that ends a stream which failed after it had begun."""
    return sse(fault.body)


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
