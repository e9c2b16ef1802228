"""Configuration of the extraction job."""

import os

from pydantic import Field

from c2kv_core import CompressorSpec
from c2kv_core.config import Config


class ExtractConfig(Config):
    """One extraction run: which corpus, by which model and sidecar, into which store."""

    corpus: str
    """JSONL(.gz) or Parquet file, or a folder of these or of .md and .txt files."""
    store: str
    """Directory or ``s3://`` URI of the store; made when absent."""
    model: str = "smollm2-135m-instruct"
    """Alias, Hugging Face directory or hub id of the base model."""
    sidecar: str | None = None
    """Sidecar directory; null takes the one shipped for the model, else an untrained one."""
    ratios: tuple[int, ...] = Field(default=(4,), min_length=1)
    """Source tokens per slot; several are served by one pass over each document."""
    force_ratio: bool = False
    """Allow ratios the sidecar was not trained for."""
    namespace: str = "default"
    """Tenant the documents belong to."""
    limit: int | None = Field(default=None, ge=1)
    """Take only this many documents, from the start of the corpus."""
    slot_dtype: str = "bfloat16"
    """Dtype of slots between extraction and use: float32, bfloat16 or float16."""
    quantisation: str = "none"
    """Codec by which slots are stored: none, or int8 for half the bytes of bfloat16."""
    dtype: str = "float32"
    """Computing dtype."""
    device: str = "cpu"
    """Torch device of an extractor actor: cpu or cuda."""
    actors: int = Field(default=1, ge=1)
    """Extractor actors."""
    num_gpus_per_actor: float = Field(default=0.0, ge=0.0)
    """GPUs each actor reserves."""
    num_cpus_per_actor: float = Field(default=1.0, ge=0.0)
    """Logical CPUs each actor reserves."""
    threads_per_actor: int | None = Field(default=None, ge=1)
    """Torch threads of an actor; null shares the machine's cores out among the actors."""
    documents_per_shard: int = Field(default=16, ge=1)
    """Documents of one shard file, which is also the unit of resumption."""
    keep_text: bool = True
    """Keep source text beside the slots, so that a server can fall back on it."""
    stall_timeout_s: float = Field(default=1800.0, gt=0.0)
    """Seconds without a finished shard after which the run fails with a diagnosis."""

    def threads(self) -> int | None:
        """Torch threads of an actor; None leaves them to Ray, as on a GPU."""
        if self.threads_per_actor is not None or self.num_gpus_per_actor:
            return self.threads_per_actor
        return max(1, (os.cpu_count() or 1) // self.actors)

    def spec(self) -> CompressorSpec:
        """What compresses."""
        return CompressorSpec(
            model=self.model,
            sidecar=self.sidecar,
            ratios=self.ratios,
            force_ratio=self.force_ratio,
            dtype=self.dtype,
            device=self.device,
            slot_dtype=self.slot_dtype,
            quantisation=self.quantisation,
        )
