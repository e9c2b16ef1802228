"""Which models the method is right for. Anything else is refused at load with the reason."""

from typing import Any

from c2kv_core.errors import UnsupportedModelError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral")
"""Dense decoders that share one module layout in transformers."""
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE types whose angles depend on the position alone."""


def check_supported(config: Any) -> None:
    """Refuse a transformers config that breaks the method's maths.

    Raises:
        UnsupportedModelError: names the setting, its value and what is allowed.
    """
    _check_model_type(config)
    _check_attention(config)
    _check_rope(config)


def _refuse(what: str, got: object, allowed: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"unsupported model: {what} is {got!r}; supported: {allowed}")


def _check_model_type(config: Any) -> None:
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise _refuse("model_type", config.model_type, ", ".join(SUPPORTED_MODEL_TYPES))


def _check_attention(config: Any) -> None:
    if config.model_type == "mistral" and getattr(config, "sliding_window", None) is not None:
        raise _refuse(
            "sliding_window",
            config.sliding_window,
            "null (slots of a document must all stay visible to the question)",
        )
    layer_types = getattr(config, "layer_types", None) or []
    windowed = [kind for kind in layer_types if kind != "full_attention"]
    if getattr(config, "use_sliding_window", False) or windowed:
        raise _refuse("sliding window attention", windowed[:1] or True, "full attention in every layer")
    kernel = getattr(config, "_attn_implementation", None)
    if kernel not in (None, "sdpa"):
        # Layers are called without a mask, which only SDPA takes for causal.
        raise _refuse("attn_implementation", kernel, "sdpa")
    if getattr(config, "attention_dropout", 0.0):
        raise _refuse("attention_dropout", config.attention_dropout, "0.0")


def _check_rope(config: Any) -> None:
    rope = rope_parameters(config)
    kind = rope.get("rope_type", "default")
    if any(isinstance(value, dict) for value in rope.values()):
        raise _refuse("RoPE", "different for each layer type", "one RoPE for all layers")
    if kind not in SUPPORTED_ROPE_TYPES:
        raise _refuse(
            "rope_type", kind, f"{', '.join(SUPPORTED_ROPE_TYPES)} (angles must not depend on length)"
        )
    partial = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if partial not in (None, 1, 1.0):
        raise _refuse("partial_rotary_factor", partial, "1.0")


def rope_parameters(config: Any) -> dict[str, Any]:
    """RoPE parameters of a config as a plain dict."""
    return dict(getattr(config, "rope_parameters", None) or {})
