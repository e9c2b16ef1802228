"""Slots of a changed document's unchanged parts, taken from the store instead of being computed.

A part is compressed alone: its slots depend on its tokens and on nothing else of the document. So a part whose token
ids an earlier content of the document had too, wherever it stood, has the same slots, and this is exact. A document
that grew at its end keeps all parts but the last few.
"""

from collections.abc import Mapping

from c2kv_core import CompressedDocument, Compressor, StoredDocument
from c2kv_core.store import IndexRow, KVStore

Reusable = Mapping[tuple[int, ...], Mapping[int, CompressedDocument]]
"""By the token ids of a part, its slots at each ratio wanted."""


def reusable_parts(
    compressor: Compressor, stores: Mapping[int, KVStore], namespace: str, doc_id: str
) -> Reusable:
    """Parts of what is stored of a document; none where that cannot be told exactly.

    The store keeps no token ids, so they are made again from the text, which must be the one the slots were made from.
    A codec that rounds would round a second time: then nothing is reused.

    Raises:
        StoreError: the store cannot be read.
    """
    if compressor.spec.quantisation != "none":
        return {}
    first = next(iter(stores.values()))
    text = first.text([doc_id], namespace=namespace).get(doc_id)
    if text is None:
        return {}
    ids = [tuple(part) for part in compressor.part_ids(text.title, text.text)]
    found: dict[tuple[int, ...], dict[int, CompressedDocument]] = {part: {} for part in ids}
    for ratio, store in stores.items():
        row = store.lookup([doc_id], namespace=namespace)[doc_id]
        if not isinstance(row, IndexRow) or row.content_hash != text.content_hash:
            return {}
        document = store.get([doc_id], namespace=namespace)[doc_id]
        # A damaged record is computed anew like any other.
        if not isinstance(document, StoredDocument) or len(document.parts) != len(ids):
            return {}
        for part, slots in zip(ids, document.parts, strict=True):
            if slots.num_tokens == len(part):
                found[part][ratio] = slots
    return {part: by_ratio for part, by_ratio in found.items() if len(by_ratio) == len(stores)}
