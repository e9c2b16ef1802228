"""What the tests of the extraction job share: corpora, stages that die on purpose, stores compared."""

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from c2kv_core import StoredDocument
from c2kv_core.store import IndexRow, KVStore, open_storage
from pipelines.extract_config import ExtractConfig
from pipelines.extract_stage import ExtractStage, StageSettings
from pipelines.extract_units import UnitDocument
from tests.core_store_kit import assert_same

DEADLY = "deadly nightshade"
"""Text that ends the process which works on it."""
BROKEN = "broken"
"""Text that makes the tokenizer fail."""
HUNGRY = "hungry"
"""Text that the model has no memory for."""


def rows(count: int, **others: str) -> list[object]:
    """Documents of growing length, and others by id."""
    made: list[object] = [
        {"id": f"doc-{i}", "title": f"T{i}", "text": f"The birch {i} is white. " * (i + 1)}
        for i in range(count)
    ]
    return [*made, *({"id": doc_id, "title": "", "text": text} for doc_id, text in others.items())]


class PoisonedStage(ExtractStage):
    """The stage as it is, with documents that do harm where documents can: in the tokenizer and in the model."""

    def __init__(self, settings: StageSettings) -> None:
        super().__init__(settings)
        work: Any = self._work
        tokenize, compute = work._tokenize, work._store

        def poisoned_tokenizer(document: UnitDocument) -> Any:
            if DEADLY in document.text:
                os.kill(os.getpid(), signal.SIGKILL)
            if document.text == BROKEN:
                reference: Any = work._compressor
                broken = type("Broken", (), {"part_ids": staticmethod(lambda title, text: {}[text])})
                work._compressor = broken
                try:
                    return tokenize(document)
                finally:
                    work._compressor = reference
            return tokenize(document)

        def poisoned_model(group: Any, *others: Any) -> Any:
            if any(one.document.text == HUNGRY for one in group):
                raise torch.OutOfMemoryError("no memory for this one")
            return compute(group, *others)

        work._tokenize, work._store = poisoned_tokenizer, poisoned_model


class RemovingStage(ExtractStage):
    """The stage as it is, on a machine where somebody removes the store while it computes."""

    def __init__(self, settings: StageSettings) -> None:
        super().__init__(settings)
        work: Any = self._work
        compress = work._compressor.compress

        def remove_then_compress(*args: Any) -> Any:
            made = compress(*args)
            shutil.rmtree(settings.store)
            return made

        object.__setattr__(work._compressor, "compress", remove_then_compress)


class ShakyStage(ExtractStage):
    """The stage as it is, on machines that take each process away the first time it touches a unit."""

    def __init__(self, settings: StageSettings) -> None:
        super().__init__(settings)
        seen = Path(settings.store).parent / "seen"
        seen.mkdir(exist_ok=True)
        work: Any = self._work
        extract_unit = work.extract

        def shaky(documents: Sequence[UnitDocument], *others: Any) -> Any:
            mark = seen / documents[0].doc_id
            if len(documents) > 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return extract_unit(documents, *others)

        work.extract = shaky


def stored_documents(config: ExtractConfig, ratio: int) -> dict[str, StoredDocument]:
    """All documents of a store at one ratio, as a reader gets them."""
    identity = config.spec().identities()[ratio]
    store = KVStore.open(config.store, identity=identity)
    ids = [row.doc_id for row in store.rows(fingerprint=identity.fingerprint)]
    found = store.get(ids, namespace=config.namespace)
    assert all(isinstance(d, StoredDocument) for d in found.values()), found
    return found  # type: ignore[return-value]


def assert_same_stores(config: ExtractConfig, other: ExtractConfig) -> None:
    """Record for record: the same documents, bit for bit, and one live row each."""
    for ratio in config.ratios:
        here, there = stored_documents(config, ratio), stored_documents(other, ratio)
        assert here.keys() == there.keys()
        for doc_id, document in here.items():
            assert_same(there[doc_id], document)
    assert [_lasting(row) for row in _rows(config)] == [_lasting(row) for row in _rows(other)]
    texts = [KVStore.open(c.store).text(here, namespace=c.namespace) for c in (config, other)]
    assert texts[0] == texts[1]


def orphans(config: ExtractConfig) -> list[str]:
    """Shards that no row names."""
    live = {row.shard for row in _rows(config)}
    return [f.path for f in open_storage(config.store).list_files("shards/") if f.path not in live]


def notes(config: ExtractConfig) -> list[str]:
    """What is left under ``attempts/``."""
    return [file.path for file in open_storage(config.store).list_files("attempts/")]


def config_for(folder: Path, model: Path, **changes: Any) -> ExtractConfig:
    """Small shards, committed one by one, so that there is something between commits."""
    values: dict[str, Any] = {
        "corpus": str(folder / "corpus.jsonl"),
        "store": str(folder / "store"),
        "model": str(model),
        "documents_per_shard": 4,
        "commit_documents": 1,
        "deterministic": True,
        "stall_timeout_s": 300.0,
        **changes,
    }
    return ExtractConfig(**values)


def _rows(config: ExtractConfig) -> list[IndexRow]:
    return KVStore.open(config.store).rows(namespace=config.namespace)


def _lasting(row: IndexRow) -> tuple[object, ...]:
    """What does not depend on when a record was written and beside which; its length has padding in it."""
    return (*row.key, row.bucket, row.content_hash, row.parts, row.slots, row.source_tokens)
