"""OpenAI's JSON for an answer to ``/v1/completions``, whole or in chunks."""

import uuid
from dataclasses import dataclass, field
from typing import Any

from serve_app.answers import C2KVBlock
from serve_app.completion import AnswerForm, sse
from serve_app.events import EndEvent, TokenLogprobs

_KIND = "text_completion"


@dataclass(frozen=True, kw_only=True)
class TextForm(AnswerForm):
    """An answer to ``/v1/completions``. The methods are those of ``CompletionForm``."""

    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")

    def whole(self, text: str, logprobs: list[TokenLogprobs], end: EndEvent) -> dict[str, Any]:
        """The answer as one ``text_completion``."""
        choice = self._choice(text, logprobs, end["finish_reason"])
        return {
            **self._head(_KIND, end["c2kv"]),
            "choices": [choice],
            "usage": end["usage"],
            "c2kv": end["c2kv"],
        }

    def first_chunk(self) -> bytes:
        """Nothing: a stream opens with its first text."""
        return b""

    def text_chunk(self, text: str, logprobs: list[TokenLogprobs]) -> bytes:
        """A chunk with more of the answer."""
        return self._chunk([self._choice(text, logprobs, None)])

    def last_chunks(self, end: EndEvent) -> list[bytes]:
        """The finish reason, then usage if asked for; the ``c2kv`` block rides the last of them."""
        c2kv, last = end["c2kv"], [self._choice("", [], end["finish_reason"])]
        if not self.wants_usage_chunk:
            return [self._chunk(last, c2kv=c2kv)]
        return [self._chunk(last), self._chunk([], c2kv=c2kv, usage=end["usage"])]

    def _choice(self, text: str, logprobs: list[TokenLogprobs], finish_reason: str | None) -> dict[str, Any]:
        told = _legacy(logprobs) if self.wants_logprobs and logprobs else None
        return {"index": 0, "text": text, "logprobs": told, "finish_reason": finish_reason}

    def _chunk(
        self, choices: list[dict[str, Any]], *, c2kv: C2KVBlock | None = None, usage: Any = None
    ) -> bytes:
        chunk = {**self._head(_KIND, c2kv), "choices": choices}
        if self.wants_usage_chunk:
            chunk["usage"] = usage
        if c2kv is not None:
            chunk["c2kv"] = c2kv
        return sse(chunk)


def _legacy(logprobs: list[TokenLogprobs]) -> dict[str, Any]:
    """Columns, as this older form has them."""
    offsets, end = [], 0
    for one in logprobs:
        offsets.append(end)
        end += len(one["token"])
    return {
        "tokens": [one["token"] for one in logprobs],
        "token_logprobs": [one["logprob"] for one in logprobs],
        "top_logprobs": [{t["token"]: t["logprob"] for t in one["top_logprobs"]} for one in logprobs],
        "text_offset": offsets,
    }
