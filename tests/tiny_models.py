"""Tiny random models, sidecars and tokenizers: large enough to be wrong in every way that real ones can be."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from c2kv_core.sidecar import Sidecar
from c2kv_core.sidecar_config import SidecarConfig

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 64.0,
        "original_max_position_embeddings": 64,
    },
}
"""RoPE parameters of every supported type, scaled so that short texts already feel the scaling."""

MAX_POSITIONS = 4096
VOCAB_SIZE = 640
"""Of every model; tokenizers have fewer."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_KINDS: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"num_hidden_layers": 3}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_hidden_layers": 2}),
    # head_dim apart from hidden_size / heads, as in the real Qwen3
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"num_hidden_layers": 3, "head_dim": 12}),
    "mistral": (
        MistralConfig,
        MistralForCausalLM,
        {"num_hidden_layers": 2, "num_key_value_heads": 1, "sliding_window": None},
    ),
}
ARCHITECTURES = tuple(_KINDS)


def tiny_config(architecture: str = "llama", rope: str = "default", **changes: Any) -> PretrainedConfig:
    """The config of a tiny model; ``changes`` override its fields."""
    kind, _, own = _KINDS[architecture]
    return kind(**{**_SHAPE, **own, "rope_parameters": dict(ROPES[rope]), **changes})


