"""What goes into an engine and what comes out of it."""

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor

from c2kv_core.generate import Decoder
from c2kv_core.sampling import SamplingParams, TokenLogprob
from serve_app.answers import DocumentReport, FinishReason
from serve_app.errors import Fault
from serve_app.plan import Parts, PlannedDocument


@dataclass(frozen=True, kw_only=True)
class Job:
    """One answer to be made, in token ids."""

    fingerprint: str
    """Of the identity of all its slots."""
    namespace: str
    """Of the tenant who asks."""
    prefix_ids: tuple[int, ...]
    """System message; may be empty where the template puts nothing there."""
    documents: tuple[PlannedDocument, ...]
    question_ids: tuple[int, ...]
    """All other messages and the assistant header."""
    max_new_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...]
    """Strings that end the answer."""
    top_logprobs: int | None = None
    """Likeliest tokens to be told of beside each drawn one; None tells no logprobs at all."""
    ignore_eos: bool = False
    """Go on after the token that ends an answer, up to ``max_new_tokens``."""
    deadline_s: float
    """When the answer is given up, by the monotonic clock."""

    @property
    def prompt_tokens(self) -> int:
        """Positions before the answer: source tokens, not slots."""
        documents = sum(document.work.source_tokens for document in self.documents)
        return len(self.prefix_ids) + documents + len(self.question_ids)


@dataclass(frozen=True, kw_only=True)
class Compression:
    """A document to be compressed for the store."""

    fingerprint: str
    """Of the identity that its slots get."""
    part_ids: tuple[tuple[int, ...], ...]
    """Token ids of each part."""
    deadline_s: float
    """When it is given up, by the monotonic clock."""


Work = Job | Compression
"""What an engine does."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """The first answer token is drawn; nothing is wrong with the request."""

    documents: tuple[DocumentReport, ...]
    queue_s: float
    extract_s: float
    compose_s: float


@dataclass(frozen=True, kw_only=True)
class Text:
    """More of the answer."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens behind it, where asked for."""
    completion_tokens: int = 0
    """Tokens drawn so far."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The answer is complete."""

    reason: FinishReason
    completion_tokens: int


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """A document's slots."""

    parts: Parts


@dataclass(frozen=True, kw_only=True)
class Failed:
    """There will be no (more) answer."""

    fault: Fault


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """An answer waits for the logits (V,) after these tokens; the engine sends them in."""

    decoder: Decoder
    ids: tuple[int, ...]
    """A piece of its question, or the last token drawn."""


Event = Started | Text | Finished | Compressed | Failed
"""Of an answer: Started, any number of Text, Finished. Of a compression: Compressed. Or Failed at any point."""
LAST = (Finished, Compressed, Failed)
"""Nothing follows these."""

Turns = Generator[Event | Step | None, Tensor | None, None]
"""An answer in the making.

None: one bounded piece of preparation is done. A step: send it the logits. An event: tell it, and go on at once.
Nothing follows the last event.
"""
