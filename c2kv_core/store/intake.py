"""Checks on documents and rows before they are written: what must hold for a read to succeed."""

from collections.abc import Sequence

from c2kv_core.document import CompressedDocument, StoredDocument
from c2kv_core.errors import IdentityError, InputError, StoreError
from c2kv_core.identity import Identity
from c2kv_core.sidecar_config import SHARING
from c2kv_core.store.failures import as_store_error
from c2kv_core.store.index import is_storable
from c2kv_core.store.names import bucket_of, check_doc_id, check_namespace
from c2kv_core.store.row import IndexRow
from c2kv_core.store.storage import Storage


def check_document(document: StoredDocument, identity: Identity) -> None:
    """That a document can be stored as slots of this identity.

    Raises:
        InputError: namespace, id, title or parts that cannot be stored.
        IdentityError: a part of another geometry, dtype or ratio.
    """
    check_namespace(document.namespace)
    check_doc_id(document.doc_id)
    for name in ("title", "content_hash"):
        if not is_storable(getattr(document, name)):
            raise InputError(f"expected a {name} of valid unicode in document {document.doc_id!r}")
    if not document.parts:
        raise InputError(f"expected at least one part in document {document.doc_id!r}, got none")
    for index, part in enumerate(document.parts):
        _check_part(part, identity, f"part {index} of document {document.doc_id!r}")


def check_committable(storage: Storage, rows: Sequence[IndexRow], *, buckets: int) -> None:
    """That rows are of this store and their shards are there.

    Raises:
        InputError: rows of a store with another number of buckets.
        StoreError: a row's shard is gone, or I/O error.
    """
    for row in rows:
        if row.bucket != bucket_of(row.namespace, row.doc_id, buckets=buckets):
            raise InputError(f"row of {row.doc_id!r} was written for a store of another number of buckets")
    with as_store_error("look for shards to commit"):
        for shard in {row.shard for row in rows}:
            if not storage.exists(shard):
                raise StoreError(
                    f"cannot commit: the shard {shard} is gone; was gc run with a short retention?"
                )


def _check_part(part: CompressedDocument, identity: Identity, where: str) -> None:
    geometry = identity.geometry
    expected = (geometry.layers, geometry.kv_heads, part.num_slots, geometry.head_dim)
    for name, tensor in (("keys", part.keys), ("values", part.values)):
        came = tuple(tensor.shape)
        if came != expected:
            raise IdentityError(f"expected {name} of shape (L, K, M, H) = {expected} in {where}, got {came}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != identity.slot_dtype:
            raise IdentityError(
                f"expected {name} of dtype {identity.slot_dtype} in {where}, got {dtype}: convert with .to()"
            )
    _check_head_slots(part, identity, where)
    if part.ratio != identity.ratio:
        raise IdentityError(f"expected ratio {identity.ratio} in {where}, got {part.ratio}")
    positions = part.slot_positions
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < max(1, part.num_tokens):
        raise InputError(
            f"expected slot positions of 0 to below {part.num_tokens} in {where}, got {positions}"
        )
    if identity.quantisation != "none" and not all(
        bool(x.isfinite().all()) for x in (part.keys, part.values)
    ):
        # One infinity would take the rest of its channel with it.
        raise InputError(f"expected finite keys and values in {where}, to be quantised")
    if part.num_tokens < 0:
        raise InputError(f"expected num_tokens of 0 or more in {where}, got {part.num_tokens}")


def _check_head_slots(part: CompressedDocument, identity: Identity, where: str) -> None:
    shares = identity.selection == SHARING
    if (part.head_slots is not None) != shares:
        raise IdentityError(
            f"expected {'' if shares else 'no '}head_slots in {where}, as selection is {identity.selection!r}"
        )
    if part.head_slots is None:
        return
    geometry = identity.geometry
    heads, entries = (
        (geometry.layers, geometry.kv_heads),
        geometry.layers * geometry.kv_heads * part.num_slots,
    )
    came = (tuple(part.head_slots.shape), int(part.head_slots.sum()))
    if came != (heads, entries) or int(part.head_slots.min()) < 0:
        raise IdentityError(
            f"expected head_slots of shape (L, K) = {heads} with a sum of {entries} and none below 0 in {where}, "
            f"got shape {came[0]} and sum {came[1]}"
        )
