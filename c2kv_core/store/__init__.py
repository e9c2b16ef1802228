"""Compressed documents on disk: written once, published by one commit, verified on every read."""

from typing import TYPE_CHECKING

from c2kv_core.lazy import make_lazy

if TYPE_CHECKING:
    from c2kv_core.store.attempts import Attempt, Attempts
    from c2kv_core.store.backends import open_storage
    from c2kv_core.store.codecs import CODECS, LayerShape, as_stored
    from c2kv_core.store.dead_letters import DeadLetter, DeadLetters, FailureKind, dead_letter
    from c2kv_core.store.disk_tier import DiskTier
    from c2kv_core.store.gc import GcReport
    from c2kv_core.store.kvstore import KVStore
    from c2kv_core.store.ledger import Ledger
    from c2kv_core.store.manifest import DEFAULT_BUCKETS, FORMAT_VERSION, require_store
    from c2kv_core.store.miss import Miss, MissReason
    from c2kv_core.store.names import check_namespace
    from c2kv_core.store.row import IndexRow
    from c2kv_core.store.served import (
        PromotionConflictError,
        Served,
        history,
        promote,
        promoted_namespaces,
        served,
    )
    from c2kv_core.store.storage import Storage, StoredFile
    from c2kv_core.store.texts import SourceText
    from c2kv_core.store.timing import ReadTiming
    from c2kv_core.store.totals import Totals
    from c2kv_core.store.verify import Problem, VerifyReport

__all__ = [
    "CODECS",
    "DEFAULT_BUCKETS",
    "FORMAT_VERSION",
    "Attempt",
    "Attempts",
    "DeadLetter",
    "DeadLetters",
    "DiskTier",
    "FailureKind",
    "GcReport",
    "IndexRow",
    "KVStore",
    "LayerShape",
    "Ledger",
    "Miss",
    "MissReason",
    "Problem",
    "PromotionConflictError",
    "ReadTiming",
    "Served",
    "SourceText",
    "Storage",
    "StoredFile",
    "Totals",
    "VerifyReport",
    "as_stored",
    "check_namespace",
    "dead_letter",
    "history",
    "open_storage",
    "promote",
    "promoted_namespaces",
    "require_store",
    "served",
]

make_lazy(
    __name__,
    {
        "Attempt": "attempts",
        "Attempts": "attempts",
        "open_storage": "backends",
        "CODECS": "codecs",
        "LayerShape": "codecs",
        "as_stored": "codecs",
        "DeadLetter": "dead_letters",
        "DeadLetters": "dead_letters",
        "FailureKind": "dead_letters",
        "dead_letter": "dead_letters",
        "DiskTier": "disk_tier",
        "GcReport": "gc",
        "KVStore": "kvstore",
        "Ledger": "ledger",
        "DEFAULT_BUCKETS": "manifest",
        "FORMAT_VERSION": "manifest",
        "require_store": "manifest",
        "Miss": "miss",
        "MissReason": "miss",
        "check_namespace": "names",
        "IndexRow": "row",
        "PromotionConflictError": "served",
        "Served": "served",
        "history": "served",
        "promote": "served",
        "promoted_namespaces": "served",
        "served": "served",
        "Storage": "storage",
        "StoredFile": "storage",
        "SourceText": "texts",
        "ReadTiming": "timing",
        "Totals": "totals",
        "Problem": "verify",
        "VerifyReport": "verify",
    },
)
