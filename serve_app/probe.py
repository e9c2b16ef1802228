"""What can be checked before any weights are loaded and before Ray is started."""

from dataclasses import dataclass

from c2kv_core.errors import IdentityError
from c2kv_core.identity import Identity
from c2kv_core.store import DiskTier, KVStore, Served, served
from c2kv_core.store.storage import split_uri
from serve_app.config import ServeConfig
from serve_app.keys import has_keys

_PATIENCE_S = 0.5
"""Longest wait for news of the index, in seconds, once it has been read."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A configuration that can be served."""

    identity: Identity
    """Under which documents are read."""
    trained: bool
    """False for a sidecar that is still the copy of the base it started as."""
    documents: int
    """Documents that can be read now: in the configured namespace, or in all where keys say who reads which."""
    namespaces: int
    """How many namespaces they are in."""
    not_promoted: str | None
    """What is wrong where another fingerprint was promoted than this server has; its own is served all the same."""

    def remarks(self, config: ServeConfig) -> list[str]:
        """What an operator should know, in plain words."""
        remarks = [] if self.not_promoted is None else [self.not_promoted]
        if not self.trained:
            remarks.append(
                f"the sidecar for {config.model} is untrained: answers over compressed documents will be poor; "
                "give a trained one with --sidecar"
            )
        if config.disk_cache_dir is not None and split_uri(config.store).scheme in ("", "file"):
            remarks.append(
                f"disk_cache_dir keeps copies of remote stores, and {config.store} is a folder: leave it out, unless "
                "that folder is on another machine"
            )
        if not self.documents:
            where = config.store if has_keys(config) else f"namespace {config.namespace!r} of {config.store}"
            remarks.append(f"{where} holds no documents yet: only documents given in full can be used")
        return remarks


def probe(config: ServeConfig) -> Probe:
    """Check model, sidecars and store against each other.

    Raises:
        InputError: a subclass that says which of them cannot be used and why: a missing model or store, a ratio a
            sidecar is not for, a store of another model.
        StoreError: the store cannot be read.
    """
    by_fingerprint = {}
    for spec in config.compressor_specs():
        (identity,) = spec.identities().values()
        if identity.fingerprint in by_fingerprint:
            raise IdentityError(
                f"two editions have the same identity ({identity.fingerprint[:12]}): leave one of them out"
            )
        by_fingerprint[identity.fingerprint] = (spec, identity)
    entry = served(config.store, config.namespace)
    promoted = entry is not None and entry.fingerprint in by_fingerprint
    spec, identity = by_fingerprint[entry.fingerprint if promoted and entry else next(iter(by_fingerprint))]
    store = open_store(config, identity)
    store.require_identity(config.namespace)
    documents = _documents(config, store, set(by_fingerprint) if has_keys(config) else {identity.fingerprint})
    return Probe(
        identity=identity,
        trained=spec.is_trained(),
        documents=sum(documents.values()),
        namespaces=len(documents),
        not_promoted=None
        if entry is None or promoted
        else _not_promoted(config, entry, list(by_fingerprint)),
    )


def _documents(config: ServeConfig, store: KVStore, fingerprints: set[str]) -> dict[str, int]:
    """How many can be read, by namespace; those of several editions are the same ones."""
    documents: dict[str, int] = {}
    for group in store.totals(namespace=None if has_keys(config) else config.namespace):
        if group.fingerprint in fingerprints:
            documents[group.namespace] = max(group.documents, documents.get(group.namespace, 0))
    return documents


def _not_promoted(config: ServeConfig, entry: Served, have: list[str]) -> str:
    return (
        f"namespace {config.namespace!r} of {config.store} is to be served by {entry.fingerprint[:12]} (version "
        f"{entry.version}), this server has {', '.join(name[:12] for name in have)}; add it to editions, or promote "
        "another one"
    )


def open_store(config: ServeConfig, identity: Identity, *, disk: DiskTier | None = None) -> KVStore:
    """The configured store under an identity.

    Raises:
        StoreFormatError: no store there.
        StoreError: it cannot be read.
    """
    return KVStore.open(
        config.store,
        identity=identity,
        index_refresh_s=config.index_refresh_s,
        patience_s=_PATIENCE_S,
        disk=disk,
    )
