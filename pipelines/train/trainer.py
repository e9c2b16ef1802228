"""One optimizer step: rows in, weights moved, numbers out."""

import math
import time
from collections import defaultdict
from dataclasses import dataclass, field

from pipelines.train.ahead import RowsAhead
from pipelines.train.config import TrainConfig
from pipelines.train.flops import StepTokens, layer_weights, peak_flops, step_flops
from pipelines.train.objective import Sums
from pipelines.train.optimizer import SidecarOptimizer, learning_rate
from pipelines.train.prepare import Prepared
from pipelines.train.setup import TrainingSetup
from pipelines.train.weights import MasterWeights
from pipelines.train.world import World, sum_numbers

_COUNTS = ("rows", "source_tokens", "answer_tokens", "slots", "asked_tokens", "taught_tokens", "dropped")
_LOSSES = ("answer", "distillation", "reconstruction", "full_compute")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Numbers of one optimizer step over all workers; losses are means over rows."""

    step: int
    loss: float
    """What was minimised."""
    answer: float
    """Cross-entropy on answers and end tokens, nats a token."""
    by_ratio: dict[int, float]
    """The same by source tokens per slot; a row of mixed ratios counts for each by its share."""
    parts: dict[str, float]
    """Losses of the options that are on."""
    gradient_norm: float
    """Before clipping."""
    learning_rate: float
    rows: int
    source_tokens: int
    answer_tokens: int
    dropped: int
    """Rows replaced because they could not be used."""
    elapsed_s: float = field(compare=False)
    """Wall time of the step."""
    mfu: float | None = field(default=None, compare=False)
    """Share of the GPUs' peak operations that the model's own amount to; None on a CPU or an unknown GPU."""


class NonFiniteLossSignal(Exception):
    """The loss of a step, or its gradient, is not a number; carries the rows of this worker."""

    def __init__(self, step: int, loss: float, norm: float, rows: list[Prepared]) -> None:
        super().__init__(f"loss {loss}, gradient norm {norm} at step {step}")
        self.step, self.loss, self.norm, self.rows = step, loss, norm, rows


class Trainer:
    """Weights and optimizer of a run, and what a step does to them."""

    def __init__(self, setup: TrainingSetup, world: World) -> None:
        self.setup, self.world = setup, world
        self.config: TrainConfig = setup.config
        self.weights = MasterWeights(setup.sidecar)
        self.optimizer = SidecarOptimizer(self.config, self.weights)
        self._rows = RowsAhead(setup.stream, rank=world.rank, world=world.size, last_step=setup.config.steps)
        self._peak, self._base_weights = peak_flops(setup.device), layer_weights(setup.model)
        ratios = self.config.all_ratios()
        self._names = [*_COUNTS, "loss", *_LOSSES]
        self._names += [f"{kind}_at_{ratio}" for ratio in ratios for kind in ("answer", "share")]

    def step(self, step: int) -> StepRecord:
        """Train on the rows of a step (from 1).

        Raises:
            NonFiniteLossSignal: on every worker alike; the weights are as before.
        """
        started = time.perf_counter()
        rows = self._rows.take(step)
        sums: Sums = defaultdict(float, dropped=float(rows.dropped.total()))
        self.weights.clear_gradients()
        for group in rows.micro_batches:
            losses = self.setup.objective.losses(group)
            losses.loss.backward()
            self.weights.gather_gradients()
            sums["loss"] += float(losses.loss.detach())
            for name, value in losses.sums.items():
                sums[name] += value
        total = sum_numbers(self.world, sums, self._names, self.setup.device)
        self.weights.sum_gradients(self.world)
        self.weights.pull(self.config.pull_to_base)
        norm = self.optimizer.clip()
        # Before the weights move: a finite loss can have a gradient that is not, and no checkpoint may hold its result.
        if not (math.isfinite(total["loss"]) and math.isfinite(norm)):
            trained = [row for group in rows.micro_batches for row in group]
            raise NonFiniteLossSignal(step, total["loss"], norm, trained)
        self.optimizer.step(step)
        return self._record(step, total, norm, time.perf_counter() - started)

    def _record(self, step: int, total: dict[str, float], norm: float, elapsed_s: float) -> StepRecord:
        rows = total["rows"]
        options = {
            "distillation": self.config.distillation.weight,
            "full_compute": self.config.distillation.weight,
            "reconstruction": self.config.reconstruction.weight,
        }
        return StepRecord(
            step=step,
            loss=total["loss"],
            answer=total["answer"] / rows,
            by_ratio={
                k: total[f"answer_at_{k}"] / total[f"share_at_{k}"]
                for k in self.config.all_ratios()
                if total[f"share_at_{k}"]
            },
            parts={name: total[name] / rows for name, weight in options.items() if weight},
            gradient_norm=norm,
            learning_rate=learning_rate(self.config, step),
            rows=int(rows),
            source_tokens=int(total["source_tokens"]),
            answer_tokens=int(total["answer_tokens"]),
            dropped=int(total["dropped"]),
            elapsed_s=elapsed_s,
            mfu=self._mfu(total, elapsed_s),
        )

    def _mfu(self, total: dict[str, float], elapsed_s: float) -> float | None:
        if self._peak is None:
            return None
        tokens = StepTokens(
            source=int(total["source_tokens"]),
            slots=int(total["slots"]),
            asked=int(total["asked_tokens"]),
            taught=int(total["taught_tokens"]),
        )
        flops = step_flops(tokens, weights=self._base_weights)
        return flops / (elapsed_s * self._peak * self.world.size)
