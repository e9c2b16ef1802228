"""What can be checked before any weights are loaded and before Ray is started."""

from dataclasses import dataclass

from c2kv_core.identity import Identity
from c2kv_core.store import KVStore
from serve_app.config import ServeConfig

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
    """Documents that can be read now."""

    def remarks(self, config: ServeConfig) -> list[str]:
        """What an operator should know, in plain words."""
        remarks = []
        if not self.trained:
            remarks.append(
                f"the sidecar for {config.model} is untrained: answers over compressed documents will be poor; "
                "give a trained one with --sidecar"
            )
        if not self.documents:
            remarks.append(
                f"namespace {config.namespace!r} of {config.store} holds no documents yet: "
                "only documents given in full can be used"
            )
        return remarks


def probe(config: ServeConfig) -> Probe:
    """Check model, sidecar and store against each other.

    Raises:
        InputError: a subclass that says which of them cannot be used and why: a missing model or store, a ratio the
            sidecar is not for, a store of another model.
        StoreError: the store cannot be read.
    """
    spec = config.compressor_spec()
    identity = spec.identities()[config.ratio]
    store = open_store(config, identity)
    return Probe(
        identity=identity,
        trained=spec.is_trained(),
        documents=len(store.content_hashes(namespace=config.namespace)),
    )


def open_store(config: ServeConfig, identity: Identity) -> KVStore:
    """The configured store, refused when its namespace holds only another identity's documents.

    Raises:
        StoreFormatError: no store there.
        IdentityError: names the differing fields.
        StoreError: it cannot be read.
    """
    store = KVStore.open(
        config.store, identity=identity, index_refresh_s=config.index_refresh_s, patience_s=_PATIENCE_S
    )
    store.require_identity(config.namespace)
    return store
