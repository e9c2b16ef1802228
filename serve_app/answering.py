"""One answer as turns: context, question, then a token a round."""

import time

from torch import Tensor

from c2kv_core import hf_adapter
from c2kv_core.compressor import Compressor
from c2kv_core.generate import Decoder
from c2kv_core.sampling import Sampler, TokenLogprob, logprob_of
from c2kv_core.slots import slot_count
from c2kv_core.text import TextStream
from serve_app.context_builder import BuiltContext, ContextBuilder
from serve_app.jobs import Compressed, Compression, Finished, Job, Started, Step, Text, Turns, Work

_ANSWERED = "engines answer a step with logits"


class Answerer:
    """Makes answers with one model; every turn must run on the thread that owns it."""

    def __init__(self, compressor: Compressor, contexts: ContextBuilder, *, ratio: int) -> None:
        self._compressor = compressor
        self._contexts = contexts
        self._ratio = ratio
        self._eos_token_ids = hf_adapter.eos_token_ids(compressor.model)

    def turns(self, job: Work) -> Turns:
        """The answer to a job, or the slots of a document; nothing is computed before the first ``send``."""
        if isinstance(job, Compression):
            return self._compress(job)
        return self._answer(job, time.monotonic())

    def size_bytes(self, job: Work) -> int:
        """Memory that the keys and values of an answer, or of a document under compression, take at most."""
        if isinstance(job, Compression):
            slots = sum(slot_count(len(ids), self._ratio) for ids in job.part_ids)
            return (slots + max(map(len, job.part_ids))) * self._contexts.token_bytes
        entries = len(job.prefix_ids) + sum(d.work.entries(self._ratio) for d in job.documents)
        own = len(job.question_ids) + job.max_new_tokens
        return (entries + own) * self._contexts.token_bytes

    def _answer(self, job: Job, submitted_s: float) -> Turns:
        queue_s = time.monotonic() - submitted_s
        built = yield from self._contexts.build(job)
        decoder = built.decoder
        for chunk in decoder.question_chunks:
            stepped = yield Step(decoder=decoder, ids=chunk)
            assert stepped is not None, _ANSWERED
            logits_V = stepped
        yield _started(built, queue_s)
        yield from self._draw(job, decoder, Sampler(job.sampling), logits_V)

    def _compress(self, job: Compression) -> Turns:
        parts = []
        for ids in job.part_ids:
            parts.append(self._contexts.compress_part(ids))
            yield None
        yield Compressed(parts=tuple(parts))

    def _draw(self, job: Job, decoder: Decoder, sampler: Sampler, logits_V: Tensor) -> Turns:
        text = TextStream(self._compressor.tokenizer, job.stop)
        held: list[TokenLogprob] = []
        """Of tokens whose text has not been shown yet."""
        drawn = 0
        token = sampler.draw(logits_V)
        while job.ignore_eos or token not in self._eos_token_ids:
            drawn += 1
            if job.top_logprobs is not None:
                held.append(logprob_of(logits_V, token, top=job.top_logprobs))
            if piece := text.push(token):
                yield Text(text=piece, logprobs=tuple(held), completion_tokens=drawn)
                held.clear()
            if text.stopped or drawn == job.max_new_tokens:
                break
            stepped = yield Step(decoder=decoder, ids=(token,))
            assert stepped is not None, _ANSWERED
            logits_V = stepped
            token = sampler.draw(logits_V)
        if (rest := text.finish()) or (held and not text.stopped):
            yield Text(text=rest, logprobs=tuple(held), completion_tokens=drawn)
        ended = text.stopped or (token in self._eos_token_ids and not job.ignore_eos)
        yield Finished(reason="stop" if ended else "length", completion_tokens=drawn)


def _started(built: BuiltContext, queue_s: float) -> Started:
    return Started(
        documents=tuple(built.documents),
        queue_s=queue_s,
        extract_s=built.extract_s,
        compose_s=built.compose_s,
    )
