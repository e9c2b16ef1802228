"""How many cores may be used: by affinity and by a container's quota."""

import os
from pathlib import Path

import pytest

from c2kv_core.cores import usable_cores
from pipelines.extract_config import ExtractConfig
from serve_app.config import ServeConfig

MACHINE = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", MACHINE),
        ("100000 100000", 1),
        ("50000 100000", 1),
        (f"{MACHINE * 100000 - 50000} 100000", MACHINE),
        (f"{MACHINE * 300000} 100000", MACHINE),
        ("damaged", MACHINE),
        (None, MACHINE),
    ],
)
def test_a_quota_is_rounded_up_and_at_most_the_machine(tmp_path: Path, quota: str | None, cores: int) -> None:
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota + "\n")
    assert usable_cores(file) == cores


def test_threads_are_those_of_the_cores_that_may_be_used(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores() == 1
        assert ServeConfig(store="s").threads() == 1
        assert ExtractConfig(corpus="c", store="s").threads() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_threads_of_other_devices_are_left_alone() -> None:
    assert ServeConfig(store="s", device="cuda", num_gpus=1).threads() is None
    assert ServeConfig(store="s", num_gpus=1).threads() == ServeConfig(store="s").threads()
