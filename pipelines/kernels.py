"""Which kernels torch may choose from."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@contextmanager
def use_attention(name: str) -> Iterator[None]:
    """Inside, the model's attention runs on this kernel; ``auto`` changes nothing.

    Where the kernel cannot do what is asked of it, torch raises RuntimeError.
    """
    if name == "auto":
        yield
        return
    with sdpa_kernel(_BACKENDS[name]):
        yield


def use_deterministic_kernels() -> None:
    """For the rest of this process, torch takes kernels that give the same bits every time, or raises RuntimeError."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
