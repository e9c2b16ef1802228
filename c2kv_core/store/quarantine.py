"""Damaged records out of the index, each with a note of what was wrong and where its bytes lie."""

import json
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from c2kv_core.store.failures import as_store_error
from c2kv_core.store.index import Index
from c2kv_core.store.names import QUARANTINE
from c2kv_core.store.storage import Storage
from c2kv_core.store.verify import Problem


def quarantine(storage: Storage, index: Index, problems: Sequence[Problem]) -> int:
    """Note the problems that are damage, then drop their rows; how many were still live.

    A note is ``quarantine/<namespace>/<uuid>.json``. The row goes only if it still names the damaged place.

    Raises:
        StoreError: I/O error or lasting write conflict.
    """
    damaged = [problem for problem in problems if problem.is_damage]
    for problem in damaged:
        note = {
            "found_at": datetime.now(UTC).isoformat(),
            "reason": problem.reason,
            "detail": problem.detail,
            "row": problem.row.to_dict(),
        }
        path = f"{QUARANTINE}{problem.row.namespace}/{uuid.uuid4().hex}.json"
        with as_store_error(f"write {path}"):
            storage.put(path, json.dumps(note, indent=2, sort_keys=True).encode())
    return index.drop([problem.row for problem in damaged])


def forget(storage: Storage, namespace: str, doc_ids: Iterable[str]) -> None:
    """Remove the notes about documents: they name them, and hold a digest of their text.

    Raises:
        StoreError: I/O error.
    """
    forgotten = set(doc_ids)
    with as_store_error("remove notes under quarantine/"):
        for file in list(storage.list_files(f"{QUARANTINE}{namespace}/")):
            try:
                doc_id = json.loads(storage.get(file.path).to_pybytes())["row"]["doc_id"]
            except FileNotFoundError:
                continue  # another delete was faster
            except (ValueError, KeyError, TypeError):
                continue  # no note of ours
            if doc_id in forgotten:
                storage.delete(file.path)
