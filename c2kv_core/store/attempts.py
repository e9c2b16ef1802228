"""Who is working on which documents right now: notes that outlive the process that wrote them.

A process that dies takes its memory along, so the documents that may have killed it are written down before they are
touched, and the note goes when they are done. A note that stays is an attempt that failed. Notes lie under
``attempts/<namespace>/<run>/``; the driver of a run renews ``alive.json`` there, so that notes of a run that still
goes on are not taken for its end. A driver that is told to stop leaves ``stopped.json``: the notes it names are of
deaths, all others of processes that are stopped with it, which may write one more before they end.
"""

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from c2kv_core.store.failures import as_store_error
from c2kv_core.store.names import ATTEMPTS, check_namespace, check_run
from c2kv_core.store.storage import Storage, StoredFile

HEARTBEAT_S = 15.0
"""How often a run says that it goes on."""
DEAD_AFTER_S = 90.0
"""Silence after which a run is dead: six heartbeats."""
_ALIVE = "alive.json"
_STOPPED = "stopped.json"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Documents that one process works on."""

    run: str
    unit: str
    """What the documents came as; the same when the work is given to another process."""
    node: str
    """Machine, by the name the cluster gives it."""
    actor: str
    started_at: str
    """ISO 8601, UTC."""
    documents: tuple[tuple[str, str], ...]
    """Ids and content hashes."""

    @property
    def is_alone(self) -> bool:
        """Whether the process had nothing else to die of."""
        return len(self.documents) == 1


class Attempts:
    """Notes of one run in one namespace."""

    def __init__(self, storage: Storage, *, namespace: str, run: str) -> None:
        self._storage = storage
        self._root = f"{ATTEMPTS}{check_namespace(namespace)}/"
        self._run = check_run(run)
        self._folder = f"{self._root}{run}/"

    def begin(self, unit: str, documents: Sequence[tuple[str, str]], *, node: str, actor: str) -> str:
        """Note that work on documents begins; the note's path.

        Raises:
            StoreError: I/O error.
        """
        attempt = Attempt(
            run=self._run,
            unit=unit,
            node=node,
            actor=actor,
            started_at=datetime.now(UTC).isoformat(),
            documents=tuple(documents),
        )
        path = f"{self._folder}{unit}.{uuid.uuid4().hex}.json"
        with as_store_error(f"write {path}"):
            self._storage.put(path, json.dumps(asdict(attempt)).encode())
        return path

    def end(self, path: str) -> None:
        """The work is done, well or badly, and the process lives.

        Raises:
            StoreError: I/O error.
        """
        with as_store_error(f"remove {path}"):
            self._storage.delete(path)

    def withdraw(self) -> None:
        """End the run early: of each unit, processes died over all notes but the newest, and of no later one.

        Raises:
            StoreError: I/O error.
        """
        with as_store_error(f"clear {self._folder}"):
            newest: dict[str, tuple[str, str]] = {}
            files = self._notes(self._storage.list_files(self._folder))
            for file in files:
                for attempt in self._read([file]):
                    note = (attempt.started_at, file.path)
                    newest[attempt.unit] = max(note, newest.get(attempt.unit, note))
            in_progress = {path for _, path in newest.values()}
            deaths = sorted(file.path for file in files if file.path not in in_progress)
            self._storage.put(f"{self._folder}{_STOPPED}", json.dumps({"deaths": deaths}).encode())
            for path in in_progress:
                self._storage.delete(path)

    def of_unit(self, unit: str) -> list[Attempt]:
        """Earlier attempts of this run at the same work.

        Raises:
            StoreError: I/O error.
        """
        with as_store_error(f"read {self._folder}"):
            files = self._storage.list_files(self._folder)
            return list(self._read([f for f in files if f.path.startswith(f"{self._folder}{unit}.")]))

    def running(self) -> list[Attempt]:
        """What this run works on, oldest first.

        Raises:
            StoreError: I/O error.
        """
        with as_store_error(f"read {self._folder}"):
            notes = self._notes(self._storage.list_files(self._folder))
            return sorted(self._read(notes), key=lambda attempt: attempt.started_at)

    def heartbeat(self) -> None:
        """Say that the run goes on.

        Raises:
            StoreError: I/O error.
        """
        with as_store_error(f"write {self._folder}{_ALIVE}"):
            self._storage.put(f"{self._folder}{_ALIVE}", b"{}")

    def left_behind(self) -> dict[str, Attempt]:
        """Attempts of other runs that are dead, by the path of their note. Needs a fresh heartbeat of one's own.

        Raises:
            StoreError: I/O error.
        """
        with as_store_error(f"read {self._root}"):
            notes = [note for files in self._dead_runs() for note in self._deaths(files)]
            return {note.path: attempt for note in notes for attempt in self._read([note])}

    def clear(self, others: Iterable[str] = ()) -> None:
        """Remove all notes of this run, and these of others, once every document in them is accounted for.

        Of dead runs that have no note of a death left, everything goes.

        Raises:
            StoreError: I/O error.
        """
        with as_store_error(f"clear {self._root}"):
            for path in others:
                self._storage.delete(path)
            over = [files for files in self._dead_runs() if not self._deaths(files)]
            for file in [*self._storage.list_files(self._folder), *(f for files in over for f in files)]:
                self._storage.delete(file.path)

    def _dead_runs(self) -> list[list[StoredFile]]:
        """Files of each other run that was stopped, or was silent for long."""
        runs: dict[str, list[StoredFile]] = {}
        beats: dict[str, float] = {}
        stopped: set[str] = set()
        for file in self._storage.list_files(self._root):
            folder, _, name = file.path.rpartition("/")
            runs.setdefault(folder, []).append(file)
            if name == _ALIVE:
                beats[folder] = file.modified_s
            elif name == _STOPPED:
                stopped.add(folder)
        own = self._folder.rstrip("/")
        # By the storage's own clock, which stamped both.
        now_s = beats.get(own, max(beats.values(), default=0.0))
        silent = {folder for folder in runs if now_s - beats.get(folder, 0.0) > DEAD_AFTER_S}
        return [files for folder, files in runs.items() if folder != own and folder in silent | stopped]

    def _deaths(self, files: Sequence[StoredFile]) -> list[StoredFile]:
        """Of the files of a dead run, the notes of attempts that failed."""
        notes = self._notes(files)
        for file in files:
            if file.path.endswith(f"/{_STOPPED}"):
                with suppress(FileNotFoundError, ValueError, TypeError, KeyError):
                    named = set(json.loads(self._storage.get(file.path).to_pybytes())["deaths"])
                    return [note for note in notes if note.path in named]
        return notes

    def _notes(self, files: Iterable[StoredFile]) -> list[StoredFile]:
        return [f for f in files if f.path.rpartition("/")[2] not in (_ALIVE, _STOPPED)]

    def _read(self, files: Sequence[StoredFile]) -> Iterator[Attempt]:
        for file in files:
            # Gone since it was listed: that work is done. Anything else there is no note of ours.
            with suppress(FileNotFoundError, ValueError, TypeError, KeyError):
                values = json.loads(self._storage.get(file.path).to_pybytes())
                documents = tuple((doc_id, content) for doc_id, content in values["documents"])
                yield Attempt(**{**values, "documents": documents})
