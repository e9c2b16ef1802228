"""FSDP2 over the frozen base: each worker keeps a slice of every layer, gathered while the layer runs.

Embedding, final norm and output head stay whole on every worker: they are called apart from the layers.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from c2kv_core import hf_adapter


def shard_base(model: PreTrainedModel) -> None:
    """Spread the decoder layers over the default process group, in place."""
    for layer in hf_adapter.decoder_layers(model):
        # Slots use the layer's submodules apart from its forward; this method lets them do so under FSDP's hooks.
        layer.run_inside = _run_inside
        fully_shard(layer, reshard_after_forward=True)
        register_fsdp_forward_method(layer, "run_inside")


def _run_inside(body: Callable[..., Any], *tensors: Tensor) -> Any:
    return body(*tensors)
