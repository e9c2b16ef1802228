"""Requests and tokens a minute of each key: buckets that refill steadily. Counted by each ingress replica."""

import math
import time
from collections.abc import Callable

from serve_app.errors import ApiError, Fault
from serve_app.keys import Grant


class Quotas:
    """Spends what keys may use. Used on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: dict[str, _Bucket] = {}
        self._tokens: dict[str, _Bucket] = {}

    def begin(self, grant: Grant) -> None:
        """Count a request.

        Raises:
            ApiError: 429, when the minute's requests or tokens are used up.
        """
        tokens = self._bucket(self._tokens, grant.caller.name, grant.tokens_per_minute)
        requests = self._bucket(self._requests, grant.caller.name, grant.requests_per_minute)
        # Tokens are known at the end only: a request may begin while any are left, and overdraw.
        if tokens is not None and (wait_s := tokens.wait_s(1)) > 0:
            raise _exceeded(f"{grant.tokens_per_minute} tokens a minute", wait_s)
        if requests is not None:
            if (wait_s := requests.wait_s(1)) > 0:
                raise _exceeded(f"{grant.requests_per_minute} requests a minute", wait_s)
            requests.spend(1)

    def used(self, grant: Grant, tokens: int) -> None:
        """Count the tokens of an answer."""
        bucket = self._bucket(self._tokens, grant.caller.name, grant.tokens_per_minute)
        if bucket is not None:
            bucket.spend(tokens)

    def _bucket(self, held: dict[str, "_Bucket"], name: str, per_minute: int | None) -> "_Bucket | None":
        if per_minute is None:
            held.pop(name, None)
            return None
        bucket = held.get(name)
        if bucket is None or bucket.per_minute != per_minute:
            bucket = held[name] = _Bucket(per_minute, self._clock)
        return bucket


class _Bucket:
    """Holds a minute's worth and refills steadily; may be overdrawn."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._left = float(per_minute)
        self._seen_s = clock()

    def wait_s(self, amount: int) -> float:
        """Seconds until this much can be spent; 0 now."""
        now_s = self._clock()
        self._left = min(self.per_minute, self._left + (now_s - self._seen_s) * self.per_minute / 60)
        self._seen_s = now_s
        return max(0.0, (amount - self._left) * 60 / self.per_minute)

    def spend(self, amount: int) -> None:
        self._left -= amount


def _exceeded(limit: str, wait_s: float) -> ApiError:
    return ApiError(
        Fault(
            status=429,
            code="rate_limit_exceeded",
            message=f"this key may use {limit}; try again later",
            retry_after_s=max(1, math.ceil(wait_s)),
        )
    )
