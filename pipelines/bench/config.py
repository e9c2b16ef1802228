"""Configurations of the benchmarks."""

from pydantic import Field, PositiveFloat, PositiveInt

from c2kv_core.config import Config
from pipelines.extract_config import ExtractConfig


class BenchExtractConfig(Config):
    """One document, extracted and prefilled in turn."""

    model: str = "smollm2-135m-instruct"
    """Alias, Hugging Face directory or hub id."""
    sidecar: str | None = None
    """Sidecar directory; null takes the one shipped for the alias, else an untrained one."""
    ratio: int = Field(default=4, ge=1)
    """Source tokens per slot."""
    tokens: int = Field(default=4096, ge=1)
    """Length of the document."""
    repeats: int = Field(default=5, ge=1)
    """Times that each side is measured, in turn; medians are compared."""
    memory_tokens: tuple[PositiveInt, ...] = (1024, 2048, 4096, 8192)
    """Lengths at which peak memory is taken; the first and the last are compared. Empty skips it."""
    job_documents: int = Field(default=96, ge=0)
    """Documents of the Ray job that is compared with the bare loop; 0 leaves that and the time by tokens out."""
    job_words: int = Field(default=300, ge=1)
    """Words of each."""
    job_threads: int | None = Field(default=None, ge=1)
    """Torch threads of the job's actor and of the loop; null takes all cores. Where the machine has other work, threads
    that wait for each other by spinning make the loop look slow: take 1 then."""
    shard_tokens: int = Field(default=2048, ge=1)
    """Of the job; several units are needed to tell a steady state."""
    driver_documents: tuple[PositiveInt, ...] = (1_000, 100_000)
    """Sizes of corpora that are planned for the driver's memory. Empty skips it."""
    dtype: str = "float32"
    """Computing dtype."""
    device: str = "cpu"
    """Torch device: cpu or cuda."""
    num_gpus_per_actor: float = Field(default=0.0, ge=0.0)
    """GPUs that the job's actor reserves."""

    def job(self) -> ExtractConfig:
        """The job to compare; corpus and store are made for it."""
        return ExtractConfig(
            corpus="",
            store="",
            model=self.model,
            sidecar=self.sidecar,
            ratios=(self.ratio,),
            force_ratio=True,
            dtype=self.dtype,
            device=self.device,
            num_gpus_per_actor=self.num_gpus_per_actor,
            shard_tokens=self.shard_tokens,
            threads_per_actor=self.job_threads,
        )


class BenchStoreConfig(Config):
    """Documents of one model's shape, written and read in turn."""

    directory: str | None = None
    """Where the local store goes; null is a temporary directory. It is removed at the end."""
    s3: str | None = None
    """``s3://bucket/prefix`` for the remote half; null leaves it out. What is written there is removed at the end."""
    documents: int = Field(default=8, ge=1)
    """Documents of a request, all in one shard."""
    source_tokens: int = Field(default=1000, ge=1)
    """Of a document."""
    ratio: int = Field(default=4, ge=1)
    """Source tokens per slot."""
    layers: int = Field(default=32, ge=1)
    """Decoder layers of the shape."""
    kv_heads: int = Field(default=8, ge=1)
    """Key and value heads of a layer."""
    head_dim: int = Field(default=128, ge=1)
    """Elements of a head."""
    quantisation: str = "none"
    """Codec by which slots are stored: none or int8."""
    repeats: int = Field(default=5, ge=1)
    """Times that each side is measured, in turn; medians are compared."""
    index_rows: tuple[int, ...] = (1_000, 100_000, 1_000_000)
    """Sizes of the index at which look-ups are timed."""
    lookups: int = Field(default=50, ge=1)
    """Look-ups of eight ids at each size."""


class BenchServeConfig(Config):
    """One load, at several numbers of requests at a time."""

    model: str = "smollm2-135m-instruct"
    """Alias, Hugging Face directory or hub id."""
    sidecar: str | None = None
    """Sidecar directory; null takes the one shipped for the alias, else an untrained one."""
    ratio: int = Field(default=4, ge=1)
    """Source tokens per slot."""
    documents: int = Field(default=8, ge=1)
    """Documents of a request."""
    document_tokens: int = Field(default=512, ge=32)
    """Of a document, about."""
    long_documents: int = Field(default=15, ge=1)
    """Documents of the requests whose decoding is timed over slots and over the full cache."""
    new_tokens: int = Field(default=32, ge=2)
    """Tokens of an answer; the end token is ignored."""
    concurrency: tuple[int, ...] = (1, 4, 16)
    """Numbers of requests at a time."""
    requests_per_place: int = Field(default=2, ge=1)
    """Requests of a level for each that runs at a time; at one at a time, ``repeats``."""
    arrivals_per_s: tuple[PositiveFloat, ...] = (0.5, 1.0)
    """Rates of the open loop over slots in memory; requests arrive at random times, however many are under way."""
    arrivals: int = Field(default=24, ge=1)
    """Requests at each of these rates."""
    repeats: int = Field(default=5, ge=1)
    """Requests of a level of one at a time."""
    prefill_repeats: int = Field(default=2, ge=1)
    """Requests with full prefill at one at a time, which take long."""
    s3: str | None = None
    """``s3://bucket/prefix`` to serve from too; null leaves it out."""
    seed: int = 0
    """Of the words and of which documents a request has."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads of the replica; null takes the cores."""
