"""Sending requests for the same documents to the same replica, which then holds them in memory."""

import hashlib
from collections.abc import Iterable

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
"""Ray Serve's own: a replica by the hash of a session id, the next ones where that is full."""


def affinity_key(namespace: str, doc_ids: Iterable[str]) -> str | None:
    """The session id of a request over documents; None where it has none, and any replica will do.

    It is the smallest digest of the documents' ids, so two requests agree on it with the probability of the share of
    documents they have in common (min-wise hashing: Broder, "On the resemblance and containment of documents", 1997).
    """
    digests = [
        hashlib.blake2b(f"{namespace}\0{doc_id}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
        for doc_id in doc_ids
    ]
    return min(digests, default=None)
