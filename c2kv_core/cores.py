"""How many cores this process may use, which is fewer than the machine has where a container or a mask limits it."""

import math
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Of cgroup v2: microseconds of processor time a period, or ``max``, and the period (Linux, cgroup-v2.rst)."""


def usable_cores(quota: Path = QUOTA) -> int:
    """Cores by the process's affinity and its container's quota, rounded up; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        allowed, period = quota.read_text().split()
        limit = math.ceil(int(allowed) / int(period))
    except (OSError, ValueError):
        # No cgroup v2, or no limit.
        return cores
    return max(1, min(cores, limit))
