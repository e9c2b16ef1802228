"""Configuration of the extraction job."""

import shlex
from typing import Literal

from pydantic import Field, model_validator

from c2kv_core import CompressorSpec
from c2kv_core.config import Config
from c2kv_core.cores import usable_cores
from pipelines.corpus import Columns

Attention = Literal["auto", "flash", "efficient", "cudnn", "math"]
"""Kernel behind the model's SDPA attention; auto leaves it to PyTorch."""


class ExtractConfig(Config):
    """One extraction run: which corpus, by which model and sidecar, into which store."""

    corpus: str
    """JSONL or CSV (.gz, .zst) or Parquet file, a folder of these and of .md and .txt files, or a Delta table; local or
    ``s3://``."""
    columns: Columns = Columns()
    """Which column is what."""
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
    partition: tuple[int, int] | None = None
    """``[i, n]``: only documents whose bucket in the store modulo n is i, so that n jobs share a corpus and their
    commits never meet."""
    mode: Literal["sync", "add"] = "sync"
    """sync: new and changed documents; add: only those of which nothing is stored."""
    delete_missing: bool = False
    """Remove documents of the namespace that are no longer in the corpus, at every fingerprint, after all else."""
    max_deleted_fraction: float = Field(default=0.2, ge=0.0, le=1.0)
    """The run is refused when it would remove more than this share of the namespace's documents."""
    retry_failed: bool = False
    """Try documents again that failed in an earlier run with this very content."""
    slot_dtype: str = "bfloat16"
    """Dtype of slots between extraction and use: float32, bfloat16 or float16."""
    quantisation: str = "none"
    """Codec by which slots are stored: none, or int8 for half the bytes of bfloat16."""
    dtype: str = "float32"
    """Computing dtype."""
    device: str = "cpu"
    """Torch device of an extractor actor: cpu or cuda."""
    attention: Attention = "auto"
    """Attention kernel of the base model."""
    batch_tokens: int = Field(default=4096, ge=1)
    """Padded tokens of one forward pass; one longer part is a pass of its own."""
    deterministic: bool = False
    """Every part alone in its pass, by deterministic kernels: slots are the same bytes whatever is extracted beside."""
    actors: int = Field(default=1, ge=1)
    """Extractor actors; the most there are, where ``min_actors`` is less."""
    min_actors: int | None = Field(default=None, ge=1)
    """Actors to begin with, where the pool is to grow and shrink with the work; null keeps ``actors`` all the time."""
    num_gpus_per_actor: float = Field(default=0.0, ge=0.0)
    """GPUs each actor reserves."""
    num_cpus_per_actor: float = Field(default=1.0, ge=0.0)
    """Logical CPUs each actor reserves."""
    threads_per_actor: int | None = Field(default=None, ge=1)
    """Torch threads of an actor; null shares the machine's cores out among the actors."""
    plan_processes: int = Field(default=1, ge=1)
    """Processes of the driver that read the corpus for the plan, each a file at a time."""
    readers: int = Field(default=2, ge=1)
    """Tasks that read the corpus at a time."""
    shard_tokens: int = Field(default=16_384, ge=1)
    """Source tokens of one shard file, estimated from bytes; a longer document is a shard of its own. What an actor
    works on at a time, and what is lost when it dies."""
    documents_per_shard: int = Field(default=256, ge=1)
    """Most documents of one shard file."""
    units_at_once: int = Field(default=1, ge=1)
    """Units an actor has in hand: with 2 it writes one while it computes the next, which a GPU needs; each takes the
    memory of its slots."""
    commit_seconds: float = Field(default=20.0, gt=0.0)
    """Finished shards wait this long for company in one commit of the index."""
    commit_documents: int = Field(default=256, ge=1)
    """... or until this many documents wait."""
    max_document_bytes: int = Field(default=64 * 2**20, ge=1)
    """A longer document (title and text, UTF-8) fails without being tried."""
    max_attempts: int = Field(default=3, ge=1)
    """Processes that a document may take down while it is worked on alone, before it is given up."""
    max_failed_fraction: float = Field(default=0.1, ge=0.0, le=1.0)
    """The run stops when more than this share of its documents, and more than 10, have failed."""
    keep_text: bool = True
    """Keep source text beside the slots, so that a server can fall back on it. Counts for documents that are extracted
    from now on: an unchanged one gets no text by it, a changed one loses the text it had without it."""
    stall_timeout_s: float = Field(default=1800.0, gt=0.0)
    """Seconds without a finished shard after which the run fails with a diagnosis."""
    dry_run: bool = False
    """Only say what a run would do, how long it would take and how much it would store."""
    quality_check: str | None = None
    """Command that judges the new slots on a held set when all documents are done: exit code 0 is good. It finds
    ``C2KV_STORE``, ``C2KV_NAMESPACE``, ``C2KV_MODEL``, ``C2KV_SIDECAR``, ``C2KV_RATIO`` and ``C2KV_FINGERPRINT`` in its
    environment. When it fails, the run fails and what is served stays served."""
    quality_timeout_s: float = Field(default=3600.0, gt=0.0)
    """Seconds that the check may take."""
    promote: bool = False
    """Make the new fingerprint the served one of the namespace when everything, the check included, went well. Not for
    a part of the corpus: after jobs with ``partition``, a last one without it finds all done, checks and promotes."""
    promote_ratio: int | None = None
    """Which of the ratios that is; null takes the first."""
    progress_s: float = Field(default=10.0, gt=0.0)
    """Seconds between two lines of progress where there is no terminal."""
    price_per_hour: float | None = Field(default=None, ge=0.0)
    """What an hour of one actor's share of the hardware costs, in any currency; for the report."""

    @model_validator(mode="after")
    def _fits_together(self) -> "ExtractConfig":
        if self.partition is not None and not 0 <= self.partition[0] < self.partition[1]:
            raise ValueError(f"expected partition [i, n] with 0 <= i < n, got {list(self.partition)}")
        if self.min_actors is not None and self.min_actors > self.actors:
            raise ValueError(f"expected min_actors of at most actors ({self.actors}), got {self.min_actors}")
        if self.columns.metadata and not self.keep_text:
            raise ValueError("metadata lies beside the text: columns.metadata needs keep_text")
        if self.promote_ratio is not None and self.promote_ratio not in self.ratios:
            raise ValueError(
                f"expected promote_ratio among ratios {list(self.ratios)}, got {self.promote_ratio}"
            )
        if self.promote and (self.limit is not None or self.partition is not None):
            raise ValueError("promote needs the whole corpus (no limit, no partition): all of it is served")
        if self.quality_check is not None:
            _check_command(self.quality_check)
        if self.delete_missing and (self.limit is not None or self.mode != "sync"):
            raise ValueError("delete_missing needs mode sync and the whole corpus (no limit)")
        return self

    def threads(self) -> int | None:
        """Torch threads of an actor; None leaves them to Ray, as on a GPU."""
        if self.threads_per_actor is not None or self.device != "cpu":
            return self.threads_per_actor
        return max(1, usable_cores() // self.actors)

    @property
    def hardware(self) -> str:
        """What a run's speed depends on, beside the model: for comparing runs."""
        gpus = f"{self.num_gpus_per_actor:g} GPU, " if self.num_gpus_per_actor else ""
        return f"{self.actors} x ({gpus}{self.num_cpus_per_actor:g} CPU), {self.device} {self.dtype}"

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
            # Alone in its pass, a part is the same matrices whatever else is extracted.
            max_batch_tokens=1 if self.deterministic else self.batch_tokens,
        )


def _check_command(command: str) -> None:
    """That a command can be taken apart, long before it is run."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"expected a command as quality_check, got {command!r}: {error}") from error
    if not words or "\0" in command:
        raise ValueError(f"expected a command as quality_check, got {command!r}")
