"""What a Delta commit wrote, so that it can be hardened: delta-rs publishes by link, but never syncs."""

import json
from urllib.parse import unquote

from c2kv_core.store.storage import Storage


def files_of_commit(storage: Storage, table: str, version: int) -> list[str]:
    """Paths of the data files that ``version`` of a table added, and of its log entry, last."""
    entry = f"{table}/_delta_log/{version:020}.json"
    actions = [json.loads(line) for line in storage.get(entry).to_pybytes().splitlines() if line]
    added = [f"{table}/{unquote(action['add']['path'])}" for action in actions if "add" in action]
    return [*added, entry]
