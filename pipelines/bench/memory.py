"""Peak memory of a call above what was in use before."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""See proc(5): resets the peak resident set size."""


def peak_bytes(run: Callable[[], object], device: str) -> int | None:
    """Bytes in use at the worst moment of ``run`` beyond those in use before it.

    GPU memory on a GPU, else resident memory of the process (Linux). None where that cannot be read.
    """
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        # Memory that was freed but not given back would hide what the call takes.
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except (OSError, AttributeError):
        return None
    before = _status_bytes("VmRSS")
    run()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
