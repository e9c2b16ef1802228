"""Which fingerprint a namespace is served by: a log of immutable files, of which the last one counts.

``served/<namespace>/<version>.json``, versions from 1 without gaps. A change is made by creating the next version,
which only one of several that try at the same time can do; so the log is the history, and no change is lost or half
written.
"""

import getpass
import json
import os
import re
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime

from c2kv_core.errors import InputError, StoreError
from c2kv_core.store.backends import open_storage
from c2kv_core.store.failures import as_store_error
from c2kv_core.store.identities import Identities
from c2kv_core.store.names import check_namespace
from c2kv_core.store.storage import Storage

SERVED = "served/"
_VERSION = re.compile(r"(\d{10})\.json")


class PromotionConflictError(StoreError):
    """Somebody else changed what is served at the same time."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a namespace is served by, since when and why."""

    version: int
    """From 1; the highest counts."""
    fingerprint: str
    at: str
    """ISO 8601, UTC."""
    by: str
    """Who or what made the change."""
    reason: str
    """In words; may be empty."""


def served(uri: str | os.PathLike[str], namespace: str) -> Served | None:
    """What a namespace is served by; None where nothing was ever promoted.

    Raises:
        InputError: a malformed namespace or URI.
        StoreError: storage cannot be read, or the last file is damaged.
    """
    return newest(open_storage(uri), namespace)


def newest(storage: Storage, namespace: str) -> Served | None:
    """See ``served``."""
    versions = _versions(storage, namespace)
    return _read(storage, namespace, max(versions)) if versions else None


def history(uri: str | os.PathLike[str], namespace: str) -> list[Served]:
    """All that was ever promoted in a namespace, oldest first.

    Raises:
        InputError: a malformed namespace or URI.
        StoreError: storage cannot be read, or a file is damaged.
    """
    storage = open_storage(uri)
    return [_read(storage, namespace, version) for version in sorted(_versions(storage, namespace))]


def promoted_namespaces(uri: str | os.PathLike[str]) -> list[str]:
    """The namespaces in which anything was ever promoted, sorted.

    Raises:
        InputError: a malformed URI.
        StoreError: storage cannot be read.
    """
    storage = open_storage(uri)
    with as_store_error(f"list {SERVED}"):
        paths = [file.path.removeprefix(SERVED).partition("/") for file in storage.list_files(SERVED)]
    return sorted({namespace for namespace, _, name in paths if _VERSION.fullmatch(name)})


def promote(
    uri: str | os.PathLike[str],
    namespace: str,
    fingerprint: str,
    *,
    reason: str = "",
    by: str | None = None,
    expected: str | None = None,
) -> Served:
    """Make a fingerprint the one that a namespace is served by. Repeating it changes nothing.

    Args:
        uri: of the store.
        namespace: tenant.
        fingerprint: must be known to the store.
        reason: for the history.
        by: for the history; None takes the user's name.
        expected: the fingerprint that is served until now, as the caller knows it; None does not ask.

    Raises:
        InputError: a malformed namespace or URI, or a fingerprint the store does not know.
        PromotionConflictError: another change came first; look again.
        StoreError: storage cannot be read or written.
    """
    storage = open_storage(uri)
    check_namespace(namespace)
    if Identities(storage).load(fingerprint) is None:
        raise InputError(f"expected a fingerprint that {storage.uri} holds documents of, got {fingerprint!r}")
    now = newest(storage, namespace)
    if expected is not None and (now is None or now.fingerprint != expected):
        came = "nothing" if now is None else now.fingerprint[:12]
        raise PromotionConflictError(f"expected {expected[:12]} to be served in {namespace!r}, found {came}")
    if now is not None and now.fingerprint == fingerprint:
        return now
    entry = Served(
        version=1 if now is None else now.version + 1,
        fingerprint=fingerprint,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        by=by or _user(),
        reason=reason,
    )
    path = _path(namespace, entry.version)
    with as_store_error(f"write {path}"):
        created = storage.create(path, json.dumps(asdict(entry), indent=2).encode())
    if not created:
        raise PromotionConflictError(
            f"somebody else changed what is served in {namespace!r} at the same time; look and try again"
        )
    return entry


def _versions(storage: Storage, namespace: str) -> list[int]:
    prefix = f"{SERVED}{check_namespace(namespace)}/"
    with as_store_error(f"list {prefix}"):
        names = [file.path.removeprefix(prefix) for file in storage.list_files(prefix)]
    return [int(match[1]) for name in names if (match := _VERSION.fullmatch(name))]


def _read(storage: Storage, namespace: str, version: int) -> Served:
    path = _path(namespace, version)
    with as_store_error(f"read {path}"):
        text = storage.get(path).to_pybytes()
    try:
        entry = Served(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise StoreError(f"{path} is damaged: {error}; promote again after moving it away") from error
    if not all(isinstance(getattr(entry, f.name), f.type) for f in fields(entry) if isinstance(f.type, type)):
        raise StoreError(f"{path} is damaged: a value of another type; promote again after moving it away")
    if entry.version != version:
        raise StoreError(f"{path} is damaged: it says it is version {entry.version}")
    return entry


def _path(namespace: str, version: int) -> str:
    return f"{SERVED}{namespace}/{version:010d}.json"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"uid {os.getuid()}"
