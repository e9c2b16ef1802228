"""Floating-point operations of training, from shapes: for MFU on a GPU and for planning a run.

A frozen base needs no gradients of its weights: its backward pass costs as much as its forward pass, not twice.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from c2kv_core import hf_adapter

PEAK_FLOPS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
}
"""Dense bfloat16 operations a second by GPU, from the makers' data sheets (SXM forms)."""


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """Tokens that pass through the base in a step."""

    source: int
    """Document tokens, forward only."""
    slots: int
    """Forward and backward."""
    asked: int
    """Question and answer tokens over all views, forward and backward."""
    taught: int
    """Tokens of the teacher's joint contexts, forward only; 0 without distillation."""


def layer_weights(model: PreTrainedModel) -> int:
    """Weights of the decoder layers: what every token passes through."""
    return sum(p.numel() for layer in hf_adapter.decoder_layers(model) for p in layer.parameters())


def step_flops(tokens: StepTokens, *, weights: int, attention_per_token: float = 0.0) -> float:
    """Operations of a step: 2 a weight and token forward, as many again backward.

    Args:
        tokens: what passes.
        weights: of the decoder layers.
        attention_per_token: further operations a token for scores and weighted sums, forward.
    """
    forward = 2 * weights + attention_per_token
    return forward * (tokens.source + tokens.taught) + 2 * forward * (tokens.slots + tokens.asked)


def peak_flops(device: torch.device) -> float | None:
    """Of the GPU; None where it is unknown or no GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for gpu, peak in PEAK_FLOPS.items() if gpu in name), None)
