"""Loading a frozen base model and its tokenizer."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from c2kv_core.alias import ALIASES, converted_directory
from c2kv_core.architecture import check_supported
from c2kv_core.errors import ModelError
from c2kv_core.hf_adapter import quiet_loading

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Names of dtypes in configurations and store records."""


def load_base(
    name_or_path: str, *, dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A frozen causal LM in evaluation mode, and its tokenizer.

    Args:
        name_or_path: alias (``smollm2-135m-instruct``), Hugging Face directory, or hub id (the only case that
            may download, and does not under ``HF_HUB_OFFLINE=1``).
        dtype: computing dtype, by name or as torch's.
        device: where the weights go.

    Raises:
        ModelError: not found or unreadable, or a device that this machine does not have.
        UnsupportedModelError: the architecture breaks the method's maths; refused before weights are read.
    """
    source = model_directory(name_or_path)
    try:
        check_supported(AutoConfig.from_pretrained(source))
        tokenizer = load_tokenizer(source)
        with quiet_loading():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=parse_dtype(dtype), attn_implementation="sdpa", output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _not_loaded(name_or_path, error) from error
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):
        # transformers fills them with random numbers and only warns.
        raise ModelError(
            f"cannot load model {name_or_path!r}: its files lack {len(missing)} tensors, the first is "
            f"{missing[0]}; fetch the model again"
        )
    try:
        model.to(torch.device(device))  # type: ignore[arg-type]
    except (RuntimeError, AssertionError) as error:
        # The latter is what torch raises where it was built without the device's back end.
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"cannot put model {name_or_path!r} on device {str(device)!r}: {reason}; give device=cpu, or install a "
            "build of PyTorch for that device, as the README shows"
        ) from error
    return model.eval().requires_grad_(False), tokenizer


def load_tokenizer(directory: str) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a Hugging Face directory.

    Raises:
        ModelError: it has only a slow one.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(f"{directory} has no fast tokenizer (tokenizer.json), which splitting needs")
    return tokenizer


def resolve_model(name_or_path: str) -> str:
    """Directory or hub id behind a name; an alias is converted on first use."""
    if name_or_path in ALIASES:
        return str(converted_directory(name_or_path))
    looks_like_path = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    path = Path(name_or_path).expanduser()
    if looks_like_path and not (path / "config.json").is_file():
        raise ModelError(f"expected a Hugging Face directory at {path}, found no config.json there")
    return str(path) if path.is_dir() else name_or_path


def model_directory(name_or_path: str) -> str:
    """Local directory of a model's files; a hub id is fetched, unless it is in the local cache already.

    Raises:
        ModelError: not found.
    """
    source = resolve_model(name_or_path)
    if Path(source).is_dir():
        return source
    try:
        return snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"])
    except (OSError, ValueError) as error:
        raise _not_loaded(name_or_path, error) from error


def _not_loaded(name_or_path: str, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()[0]
    return ModelError(
        f"cannot load model {name_or_path!r}: {reason}; give an alias ({', '.join(ALIASES)}), "
        "a Hugging Face directory or a hub id"
    )


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A torch dtype from its name.

    Raises:
        ModelError: not one of ``DTYPES``.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ModelError(f"expected dtype {', '.join(DTYPES)}; got {dtype!r}")
    return DTYPES[dtype]
