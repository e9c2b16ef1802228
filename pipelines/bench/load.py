"""A load generator: chat requests over HTTP, a number of them at a time or as they arrive, timed at the client."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from c2kv_core.errors import C2KVError

CHAT = "/v1/chat/completions"
TIMEOUT_S = 900.0


class LoadError(C2KVError):
    """A request of a measurement failed."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answered request. Times are of one clock, in seconds."""

    sent_s: float
    first_s: float
    """When the first text came."""
    last_s: float
    tokens: int
    prompt_tokens: int
    inside_ms: float
    """From arrival in the replica to the first token, as the server says."""
    tiers: tuple[str, ...]
    """Where the documents came from."""

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_s - self.sent_s

    @property
    def per_token_s(self) -> float:
        """Time of each token after the first."""
        return (self.last_s - self.first_s) / max(1, self.tokens - 1)


async def closed_loop(url: str, bodies: Sequence[dict[str, Any]], *, at_once: int) -> list[Sample]:
    """All requests, ``at_once`` of them at any time; a new one is sent when one ends.

    Raises:
        LoadError: a request failed.
    """
    places = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as http:

        async def one(body: dict[str, Any]) -> Sample:
            async with places:
                return await ask(http, body)

        return list(await asyncio.gather(*(one(body) for body in bodies)))


async def open_loop(
    url: str, bodies: Sequence[dict[str, Any]], *, arrivals_per_s: float, seed: int
) -> list[Sample]:
    """All requests, sent at random times (a Poisson process) whether or not earlier ones have ended.

    A request that waits for the server counts from when it was due: a slow server does not thin out its own load.

    Raises:
        LoadError: a request failed.
    """
    draw = random.Random(seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as http:
        started_s, due_s = time.perf_counter(), 0.0

        async def one(body: dict[str, Any], at_s: float) -> Sample:
            await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
            return replace(await ask(http, body), sent_s=at_s)

        asked = []
        for body in bodies:
            asked.append(one(body, started_s + due_s))
            due_s += draw.expovariate(arrivals_per_s)
        return list(await asyncio.gather(*asked))


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> Sample:
    """One streamed answer.

    Raises:
        LoadError: it failed.
    """
    options = {"stream": True, "stream_options": {"include_usage": True}}
    sent_s = time.perf_counter()
    first_s = last_s = None
    last: dict[str, Any] = {}
    try:
        async with http.stream("POST", CHAT, json={**body, **options}) as response:
            if response.status_code != 200:
                raise LoadError(
                    f"the server answered {response.status_code}: {(await response.aread())[:300]!r}"
                )
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise LoadError(f"an answer broke off: {chunk['error']['message']}")
                if any(choice["delta"].get("content") for choice in chunk["choices"]):
                    last_s = time.perf_counter()
                    first_s = first_s or last_s
                last = chunk
    except httpx.HTTPError as error:
        raise LoadError(f"a request failed: {type(error).__name__}: {error}") from error
    if first_s is None or last_s is None or "c2kv" not in last:
        raise LoadError("an answer had no text")
    return Sample(
        sent_s=sent_s,
        first_s=first_s,
        last_s=last_s,
        tokens=last["usage"]["completion_tokens"],
        prompt_tokens=last["usage"]["prompt_tokens"],
        inside_ms=last["c2kv"]["timings"]["first_token_ms"],
        tiers=tuple(document["tier"] for document in last["c2kv"]["documents"]),
    )
