"""The form of every benchmark's result."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from c2kv_core.cores import usable_cores


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One ratio and the bar it is held to."""

    value: float
    baseline: str
    """What the denominator is."""
    limit: float
    """The bar."""
    higher_is_better: bool = False

    @property
    def holds(self) -> bool:
        """Whether the value is on the right side of the bar."""
        return self.value >= self.limit if self.higher_is_better else self.value <= self.limit


@dataclass(kw_only=True)
class BenchReport:
    """Ratios with their bars, and the figures behind them."""

    name: str
    ratios: dict[str, Ratio] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    """Absolute figures of this machine, for reading only."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the machine they were measured on."""
        ratios = {name: {**asdict(r), "holds": r.holds} for name, r in self.ratios.items()}
        return {"bench": self.name, "ratios": ratios, "figures": self.figures, "machine": machine()}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def alternate(runs: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Median seconds of each run, all taken in turn so that a slow spell of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}
