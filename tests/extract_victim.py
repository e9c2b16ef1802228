"""An extraction in a process of its own, in which something is killed at a moment of its own choosing.

python -m tests.extract_victim CONFIG (driver|actor|node|store) (first|between|last)

first: a unit has come back and nothing is committed. between: something is committed, and another unit has come back.
last: every unit has come back, and the last one is not committed.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from c2kv_core.config import load_config
from pipelines import extract
from pipelines.extract_commit import Committer
from pipelines.extract_config import ExtractConfig

STORE_PID = "C2KV_TESTS_STORE_PID"
"""Variable that holds the S3 server's process group."""


def kill_driver() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_actor() -> None:
    _kill("ray::MapWorker")


def kill_node() -> None:
    _kill("raylet")


def kill_store() -> None:
    os.killpg(int(os.environ[STORE_PID]), signal.SIGKILL)


VICTIMS: dict[str, Callable[[], None]] = {
    "driver": kill_driver,
    "actor": kill_actor,
    "node": kill_node,
    "store": kill_store,
}


def _kill(name: str) -> None:
    """One of this process's own children, by the name in its command line."""
    found = [
        child
        for child in psutil.Process().children(recursive=True)
        if name in " ".join(child.cmdline()[:1]).rpartition("/")[2]
    ]
    assert found, f"no {name} to kill"
    found[0].kill()


def deadly_committer(victim: Callable[[], None], moment: str) -> type[Committer]:
    """The committer as it is, but for one stroke."""

    class Deadly(Committer):
        struck = False
        commits = 0

        def take(self, unit: Mapping[str, Any]) -> None:
            is_last = self.taken + len(unit["outcomes"]) == len(self._plan.pending)
            at = {"first": True, "between": self.commits > 0, "last": is_last}
            if at[moment] and not self.struck:
                self.struck = True
                victim()
            super().take(unit)

        def commit(self) -> None:
            is_something = bool(self._waiting)
            super().commit()
            self.commits += is_something

    return Deadly


def main() -> None:
    path, victim, moment = sys.argv[1:]
    patched: Any = extract
    patched.Committer = deadly_committer(VICTIMS[victim], moment)
    config = load_config(ExtractConfig, path)
    raise SystemExit(extract.main(["--config", path, f"stall_timeout_s={config.stall_timeout_s}"]))


if __name__ == "__main__":
    main()
