"""The workers of a run: one process alone, or a torch process group."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class World:
    """Place of this worker and sums over all of them. This one is alone."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this worker writes what one worker writes for all."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all workers."""

    def broadcast(self, value: int) -> int:
        """The leader's value."""
        return value


class ProcessGroup(World):
    """The default torch process group, which Ray Train sets up."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device = device

    def sum(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def broadcast(self, value: int) -> int:
        shared = torch.tensor([value], device=self._device)
        dist.broadcast(shared, src=0)
        return int(shared.item())


def sum_numbers(
    world: World, numbers: dict[str, float], names: Sequence[str], device: torch.device
) -> dict[str, float]:
    """Sums of named numbers over all workers; absent names count 0."""
    # float64 is exact for counts; a GPU has it too.
    values = torch.tensor([numbers.get(name, 0.0) for name in names], dtype=torch.float64, device=device)
    world.sum(values)
    return dict(zip(names, values.tolist(), strict=True))
