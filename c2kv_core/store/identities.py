"""``fingerprints/<fingerprint>.json``: the identity behind each fingerprint, readable."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from c2kv_core.errors import IdentityError
from c2kv_core.identity import Identity
from c2kv_core.store.failures import as_store_error
from c2kv_core.store.manifest import FORMAT_VERSION
from c2kv_core.store.miss import Miss
from c2kv_core.store.names import identity_path
from c2kv_core.store.row import IndexRow
from c2kv_core.store.storage import Storage

_LOOK_AGAIN_S = 60.0
_SHOWN_CHARACTERS = 16
"""Enough of a digest to tell two apart."""


def check_identity(identity: Identity) -> Identity:
    """The identity itself, if this release can store its slots.

    Raises:
        IdentityError: another format version, an unknown dtype or quantisation.
    """
    # Imported late, as torch is by them: looking at a store needs none of it.
    from c2kv_core.store.codecs import CODECS
    from c2kv_core.store.record import DTYPES

    supported: dict[str, list[Any]] = {
        "format_version": [FORMAT_VERSION],
        "slot_dtype": sorted(DTYPES),
        "quantisation": sorted(CODECS),
    }
    for name, allowed in supported.items():
        came = getattr(identity, name)
        if came not in allowed:
            raise IdentityError(f"expected {name} to be one of {allowed}, got {came!r}")
    return identity


class Identities:
    """Publishes and explains the identities of a store."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[str, Identity] = {}
        self._published_s: dict[str, float] = {}
        """When a file was last seen to be right, by the monotonic clock."""

    def publish(self, identity: Identity) -> None:
        """Make the identity readable; must come before any row that names its fingerprint.

        Raises:
            StoreError: I/O error.
        """
        path, content = identity_path(identity.fingerprint), identity.canonical_json.encode()
        # Looked at again now and then: whoever damages or removes the file must not make all records unreadable.
        if time.monotonic() - self._published_s.get(identity.fingerprint, -_LOOK_AGAIN_S) < _LOOK_AGAIN_S:
            return
        with as_store_error(f"write {path}"):
            try:
                there = self._storage.get(path).to_pybytes()
            except FileNotFoundError:
                there = b""
            if there != content:
                self._storage.put(path, content)
        self._known[identity.fingerprint] = identity
        self._published_s[identity.fingerprint] = time.monotonic()

    def load(self, fingerprint: str) -> Identity | None:
        """The identity behind a fingerprint; None when its file is absent or is not what its name says.

        Raises:
            StoreError: I/O error.
        """
        if fingerprint not in self._known:
            with as_store_error(f"read {identity_path(fingerprint)}"):
                try:
                    text = self._storage.get(identity_path(fingerprint)).to_pybytes()
                except FileNotFoundError:
                    return None
            try:
                identity = Identity.from_json(text.decode())
            except (IdentityError, UnicodeDecodeError):
                return None
            if identity.fingerprint != fingerprint:
                return None
            self._known[fingerprint] = identity
        return self._known[fingerprint]

    def explain_difference(self, opened: Identity, fingerprints: set[str]) -> str:
        """Which fields keep ``opened`` from reading what the nearest of other identities made.

        Raises:
            StoreError: I/O error.
        """
        loaded = [identity for name in sorted(fingerprints) if (identity := self.load(name)) is not None]
        if not loaded:
            return f"its identity is not readable under fingerprints/ ({', '.join(sorted(fingerprints))})"
        nearest = min(loaded, key=lambda identity: len(opened.differing_fields(identity)))
        names = opened.differing_fields(nearest)
        return "; ".join(
            f"{name} differs (stored {_show(nearest, name)}, opened {_show(opened, name)})" for name in names
        )

    def explain_absence(self, opened: Identity, fingerprints: set[str], namespace: str) -> str | None:
        """Why documents of these fingerprints are of no use to ``opened``; None when some are, or there are none.

        Raises:
            StoreError: I/O error.
        """
        if not fingerprints or opened.fingerprint in fingerprints:
            return None
        return (
            f"store holds documents of another model or setting in namespace {namespace!r}: "
            f"{self.explain_difference(opened, fingerprints)}"
        )

    def own_row(self, doc_id: str, rows: Sequence[IndexRow], opened: Identity) -> IndexRow | Miss:
        """The row that ``opened`` may read among those of one document, or why there is none.

        Raises:
            StoreError: I/O error.
        """
        own = next((row for row in rows if row.fingerprint == opened.fingerprint), None)
        if own is not None:
            return own
        if not rows:
            return Miss(reason="not_found", detail=f"no document {doc_id!r}")
        difference = self.explain_difference(opened, {row.fingerprint for row in rows})
        return Miss(reason="other_identity", detail=f"stored under another identity: {difference}")


def _show(identity: Identity, name: str) -> str:
    value: Any = asdict(identity)[name]
    text = str(value)
    is_digest = name.endswith("_digest") and len(text) > _SHOWN_CHARACTERS
    return f"{text[:_SHOWN_CHARACTERS]}…" if is_digest else text
