"""Configuration of an evaluation run."""

from typing import Self

from pydantic import Field, model_validator

from c2kv_core import CompressorSpec
from c2kv_core.config import Config
from c2kv_core.text import SYSTEM

METHOD_NAMES = ("full", "none", "c2kv", "untrained", "truncate", "reuse", "cacheblend", "tuned", "tuned_none")
"""What an evaluation can compare; ``pipelines.eval.methods`` says what each is."""


class EvalConfig(Config):
    """One evaluation: which questions, by which methods, over which model and sidecar."""

    data: str
    """JSONL(.gz) file, one object a line with id, documents, question and answers."""
    methods: tuple[str, ...] = Field(default=("full", "none", "c2kv"), min_length=1)
    """Names of methods, in the order of the table."""
    model: str = "smollm2-135m-instruct"
    """Alias, Hugging Face directory or hub id of the base model."""
    sidecar: str | None = None
    """Sidecar directory; null takes the one shipped for the model, else an untrained one."""
    tuned: str | None = None
    """Control that was tuned with full documents (`c2kv train control=full`), for the method ``tuned``."""
    tuned_none: str | None = None
    """Control that was tuned without documents (`c2kv train control=none`), for the method ``tuned_none``."""
    ratios: tuple[int, ...] = Field(default=(4,), min_length=1)
    """Source tokens per slot; methods with a budget get one row each."""
    force_ratio: bool = False
    """Allow ratios the sidecar was not trained for."""
    limit: int | None = Field(default=None, ge=1)
    """Take only this many questions, drawn by the seed."""
    distractors: int = Field(default=0, ge=0)
    """Documents of other rows of the file that join each question's own."""
    context_tokens: int | None = Field(default=None, ge=1)
    """Fill up each question's documents to about this many tokens instead: supporting, its other ones, distractors."""
    shuffle: bool = True
    """Shuffle the order of each question's documents by the seed; false keeps the file's, distractors last."""
    seed: int = 0
    """Decides which questions, distractors and order of documents, and the resamples of the intervals."""
    system: str | None = SYSTEM
    """System message of every method; null takes the template's own."""
    max_new_tokens: int = Field(default=32, ge=1)
    """Longest answer that is generated, greedily."""
    recompute_share: float = Field(default=0.15, gt=0.0, le=1.0)
    """Share of document tokens that ``cacheblend`` computes again."""
    resamples: int = Field(default=2000, ge=100)
    """Bootstrap resamples of the 95 % intervals."""
    predictions: str | None = None
    """JSONL file for every single answer; null writes none."""
    dtype: str = "float32"
    """Computing dtype."""
    slot_dtype: str = "bfloat16"
    """Dtype in which slots, and reused keys and values, are kept between extraction and use."""
    quantisation: str = "none"
    """Codec by which slots are kept: none or int8."""
    device: str = "cpu"
    """Torch device: cpu or cuda."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads; null leaves them as they are."""

    @model_validator(mode="after")
    def _one_way_to_fill(self) -> Self:
        if self.distractors and self.context_tokens:
            raise ValueError("expected distractors or context_tokens, got both; leave one out")
        return self

    def spec(self) -> CompressorSpec:
        """What compresses."""
        return CompressorSpec(
            model=self.model,
            sidecar=self.sidecar,
            ratios=tuple(dict.fromkeys(self.ratios)),
            force_ratio=self.force_ratio,
            dtype=self.dtype,
            device=self.device,
            slot_dtype=self.slot_dtype,
            quantisation=self.quantisation,
        )
