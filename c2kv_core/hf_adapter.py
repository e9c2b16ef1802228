"""The only file that knows names inside transformers' decoder models.

Llama, Qwen2, Qwen3 and Mistral share one module layout. The stock layers are called one by one with an explicit
mask, explicit positions and a cache of ours, so that nothing is inferred from the length of a cache.

Shape legend: B batch, T new tokens, S cached entries, D hidden, K kv heads, Q query heads, H head dim.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import rotate_half
from transformers.utils import logging

from c2kv_core.document import Geometry

T = TypeVar("T")
StockLayer = Any
"""A stock decoder layer, or its attention: their submodules have no static types."""
Rotation = tuple[Tensor, Tensor]
"""cos and sin of a set of positions, each (B, T, H), scaled as the model's RoPE type asks."""


class LayerCache(Protocol):
    """What a stock attention layer asks of a cache."""

    def update(self, keys: Tensor, values: Tensor, layer: int, **extra: Any) -> tuple[Tensor, Tensor]:
        """Take (B, K, T, H) new rotated keys and values; give all (B, K, S+T, H) to attend to."""


class MaskedCache(LayerCache, Protocol):
    """A cache that knows what the next tokens see of it."""

    def mask(self, layer: int, tokens: int, *, device: torch.device) -> Tensor | None:
        """What T new tokens, which see all entries of a layer and each other causally, see, to be asked before
        ``update``: (1, 1 or K, T, S + T) bool; None where stock layers need none."""


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Inside, transformers draws no bar for weights that it reads; commands have bars of their own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def decoder_layers(model: PreTrainedModel) -> list[StockLayer]:
    """The decoder layers in order."""
    return list(model.model.layers)


def geometry(config: PretrainedConfig) -> Geometry:
    """Shape of the KV cache of a model with this config."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Geometry(
        layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads, head_dim=int(head_dim)
    )


def max_positions(model: PreTrainedModel) -> int:
    """Positions the model was made for."""
    return int(model.config.max_position_embeddings)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Token ids that have an embedding are below this."""
    table: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    return int(table.shape[0])


