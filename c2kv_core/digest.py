"""Stable digests of tensors, independent of file sharding and of the process that computes them."""

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hashlib import _Hash


def tensors_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 hex over (name, dtype, shape, bytes) in order of name."""
    state = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        update_digest(state, name, tensor)
    return state.hexdigest()


def update_digest(state: "_Hash", name: str, tensor: Tensor) -> None:
    """Add one tensor to a digest."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    state.update(f"{name}\0{dtype}\0{list(tensor.shape)}\0".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    state.update(flat.view(torch.uint8).numpy().data)
