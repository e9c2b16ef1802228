"""Settings of a served application."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from c2kv_core.config import Config
from c2kv_core.cores import usable_cores
from c2kv_core.spec import CompressorSpec
from serve_app.caller import Caller

DRAIN_MARGIN_S = 15
"""Seconds between the end of the longest request and the end of its replica."""


class EditionConfig(Config):
    """Another identity of slots over the same base: see ``ServeConfig.editions``."""

    sidecar: str | None = None
    """Sidecar directory or ``s3://`` URI; null takes the one shipped for the alias, else an untrained one."""
    ratio: int = Field(default=4, ge=1)
    """Source tokens per slot."""
    force_ratio: bool = False
    """Allow a ratio the sidecar was not trained for."""
    slot_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of slots between extraction and use."""
    quantisation: Literal["none", "int8"] = "none"
    """Codec by which the store's slots are kept."""


class ServeConfig(Config):
    """One application: one base model and one store, with one sidecar and ratio, or several to go over between."""

    store: str
    """Directory or URI of the store to read."""
    namespace: str = "default"
    """Tenant whose documents are served; requests cannot choose it, keys do."""
    model: str = "smollm2-135m-instruct"
    """Alias, Hugging Face directory or hub id."""
    served_model_name: str | None = None
    """Id under which clients address the model; null takes the last path component of ``model``."""
    sidecar: str | None = None
    """Sidecar directory; null takes the one shipped for the alias, else an untrained one."""
    ratio: int = Field(default=4, ge=1)
    """Source tokens per slot. The store must hold documents of this ratio."""
    force_ratio: bool = False
    """Allow a ratio the sidecar was not trained for."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Computing dtype."""
    device: str = "cpu"
    """Torch device of the model, inside the replica."""
    slot_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of slots between extraction and use; part of their identity."""
    quantisation: Literal["none", "int8"] = "none"
    """Codec by which the store's slots are kept; part of their identity."""

    editions: tuple[EditionConfig, ...] = ()
    """Further identities that can be served: ``c2kv store promote`` makes a namespace's requests go over to one of
    them, or back, without a restart. Until then the settings above count. The base's weights are in memory once."""

    keys_file: str | None = None
    """File of bearer keys (see ``keys``), read anew when it changes; null takes ``C2KV_KEYS``. Without any keys only
    requests from the server's own machine are answered."""
    allow_anonymous: bool = False
    """Answer requests without a key too, in ``namespace``, wherever they come from."""

    access_log: bool = True
    """One line of JSON for each request in the log of the ingress's replica."""

    num_replicas: int = Field(default=1, ge=1)
    """Replicas of the generator, each with its own model; the fewest, where ``max_replicas`` lets their number grow."""
    max_replicas: int | None = Field(default=None, ge=1)
    """Most replicas; null keeps their number. More start while there are more requests than three quarters of
    ``max_running`` a replica."""
    upscale_delay_s: float = Field(default=30.0, ge=0)
    """Seconds of load before a replica is added."""
    downscale_delay_s: float = Field(default=600.0, ge=0)
    """Seconds of idleness before one is drained and removed."""
    routing: Literal["documents", "load"] = "documents"
    """Where requests go: to the replica that holds their documents, the next when it is full; or to the less busy of
    two."""
    num_cpus: float = Field(default=1.0, ge=0)
    """Logical CPUs Ray reserves for a replica."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs Ray reserves for a replica."""
    torch_threads: int | None = Field(default=None, ge=1)
    """Threads of a replica's CPU maths; null shares the cores that affinity and a container's quota leave out among the
    replicas; a GPU needs none."""

    max_running: int = Field(default=16, ge=1)
    """Requests of a replica that are decoded at the same time, in one batch; more wait in the replica."""
    max_running_bytes: int = Field(default=2 * 2**30, ge=1)
    """Memory of a replica for the keys and values of all that run; requests wait until theirs fit."""
    max_ongoing_requests: int = Field(default=32, ge=1)
    """Requests a replica holds, running and waiting. More wait at the ingress."""
    max_queued_requests: int = Field(default=32, ge=1)
    """Requests waiting at the ingress for a replica. More are refused with 503 and Retry-After."""
    retry_after_s: int = Field(default=2, ge=1)
    """Seconds after which a refused client is told to try again."""
    max_request_s: float = Field(default=300.0, gt=0)
    """Longest life of a request, in seconds; it ends with 504 after that.

    The replica's graceful shutdown lasts ``DRAIN_MARGIN_S`` longer, the ingress's twice that, so that no answer is cut
    by a roll-over. The termination grace of a pod must be longer still.
    """
    stall_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that one piece of model work may take before the replica counts as stuck and is replaced."""

    default_max_new_tokens: int = Field(default=256, ge=1)
    """Answer tokens where the request names no limit; less where the model has no room for them."""
    max_new_tokens_limit: int = Field(default=2048, ge=1)
    """Most answer tokens a request may ask for."""
    default_temperature: float = Field(default=0.0, ge=0, le=2)
    """Temperature where the request names none; 0 is greedy, so equal requests get equal answers."""
    max_documents: int = Field(default=64, ge=0)
    """Most documents in a request."""
    max_document_tokens: int = Field(default=65_536, ge=1)
    """Longest document that clients may store, in tokens; it may exceed the model's positions."""
    max_request_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Largest request body, in bytes."""

    memory_cache_bytes: int = Field(default=512 * 2**20, ge=0)
    """Host memory of a replica for slots of documents used before, in bytes; 0 turns this tier off."""
    warm_up_documents: int = Field(default=0, ge=0)
    """Documents that a fresh replica reads before it answers: those that others were asked for most in the last hour.
    The replicas tell each other through ``hot/`` in the store, which they must be allowed to write. 0 turns it off."""
    warm_up_s: float = Field(default=30.0, gt=0)
    """Longest time a fresh replica spends on that, in seconds."""
    disk_cache_dir: str | None = None
    """Folder on a local disk for copies of what is read from a remote store; null keeps none. The replicas of a node
    may share it. Copies are checked like the original, and survive the replica."""
    disk_cache_bytes: int = Field(default=8 * 2**30, ge=1)
    """Most bytes in that folder."""
    disk_cache_max_age_s: float = Field(default=86_400.0, gt=0)
    """Seconds after which a copy is removed whatever its use, so that documents erased in the store do not stay."""
    remake_factor: float = Field(default=2.0, ge=0)
    """A stored document with its text is made anew rather than read where reading is expected to take this many times
    as long, by what recent reads and compressions took; 0 reads always."""
    prefix_cache_bytes: int = Field(default=128 * 2**20, ge=0)
    """Memory of a replica for prefilled system messages, in bytes."""
    index_refresh_s: float = Field(default=5.0, ge=0)
    """Age of a replica's view of the store's index, in seconds, after which it looks for new commits."""
    commit_gather_s: float = Field(default=0.2, ge=0)
    """Seconds that the first of several documents put at the same time waits for others to share its commit."""
    commit_max_documents: int = Field(default=64, ge=1)
    """Most documents of a commit."""
    fetch_threads: int = Field(default=32, ge=1)
    """Requests of a replica whose documents are read at the same time."""
    fetch_timeout_s: float = Field(default=5.0, gt=0)
    """Longest wait of a request for the store, in seconds, and at most half of its deadline. A document that has not
    come by then is treated as ``on_missing`` says."""

    @model_validator(mode="after")
    def _consistent(self) -> "ServeConfig":
        if self.max_running > self.max_ongoing_requests:
            raise ValueError(
                f"expected max_running ({self.max_running}) of at most max_ongoing_requests "
                f"({self.max_ongoing_requests}): a replica cannot run more than it holds"
            )
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ValueError(
                f"expected max_replicas ({self.max_replicas}) of at least num_replicas ({self.num_replicas})"
            )
        if self.default_max_new_tokens > self.max_new_tokens_limit:
            raise ValueError(
                f"expected default_max_new_tokens ({self.default_max_new_tokens}) of at most "
                f"max_new_tokens_limit ({self.max_new_tokens_limit})"
            )
        return self

    @property
    def model_id(self) -> str:
        """Id of the model in the API."""
        return self.served_model_name or Path(self.model).name

    @property
    def most_replicas(self) -> int:
        """Replicas there can be."""
        return self.max_replicas or self.num_replicas

    @property
    def max_waiting(self) -> int:
        """Requests that wait inside a replica."""
        return self.max_ongoing_requests - self.max_running

    @property
    def drain_s(self) -> float:
        """Graceful shutdown of a generator replica, in seconds."""
        return self.max_request_s + DRAIN_MARGIN_S

    def threads(self) -> int | None:
        """Torch threads of a replica; None, for other devices, leaves what Ray derives from its logical CPUs."""
        if self.torch_threads is not None or self.device != "cpu":
            return self.torch_threads
        return max(1, usable_cores() // self.most_replicas)

    def anybody(self) -> Caller:
        """Who asks where no keys are configured."""
        return Caller(name="anybody", namespace=self.namespace)

    def compressor_spec(self) -> CompressorSpec:
        """What compresses documents here: must be what compressed those in the store."""
        return self._spec(
            EditionConfig(
                sidecar=self.sidecar,
                ratio=self.ratio,
                force_ratio=self.force_ratio,
                slot_dtype=self.slot_dtype,
                quantisation=self.quantisation,
            )
        )

    def compressor_specs(self) -> list[CompressorSpec]:
        """That of each edition; the first serves where nothing was promoted."""
        return [self.compressor_spec(), *map(self._spec, self.editions)]

    def _spec(self, edition: EditionConfig) -> CompressorSpec:
        return CompressorSpec(
            model=self.model,
            sidecar=edition.sidecar,
            ratios=(edition.ratio,),
            force_ratio=edition.force_ratio,
            dtype=self.dtype,
            device=self.device,
            slot_dtype=edition.slot_dtype,
            quantisation=edition.quantisation,
        )
