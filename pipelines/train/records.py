"""A run's numbers as JSON lines: one a step, one an evaluation. Cut back to the checkpoint when a run goes on."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pipelines.train.dev import DevRecord
from pipelines.train.folder import DEV, METRICS, RunFolder, writing
from pipelines.train.trainer import StepRecord


class Records:
    """Everything measured so far; written with every checkpoint, before its manifest."""

    def __init__(self, folder: RunFolder, *, up_to_step: int) -> None:
        self._folder = folder
        self.steps = _read(folder, METRICS, up_to_step)
        self.dev = _read(folder, DEV, up_to_step)

    def add(self, record: StepRecord) -> None:
        """A finished step."""
        by_ratio = {str(ratio): loss for ratio, loss in record.by_ratio.items()}
        self.steps.append({**asdict(record), "by_ratio": by_ratio})

    def add_dev(self, record: DevRecord) -> None:
        """An evaluation."""
        self.dev.append({**asdict(record), "score": record.score})

    def save(self) -> None:
        """Write both files anew."""
        with writing(self._folder.location):
            self._folder.storage.put(METRICS, _lines(self.steps))
            self._folder.storage.put(DEV, _lines(self.dev))


def read_records(folder: RunFolder) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps and evaluations of a run, as written last."""
    return _read(folder, METRICS, None), _read(folder, DEV, None)


def _read(folder: RunFolder, name: str, up_to_step: int | None) -> list[dict[str, Any]]:
    try:
        text = bytes(folder.storage.get(name)).decode()
    except FileNotFoundError:
        return []
    rows = [json.loads(line) for line in text.splitlines()]
    return [row for row in rows if up_to_step is None or row["step"] <= up_to_step]


def _lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
