"""The sidecar's weights in float32, whatever the computing dtype: small updates vanish in bfloat16."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from c2kv_core import Sidecar
from pipelines.train.world import World


class MasterWeights:
    """Float32 weights and gradients beside the working ones; the same tensors where those are float32."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._working = dict(sidecar.named_parameters())
        self.named: dict[str, nn.Parameter] = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self._working.items()
        }
        self._start = {name: p.detach().clone() for name, p in self.named.items()}

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self.named.values())

    def clear_gradients(self) -> None:
        """Set every gradient to zero: a weight that no row touches must still take part in the sum over workers."""
        for name, master in self.named.items():
            master.grad = torch.zeros_like(master)
            if self._working[name] is not master:
                self._working[name].grad = None

    def gather_gradients(self) -> None:
        """Add the working gradients of a micro-batch to the float32 ones."""
        for name, master in self.named.items():
            working = self._working[name]
            if working is not master and working.grad is not None:
                assert master.grad is not None, "gradients are cleared before a step"
                master.grad += working.grad.float()
                working.grad = None

    def sum_gradients(self, world: World) -> None:
        """Sum gradients over workers, in one message. Losses are divided by the rows of all workers already."""
        if world.size == 1:
            return
        gradients = [g for p in self if (g := p.grad) is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        world.sum(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    @torch.no_grad()
    def pull(self, factor: float) -> None:
        """Add the gradient of ``factor`` times the mean squared distance from the start."""
        if factor:
            scale = 2 * factor / sum(p.numel() for p in self)
            for name, master in self.named.items():
                assert master.grad is not None, "gradients are cleared before a step"
                master.grad += scale * (master - self._start[name])

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the float32 weights to the working ones."""
        for name, master in self.named.items():
            if self._working[name] is not master:
                self._working[name].copy_(master)

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take weights from a checkpoint."""
        for name, master in self.named.items():
            master.copy_(tensors[name])
        self.publish()

    @torch.no_grad()
    def drift(self) -> float:
        """Distance from the start, relative to the start's own size."""
        moved = sum(float((p - self._start[n]).square().sum()) for n, p in self.named.items())
        size = sum(float(s.square().sum()) for s in self._start.values())
        return float((moved / size) ** 0.5) if size else 0.0
