"""From an engine's events to those that leave the replica: usage and the ``c2kv`` block are put together here."""

import time
from dataclasses import dataclass

from c2kv_core.compressor import Compressor
from c2kv_core.identity import Identity
from c2kv_core.sampling import TokenLogprob
from serve_app.answers import C2KVBlock, Timings, usage
from serve_app.events import (
    EndEvent,
    Likeliest,
    ReplicaEvent,
    StartEvent,
    TextEvent,
    TokenLogprobs,
    error_event,
)
from serve_app.jobs import Compressed, Event, Failed, Finished, Job, Started, Text
from serve_app.plan import CACHED_TIERS


@dataclass(frozen=True, kw_only=True)
class FindTiming:
    """Seconds it took to find a request's documents."""

    fetch_s: float
    """Looking them up and reading them."""
    verify_s: float
    """Checking what was read."""


class Teller:
    """Tells one request's events."""

    def __init__(
        self,
        *,
        compressor: Compressor,
        identity: Identity,
        job: Job,
        arrived_s: float,
        finding: FindTiming,
    ) -> None:
        self._compressor = compressor
        self._identity = identity
        self._job = job
        self._arrived_s = arrived_s
        self._finding = finding
        self._block: C2KVBlock | None = None

    def tell(self, event: Event) -> ReplicaEvent:
        """The event for the ingress."""
        assert not isinstance(event, Compressed), "answers are told of, not documents"
        match event:
            case Started():
                self._block = self._new_block(event)
                return StartEvent(event="start", c2kv=self._block, prompt_tokens=self._job.prompt_tokens)
            case Text(text=text, logprobs=logprobs, completion_tokens=drawn):
                told = [self._told(one) for one in logprobs]
                return TextEvent(event="text", text=text, logprobs=told, completion_tokens=drawn)
            case Finished():
                return self._end(event)
            case Failed(fault=fault):
                return error_event(fault)

    def _told(self, one: TokenLogprob) -> TokenLogprobs:
        top = [self._likeliest(token, logprob) for token, logprob in one.top]
        return TokenLogprobs(**self._likeliest(one.token, one.logprob), top_logprobs=top)

    def _likeliest(self, token: int, logprob: float) -> Likeliest:
        # Alone: a part of a character shows as the decoder's replacement character.
        text = str(self._compressor.tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False))
        return Likeliest(token=text, logprob=logprob, bytes=list(text.encode()))

    def _new_block(self, started: Started) -> C2KVBlock:
        return C2KVBlock(
            ratio=self._identity.ratio,
            sidecar="trained" if self._compressor.sidecar.config.trained else "untrained",
            fingerprint=self._identity.fingerprint,
            documents=list(started.documents),
            timings=Timings(
                queue_ms=_ms(started.queue_s),
                fetch_ms=_ms(self._finding.fetch_s),
                verify_ms=_ms(self._finding.verify_s),
                extract_ms=_ms(started.extract_s),
                compose_ms=_ms(started.compose_s),
                first_token_ms=_ms(time.monotonic() - self._arrived_s),
            ),
        )

    def _end(self, finished: Finished) -> EndEvent:
        assert self._block is not None, "an engine starts an answer before it finishes it"
        total_ms = _ms(time.monotonic() - self._arrived_s)
        cached = [d["source_tokens"] for d in self._block["documents"] if d["tier"] in CACHED_TIERS]
        return EndEvent(
            event="end",
            finish_reason=finished.reason,
            usage=usage(
                prompt_tokens=self._job.prompt_tokens,
                cached_tokens=sum(cached),
                completion_tokens=finished.completion_tokens,
            ),
            c2kv={**self._block, "timings": {**self._block["timings"], "total_ms": total_ms}},
        )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
