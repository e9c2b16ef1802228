"""Names in the store: what a tenant, an id and a run may be called, and where files lie.

Everything here is stable across processes, machines and releases: a bucket or a path
computed by one writer is the one every reader computes.
"""

import re
import uuid
from collections.abc import Iterable

import xxhash

from c2kv_core.errors import InputError

SHARDS = "shards/"
FINGERPRINTS = "fingerprints/"
QUARANTINE = "quarantine/"
"""Notes of damaged records that were dropped."""
PROBES = "probes/"
"""Objects of start-up checks; one stays where a check was killed, for gc."""
ATTEMPTS = "attempts/"
"""Notes of work in progress."""
LEASES = "leases/"
"""Who does what only one may do."""
MANIFEST = "store.json"
INDEX_TABLE = "index"
TEXTS_TABLE = "documents"
FAILURES_TABLE = "failures"

_NAMESPACE = re.compile(r"[a-z0-9._-]{1,64}")
_RUN = re.compile(r"[A-Za-z0-9._-]{1,128}")
_DOTS = (".", "..")


def check_namespace(namespace: str) -> str:
    """The namespace itself.

    Raises:
        InputError: not ``[a-z0-9._-]{1,64}``, or a name that means a folder.
    """
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace) or namespace in _DOTS:
        raise InputError(
            f"expected a namespace of 1 to 64 of a-z 0-9 . _ - (and not '.' or '..'), got {namespace!r}"
        )
    return namespace


def check_doc_id(doc_id: str) -> str:
    """The id itself.

    Raises:
        InputError: empty, or not encodable as UTF-8.
    """
    try:
        encoded = doc_id.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"expected a document id of valid unicode, got {doc_id!r}: {error.reason}"
        ) from error
    if not encoded:
        raise InputError("expected a non-empty document id, got ''")
    return doc_id


def listed_ids(ids: Iterable[str]) -> list[str]:
    """Ids as a list.

    Raises:
        InputError: a string, which would be taken for ids of one letter each, or anything that is no text.
    """
    if isinstance(ids, str | bytes):
        raise InputError(f"expected a list of document ids, got {ids!r:.100}")
    listed = list(ids)
    if not all(isinstance(one, str) for one in listed):
        raise InputError(f"expected document ids as strings, got {listed!r:.100}")
    return listed


def check_run(run: str) -> str:
    """The run's name itself; it is a folder under ``shards/``.

    Raises:
        InputError: not ``[A-Za-z0-9._-]{1,128}``, or a name that means a folder.
    """
    if not _RUN.fullmatch(run) or run in _DOTS:
        raise InputError(
            f"expected a run name of 1 to 128 of A-Z a-z 0-9 . _ - (not '.' or '..'), got {run!r}"
        )
    return run


def bucket_of(namespace: str, doc_id: str, *, buckets: int) -> int:
    """Bucket in ``[0, buckets)`` that holds a document's rows, from a stable digest of its key.

    Any string has a bucket, so that looking up an id that could never be stored is a plain miss.
    """
    key = f"{namespace}\0{doc_id}".encode("utf-8", "surrogatepass")
    return int(xxhash.xxh3_64_intdigest(key) % buckets)


def new_shard_path(*, namespace: str, fingerprint: str, run: str) -> str:
    """A path no other writer will ever use."""
    return f"{SHARDS}{namespace}/{fingerprint}/{run}/{uuid.uuid4().hex}.arrow"


def identity_path(fingerprint: str) -> str:
    """Where the identity behind a fingerprint is kept in full."""
    return f"{FINGERPRINTS}{fingerprint}.json"
