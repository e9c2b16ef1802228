"""AdamW over the sidecar's float32 weights, and the learning rate of a step."""

import math

import torch
from torch import Tensor
from torch.optim import AdamW

from c2kv_core.sidecar import is_fitted
from pipelines.train.config import TrainConfig
from pipelines.train.weights import MasterWeights

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def learning_rate(config: TrainConfig, step: int) -> float:
    """Of an optimizer step (from 1): linear warm-up, then the schedule. A function of the step alone."""
    warmup = config.warmup_share * config.steps
    if step <= warmup:
        return config.lr * step / warmup
    if config.schedule == "constant":
        return config.lr
    done = (step - warmup) / max(config.steps - warmup, 1.0)
    floor = config.min_lr_share
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


class SidecarOptimizer:
    """Clipping, weight decay for matrices, and a state that can be saved as plain tensors."""

    def __init__(self, config: TrainConfig, weights: MasterWeights) -> None:
        self._config, self._weights = config, weights
        # What is fitted gets no gradient: decay alone would move it.
        decayed = {name for name, p in weights.named.items() if p.ndim > 1 and not is_fitted(name)}
        matrices = [p for name, p in weights.named.items() if name in decayed]
        others = [p for name, p in weights.named.items() if name not in decayed]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adamw = AdamW(groups, lr=config.lr, betas=(0.9, 0.999))

    def clip(self) -> float:
        """Clip the gradients; gives their norm before."""
        return float(torch.nn.utils.clip_grad_norm_(list(self._weights), self._config.clip_norm))

    def step(self, step: int) -> None:
        """Update the weights."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate(self._config, step)
        self._adamw.step()
        self._weights.publish()

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's state, under ``<moment>/<weight>``."""
        found = {}
        for name, weight in self._weights.named.items():
            for moment, value in self._adamw.state[weight].items():
                found[f"{moment}/{name}"] = value
        return found

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take the state from a checkpoint."""
        for name, weight in self._weights.named.items():
            state = {m: tensors[f"{m}/{name}"] for m in _MOMENTS if f"{m}/{name}" in tensors}
            if state:
                self._adamw.state[weight] = {
                    m: value.to(weight.device) if m != "step" else value for m, value in state.items()
                }