def new_tiny_model(
    architecture: str = "llama", rope: str = "default", *, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A frozen float32 model of its own, with every weight random: biases and norm weights too."""
    _, model_type, _ = _KINDS[architecture]
    model = model_type(tiny_config(architecture, rope, **changes))
    with torch.no_grad():
        _randomise(model, torch.Generator().manual_seed(seed))
    return model.eval().requires_grad_(False)


@lru_cache(maxsize=64)
def tiny_model(architecture: str = "llama", rope: str = "default") -> PreTrainedModel:
    """A shared model that nobody changes."""
    return new_tiny_model(architecture, rope)


def random_sidecar(
    model: PreTrainedModel, config: SidecarConfig | None = None, *, seed: int = 1, scale: float = 0.3
) -> Sidecar:
    """A sidecar off its start: every tensor moved by noise of ``scale`` times its own size."""
    sidecar = Sidecar.from_base(model, config or SidecarConfig(ratios=tuple(range(1, 10))))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in sidecar.parameters():
            size = float(tensor.std()) if tensor.numel() > 1 else 0.0
            tensor += scale * (size or 0.2) * torch.randn(tensor.shape, generator=random)
    return sidecar


def token_ids(length: int, *, seed: int = 0) -> list[int]:
    """Random ids; seeds give different documents."""
    random = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=random).tolist()


def documents(lengths: Sequence[int]) -> list[list[int]]:
    """One random document a length."""
    return [token_ids(length, seed=place) for place, length in enumerate(lengths)]


def save_tiny_model(
    directory: str | Path,
    architecture: str = "llama",
    rope: str = "default",
    *,
    style: str = "smollm2",
    seed: int = 0,
    max_shard_size: str = "1GB",
    tokenizer: PreTrainedTokenizerFast | None = None,
    **changes: Any,
) -> Path:
    """A Hugging Face directory with model and tokenizer, as ``load_base`` takes it.

    Args:
        directory: made if missing.
        architecture: one of ``ARCHITECTURES``.
        rope: one of ``ROPES``.
        style: tokenizer and chat template, one of ``STYLES``.
        seed: of the weights.
        max_shard_size: small for several weight files.
        tokenizer: instead of the style's.
        **changes: fields of the config.
    """
    chosen = tokenizer or tiny_tokenizer(style)
    changes = {"eos_token_id": chosen.eos_token_id, **changes}
    model = new_tiny_model(architecture, rope, seed=seed, **changes)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    chosen.save_pretrained(directory)
    return Path(directory)


def _randomise(model: nn.Module, random: torch.Generator) -> None:
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, generator=random)
        if "norm" in name:
            tensor.copy_(1.0 + 0.3 * noise)
        elif name.endswith("bias"):
            tensor.copy_(0.3 * noise)
        elif "embed" in name:
            tensor.copy_(noise)
        else:
            # sharp enough that attention prefers some keys over others
            tensor.copy_(1.5 * noise / tensor.shape[-1] ** 0.5)


# ---------------------------------------------------------------- tokenizers

_SENTENCES = (
    "Quercus alpha is an oak. It is tall, and it grows slowly in the forest.",
    "How tall is the oak? The oak is 20 metres tall, said the system to the user.",
    "You are a helpful assistant. The assistant answers the question from the document.\n\nA second paragraph.",
    "Betula beta is a birch; its bark is white, 1234567890. Where does it grow? In the north!",
)

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

_SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN25 = (
    "{%- if messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or message.role == 'assistant' %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_QWEN3 = (
    "{%- if messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}"
    "{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{%- endif %}"
)
_LLAMA3_CHAT = (
    "{{- bos_token }}{%- set date = strftime_now('%d %b %Y') %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date + '\\n\\n' + system + '<|eot_id|>' }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}"
    "{{- '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
_ALTERNATE = (
    "{%- for message in messages %}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
)
_SYSTEM_APART = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
    "{%- set messages = messages[1:] %}{%- endif %}"
)
_MISTRAL = (
    _SYSTEM_APART + "{{- bos_token }}{%- if system is defined %}"
    "{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}{%- endif %}"
    + _ALTERNATE
    + "{%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}"
    "{%- else %}{{- message['content'] + eos_token }}{%- endif %}{%- endfor %}"
)
_MISTRAL_SPM = (
    _SYSTEM_APART + "{{- bos_token }}" + _ALTERNATE + "{%- if message['role'] == 'user' %}"
    "{%- if loop.first and system is defined %}{{- '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}"
    "{%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"
)

_MISTRAL_LEGACY = _MISTRAL_SPM.replace("+ '[/INST]'", "+ ' [/INST]'").replace("' ' + message", "message")


@dataclass(frozen=True, kw_only=True)
class Style:
    """A tokenizer with a chat template, as one family of models has them."""

    template: str
    controls: tuple[str, ...]
    """Control tokens, in order of id from 0."""
    eos: str
    bos: str | None = None
    regex: str | None = _QWEN
    """How words are cut before the byte-level BPE; None is GPT-2's way."""
    sentencepiece: Literal["no", "first", "always"] = "no"
    """BPE over visible blanks with bytes as the fallback; a blank goes before the first word, or every section."""
    lead: str = ""
    """What stands before the first document where all share one user turn."""
    plain: tuple[str, ...] = ()
    """Added tokens that are not control tokens."""
    nfc: bool = False


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA3_CONTROLS = ("<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>", "<|end_header_id|>")
_MISTRAL_CONTROLS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
STYLES: dict[str, Style] = {
    "smollm2": Style(template=_SMOLLM2, controls=_CHATML, eos="<|im_end|>", bos="<|im_start|>", regex=None),
    "qwen2.5": Style(template=_QWEN25, controls=_CHATML, eos="<|im_end|>", nfc=True),
    "qwen3": Style(
        template=_QWEN3, controls=_CHATML, eos="<|im_end|>", plain=("<think>", "</think>"), nfc=True
    ),
    "llama3": Style(
        template=_LLAMA3_CHAT,
        controls=_LLAMA3_CONTROLS,
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        regex=_LLAMA3,
    ),
    "mistral": Style(template=_MISTRAL, controls=_MISTRAL_CONTROLS, eos="</s>", bos="<s>", regex=_LLAMA3),
    "mistral-sentencepiece": Style(
        template=_MISTRAL_SPM,
        controls=_MISTRAL_CONTROLS,
        eos="</s>",
        bos="<s>",
        sentencepiece="first",
        lead="\n\n",
    ),
    "mistral-legacy": Style(
        template=_MISTRAL_LEGACY,
        controls=_MISTRAL_CONTROLS[:3],
        eos="</s>",
        bos="<s>",
        sentencepiece="always",
        lead="\n\n",
    ),
}


@lru_cache(maxsize=16)
def tiny_tokenizer(style: str = "smollm2") -> PreTrainedTokenizerFast:
    """A trained tokenizer with its chat template, one of ``STYLES``; shared."""
    spec = STYLES[style]
    raw = _sentencepiece(spec) if spec.sentencepiece != "no" else _byte_level(spec)
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in spec.plain])
    if spec.bos is not None and style != "smollm2":
        # As the real ones: encoding plain text puts BOS in front, and so does the template.
        raw.post_processor = processors.TemplateProcessing(
            single=f"{spec.bos} $A", special_tokens=[(spec.bos, raw.token_to_id(spec.bos))]
        )
    names = {"bos_token": spec.bos} if spec.bos else {}
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=spec.eos, **names)
    made.chat_template = spec.template
    return made


def _byte_level(spec: Style) -> Tokenizer:
    raw = Tokenizer(models.BPE())
    if spec.nfc:
        raw.normalizer = normalizers.NFC()
    if spec.regex is None:
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        raw.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(spec.regex), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(spec.controls),
        show_progress=False,
    )
    raw.train_from_iterator(_SENTENCES, trainer)
    return raw


def _sentencepiece(spec: Style) -> Tokenizer:
    raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if spec.sentencepiece == "first":
        raw.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    else:
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    of_bytes = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*spec.controls, *of_bytes], show_progress=False
    )
    # A line feed is a byte there, never part of a longer token.
    raw.train_from_iterator([text.replace("\n", " ") for text in _SENTENCES], trainer)
    # The trainer knows no vocabulary entry that is not an added token; bytes are entries only.
    state = json.loads(raw.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in spec.controls]
    return Tokenizer.from_str(json.dumps(state))