def embed(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """(B, T) ids to (B, T, D) input embeddings."""
    embeddings: Tensor = model.get_input_embeddings()(ids)
    return embeddings


def rotation(model: PreTrainedModel, positions: Tensor) -> Rotation:
    """cos and sin of (B, T) positions from the model's own rotary module, in the model's dtype."""
    like = torch.empty(0, dtype=model.dtype, device=positions.device)
    cos, sin = model.model.rotary_emb(like, position_ids=positions)
    return cos, sin


def rotate(x: Tensor, angles: Rotation) -> Tensor:
    """Apply RoPE to (B, heads, T, H).

    Source: RoFormer (arXiv 2104.09864), in the half-split form that the stock models use.
    """
    cos, sin = (part.unsqueeze(1) for part in angles)
    rotated: Tensor = x * cos + rotate_half(x) * sin
    return rotated


def unrotate(x: Tensor, angles: Rotation) -> Tensor:
    """What ``rotate`` with these angles makes (B, heads, T, H) ``x`` of; a scale of the model's RoPE type is undone."""
    cos, sin = (part.unsqueeze(1) for part in angles)
    turned: Tensor = (x * cos - rotate_half(x) * sin) / (cos.square() + sin.square())
    return turned


def run_layer(
    layer: StockLayer,
    hidden: Tensor,
    *,
    positions: Tensor,
    angles: Rotation,
    cache: LayerCache,
    mask: Tensor | None,
) -> Tensor:
    """One stock decoder layer over (B, T, D); ``mask`` None means plain causal (T > 1) or all visible (T = 1)."""
    out: Tensor = layer(
        hidden,
        attention_mask=mask,
        position_ids=positions,
        cache=cache,
        use_cache=True,
        position_embeddings=angles,
    )
    return out


def project_heads(attention: StockLayer, name: str, projected: Tensor) -> Tensor:
    """(B, T, heads*H) output of the q, k or v projection to (B, heads, T, H), with the model's own norm if any."""
    heads = projected.view(*projected.shape[:-1], -1, attention.head_dim)
    norm = getattr(attention, f"{name}_norm", None)
    if norm is not None:
        heads = norm(heads)
    out: Tensor = heads.transpose(1, 2)
    return out


def added_heads(attention: StockLayer, name: str, added: Tensor, *, normed: Tensor) -> Tensor:
    """How heads (B, heads, T, H) of the k or v projection change when (B, T, heads*H) is added to it.

    Args:
        attention: of the layer.
        name: k or v.
        added: to the base's projection.
        normed: (B, T, D) what the base projects; only a model's own norm makes the change depend on it.
    """
    if getattr(attention, f"{name}_norm", None) is None:
        return project_heads(attention, name, added)
    base = getattr(attention, f"{name}_proj")(normed)
    return project_heads(attention, name, base + added) - project_heads(attention, name, base)


def project_kv(layer: StockLayer, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Keys before RoPE and values (B, K, T, H) of a layer's input (B, T, D)."""
    attention, normed = layer.self_attn, layer.input_layernorm(hidden)
    keys = project_heads(attention, "k", attention.k_proj(normed))
    return keys, project_heads(attention, "v", attention.v_proj(normed))


def inside(layer: StockLayer, body: Callable[..., T], *tensors: Tensor | None) -> T:
    """``body(*tensors)``, which uses submodules of a layer, as if it were the layer's own forward.

    Where a layer's weights are spread over processes (FSDP2), its method ``run_inside`` gathers them for the call.
    """
    gather = getattr(layer, "run_inside", None)
    made: T = body(*tensors) if gather is None else gather(body, *tensors)
    return made


def attention_scale(attention: StockLayer) -> float:
    """Factor on query-key products."""
    return float(attention.scaling)


def finish_layer(layer: StockLayer, hidden: Tensor, attended: Tensor) -> Tensor:
    """Output projection, residual and MLP of a layer: (B, T, D) and (B, T, Q*H) to (B, T, D)."""
    hidden = hidden + layer.self_attn.o_proj(attended)
    out: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return out


def run_model(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    positions: Tensor,
    cache: LayerCache,
    mask: Tensor | Callable[[int], Tensor | None] | None,
) -> Tensor:
    """All layers and the final norm over (B, T) ids at (B, T) positions: (B, T, D).

    ``mask`` may be a function of the layer; see ``run_layer``, and ``for_query_heads`` where kv heads differ.
    """
    hidden = embed(model, ids)
    angles = rotation(model, positions)
    for index, layer in enumerate(decoder_layers(model)):
        own = mask(index) if callable(mask) else mask
        hidden = run_layer(
            layer,
            hidden,
            positions=positions,
            angles=angles,
            cache=cache,
            mask=for_query_heads(layer.self_attn, own),
        )
    return final_norm(model, hidden)


def for_query_heads(attention: StockLayer, mask: Tensor | None) -> Tensor | None:
    """A mask (B, 1 or K, T, S) as (B, 1 or Q, T, S)."""
    if mask is None or mask.shape[1] == 1:
        return mask
    return mask.repeat_interleave(int(attention.num_key_value_groups), dim=1)


def final_norm(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The norm behind the last layer, over (B, T, D)."""
    normed: Tensor = model.model.norm(hidden)
    return normed


def logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """(..., D) final hidden states to (..., vocabulary) logits."""
    out: Tensor = model.get_output_embeddings()(hidden)
    return out


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Ids that end an answer, from the generation config, else from the model config."""
    config = model.generation_config if model.generation_config is not None else model.config
    eos = config.eos_token_id
    if eos is None:
        eos = model.config.eos_token_id
    return frozenset([eos] if isinstance(eos, int) else eos or [])
