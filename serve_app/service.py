"""A request from start to end inside a replica, without Ray: find documents, submit the job, tell what happens."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from c2kv_core import hf_adapter
from c2kv_core.errors import C2KVError, ContextLengthError
from c2kv_core.sampling import SamplingParams
from c2kv_core.store import Miss, ReadTiming
from c2kv_core.store.miss import ABSENT
from serve_app.caller import Caller
from serve_app.config import ServeConfig
from serve_app.conversation import Segments, segments, texts_of
from serve_app.document_service import DocumentService
from serve_app.documents import LateError
from serve_app.edition import Edition, Editions
from serve_app.engine import Engine, answer_events
from serve_app.errors import ApiError, bad_request, deadline_exceeded, fault_of
from serve_app.events import ReplicaEvent, error_event
from serve_app.jobs import Job
from serve_app.plan import PlannedDocument
from serve_app.protocol import AnyRequest
from serve_app.request_limits import check_limits
from serve_app.shared import Shared
from serve_app.telling import FindTiming, Teller

T = TypeVar("T")

_FETCH_SHARE = 0.5
"""Of the time left, at most, goes into waiting for the store."""

_WARMED_AT_ONCE = 8
"""Documents that a fresh replica reads together."""


class ChatService:
    """Answers requests with one engine over one store."""

    def __init__(self, *, config: ServeConfig, editions: Editions, engine: Engine, shared: Shared) -> None:
        self._config = config
        self._editions = editions
        self.record: Callable[[], None] = lambda: None
        """Records what the replica holds now."""
        self._engine = engine
        self._shared = shared
        self._anybody = config.anybody()
        self.documents = DocumentService(config=config, editions=editions, engine=engine, shared=shared)
        """Documents that clients put, look at and delete."""

    async def answer(
        self, request: AnyRequest, caller: Caller | None = None
    ) -> AsyncGenerator[ReplicaEvent, None]:
        """The events of one request; leaving the iterator early gives the answer up."""
        arrived_s = time.monotonic()
        try:
            check_limits(request, self._config)
            deadline_s = arrived_s + self._allowed_s(request)
            job, finding = await self._within(
                deadline_s, lambda: self._plan(request, caller or self._anybody, deadline_s)
            )
            edition = self._editions.named(job.fingerprint)
            teller = Teller(
                compressor=edition.compressor,
                identity=edition.identity,
                job=job,
                arrived_s=arrived_s,
                finding=finding,
            )
            async with aclosing(answer_events(self._engine, job)) as events:
                async for event in events:
                    yield teller.tell(event)
        except ApiError as error:
            yield error_event(error.fault)
        except C2KVError as error:
            yield error_event(fault_of(error))

    def warm_up(self) -> int:
        """Read the documents that other replicas were asked for most; how many are in memory after it."""
        if self._shared.hot is None:
            return 0
        until_s = time.monotonic() + self._config.warm_up_s
        by_namespace: defaultdict[str, list[str]] = defaultdict(list)
        for namespace, doc_id in self._shared.hot.most_wanted(self._config.warm_up_documents):
            by_namespace[namespace].append(doc_id)
        warm = 0
        for namespace, ids in by_namespace.items():
            fetcher = self._editions.of(namespace).fetcher
            # A few at a time: all at once would hold the bytes of all before any is in its place.
            for start in range(0, len(ids), _WARMED_AT_ONCE):
                found = fetcher.slots(ids[start : start + _WARMED_AT_ONCE], namespace, until_s=until_s)
                warm += sum(not isinstance(one, Miss) for one in found.values())
        return warm

    def integrity_failures(self) -> dict[str, int]:
        """Records that failed a check since the start, by reason."""
        misses: Counter[str] = Counter()
        for edition in self._editions.all:
            for name, count in edition.store.counters.items():
                if name.startswith("miss_"):
                    misses[name.removeprefix("miss_")] += count
        if self._shared.disk is not None:
            misses["disk_copy"] = self._shared.disk.damaged
        return {reason: count for reason, count in misses.items() if reason not in ABSENT}

    def close(self) -> None:
        """Stop the writer, the engine and the readers."""
        self.documents.close()
        self._editions.close()
        self._engine.close()
        if self._shared.hot is not None:
            self._shared.hot.close()
        if self._shared.disk is not None:
            self._shared.disk.close()
        self._shared.readers.shutdown(wait=False, cancel_futures=True)

    def _allowed_s(self, request: AnyRequest) -> float:
        asked_ms = request.c2kv.deadline_ms
        most_s = self._config.max_request_s
        # Compared as it came: a JSON number may be too large for a float.
        return most_s if asked_ms is None or asked_ms >= 1000 * most_s else asked_ms / 1000

    async def _within(self, deadline_s: float, work: Callable[[], T]) -> T:
        """The result of blocking work; what comes after the deadline is dropped."""
        future = asyncio.get_running_loop().run_in_executor(self._shared.readers, work)
        try:
            return await asyncio.wait_for(future, max(0.0, deadline_s - time.monotonic()))
        except TimeoutError as error:
            raise deadline_exceeded("documents were read") from error

    def _plan(self, request: AnyRequest, caller: Caller, deadline_s: float) -> tuple[Job, FindTiming]:
        """The job, and how long it took to find the documents."""
        most_s = _FETCH_SHARE * (deadline_s - time.monotonic())
        edition = self._editions.of(caller.namespace, most_s=most_s)
        if request.c2kv.ratio not in (None, edition.ratio):
            raise bad_request(
                f"expected c2kv.ratio {edition.ratio}, the one served here, got {request.c2kv.ratio}",
                code="ratio_not_served",
                param="c2kv.ratio",
            )
        self._shared.fitting.check(*texts_of(request))
        started_s = time.monotonic()
        timing = ReadTiming()
        allowed_s = min(self._config.fetch_timeout_s, _FETCH_SHARE * (deadline_s - started_s))
        try:
            documents = edition.resolver.resolve(
                request.documents,
                request.c2kv.on_missing,
                caller=caller,
                until_s=started_s + allowed_s,
                timing=timing,
            )
        except LateError as error:
            if allowed_s < self._config.fetch_timeout_s:  # the client's haste, not the store
                raise deadline_exceeded("documents were read") from error
            raise
        fetch_s = time.monotonic() - started_s - timing.verify_s
        with self._shared.tokenizer_lock:
            around = segments(request, edition.compressor.renderer)
        temperature = request.temperature
        job = Job(
            fingerprint=edition.fingerprint,
            namespace=caller.namespace,
            prefix_ids=around.prefix_ids,
            documents=tuple(documents),
            question_ids=around.question_ids,
            max_new_tokens=self._answer_limit(edition, request, around, documents),
            sampling=SamplingParams(
                temperature=self._config.default_temperature if temperature is None else temperature,
                top_p=1.0 if request.top_p is None else request.top_p,
                seed=request.seed,
            ),
            stop=tuple(request.stop or ()),
            top_logprobs=request.likeliest_tokens,
            ignore_eos=request.ignore_eos,
            deadline_s=deadline_s,
        )
        return job, FindTiming(fetch_s=fetch_s, verify_s=timing.verify_s)

    def _answer_limit(
        self,
        edition: Edition,
        request: AnyRequest,
        around: Segments,
        documents: list[PlannedDocument],
    ) -> int:
        """Most answer tokens; known to fit before any model work is done.

        Raises:
            ContextLengthError: the prompt, or the prompt and what was asked for, exceed the model's positions.
        """
        placed = sum(document.work.source_tokens for document in documents)
        prompt = len(around.prefix_ids) + placed + len(around.question_ids)
        positions = hf_adapter.max_positions(edition.compressor.model)
        # The last token of an answer is never fed back, so it needs no position.
        room = positions - prompt + 1
        wanted = request.token_limit
        if room < (wanted or 1):
            raise ContextLengthError(
                f"this model has {positions} positions; the request needs {prompt} for its prompt ({placed} of them "
                f"for documents) and {wanted or 1} for the answer; use fewer or shorter documents"
            )
        return min(room, self._config.default_max_new_tokens) if wanted is None else wanted
