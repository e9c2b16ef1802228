"""Configuration of a training run. Defaults are the paper's recipe; every option beyond it is off."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from c2kv_core import SidecarConfig
from c2kv_core.alias import ALIASES
from c2kv_core.config import Config
from c2kv_core.errors import ConfigError
from c2kv_core.text import SYSTEM

Layout = Literal["auto", "c2kv", "hotpotqa", "2wikimultihopqa", "musique", "longbench"]
"""How a data file's rows are laid out; ``auto`` tells by the keys of each row."""


_FILE = "file://"


class DataFile(Config):
    """One file of rows and its share of the mixture; its path alone stands for one with all defaults."""

    path: str
    """JSON Lines or JSON (a list), also packed (.gz, .zst), or Parquet; local or ``s3://``. Relative paths are below
    ``data_dir``."""
    weight: float | None = Field(default=None, gt=0.0)
    """Share of the drawn rows relative to the other files; null takes the file's number of rows."""
    layout: Layout = "auto"
    """Layout of the rows."""
    licence: str = "not stated"
    """Licence of the data, for the model card."""
    limit: int | None = Field(default=None, ge=1)
    """Take only this many rows, from the start of the file."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, given: Any) -> Any:
        return {"path": given} if isinstance(given, str) else given


class Distillation(Config):
    """Kullback-Leibler divergence from the frozen base over the full joint context."""

    weight: float = Field(default=0.0, ge=0.0)
    """Factor on the divergence; 0 is off."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Divides both sides' logits; the divergence is multiplied by its square."""
    positions: Literal["answer", "question_and_answer"] = "answer"
    """Tokens whose predictions are compared."""


class Reconstruction(Config):
    """Passages of the documents' own text, asked for by the words before them: a look-up, then a copy."""

    weight: float = Field(default=0.0, ge=0.0)
    """Factor on a passage's losses relative to a question's; 0 is off."""
    passages: int = Field(default=1, ge=1)
    """Passages of a row, each from a drawn place of a drawn document."""
    cue_words: int = Field(default=10, ge=1)
    """Words before the passage that the question gives."""
    max_tokens: int = Field(default=32, ge=1)
    """Tokens of a passage."""
    prompt: str = "Continue:"
    """Stands before the cue in the question."""


Ratio = Annotated[int, Field(ge=1)]


class Stage(Config):
    """What a curriculum changes from a step on; what a stage leaves out stays as it was."""

    from_step: int = Field(ge=1)
    """First optimizer step of the stage."""
    ratios: tuple[Ratio, ...] | None = Field(default=None, min_length=1)
    """Source tokens per slot; each document draws one."""
    documents_per_row: tuple[int, int] | None = None
    """Fewest and most documents of a row."""


class TrainConfig(Config):
    """One training run: which data, for which model, how, and where to."""

    data: tuple[DataFile, ...] = Field(min_length=1)
    """Files to draw rows from."""
    dev: tuple[DataFile, ...] = ()
    """Held-out files; the exported sidecar is the best on them. None exports the last one."""
    data_dir: str = "."
    """Folder or ``s3://`` prefix that relative paths of data files are below."""
    output: str
    """Directory that holds run folders (local, or mounted on every node), or ``s3://bucket/prefix``."""
    run: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; the same name goes on where the run stopped."""

    model: str = "smollm2-135m-instruct"
    """Alias, Hugging Face directory or hub id of the frozen base."""
    system: str | None = SYSTEM
    """System message before the documents; null takes the template's own."""
    dtype: str = "float32"
    """Computing dtype of base and slots; the sidecar's own weights are kept in float32."""
    device: str = "cpu"
    """Torch device of a worker: cpu or cuda."""

    ratios: tuple[Ratio, ...] = Field(default=(4,), min_length=1)
    """Source tokens per slot; each document of a row draws one."""
    stages: tuple[Stage, ...] = ()
    """Curriculum: from a step on, other ratios or numbers of documents."""
    views_per_row: int = Field(default=1, ge=1)
    """Times a row is answered in a step, each with ratios of its own; base passes over its documents are shared."""
    questions_per_row: int = Field(default=1, ge=1)
    """Most questions of a row: its own, then others of its file that need no document but those drawn. They share the
    extraction, so that each costs only its own tokens."""
    max_part_tokens: int = Field(default=1024, ge=16)
    """Longest part of a document; longer documents are split."""
    documents_per_row: tuple[int, int] = (2, 10)
    """Fewest and most documents of a row: the supporting ones plus distractors, drawn uniformly."""
    max_row_tokens: int = Field(default=8192, ge=64)
    """Source tokens of a row, question and answer included; longer rows are dropped and counted."""
    pack_words: int = Field(default=0, ge=0)
    """Neighbouring documents of a row are joined into one of up to a number of words that is drawn from 0 to this, so
    that long documents are learned from short passages; 0 keeps them apart."""
    share_documents: int = Field(default=1, ge=1)
    """Rows of a step that are each asked over the documents of all of them, as far as they fit a row: contexts of many
    documents for the extraction of few, where they stand in one micro-batch. 1 leaves each row its own."""
    gap_tokens: int = Field(default=0, ge=0)
    """Most positions that a row leaves free, spread over the places before its documents and before its questions, so
    that slots are found from as far away as in long contexts (positions skipped as in arXiv 2309.10400); 0 is the
    paper."""
    overlap_tokens: int = Field(default=0, ge=0)
    """Tokens before its block that a slot also sees; 0 is the paper."""
    residual: Literal["none", "embed_mean", "embed_last"] = "none"
    """Addition to the slots' first input: nothing (the paper), the mean normed embedding of the block (layer 0's
    projections), or the embedding of the block's last token."""
    selection: Literal["none", "topk", "heads"] = "none"
    """What keys and values of slots start from: their own projections (the paper), or for each head tokens of the
    document, chosen by a map that is fitted to what the base looks back at while it repeats documents; of ``topk`` each
    head gets one a slot, of ``heads`` one on average, and those that look back more get more."""
    selection_documents: int = Field(default=64, ge=1)
    """Documents of the data that map and shares are fitted to, before the first step."""
    rank: int | None = Field(default=None, ge=1)
    """Rank of the projections' deltas on the base's; null trains full projections, the paper's."""
    control: Literal["full", "none"] | None = None
    """Tune the base itself instead of a sidecar, by deltas of ``rank``, on the same rows with their documents in full
    or without them: what evaluations compare slots with. Passages, ratios and distillation do not apply."""
    init_sidecar: str | None = None
    """Sidecar directory to start from; null starts from the base. One of selection topk may go on as heads."""

    distillation: Distillation = Distillation()
    """From the full joint context; off is the paper."""
    reconstruction: Reconstruction = Reconstruction()
    """Of document text; off is the paper."""
    pull_to_base: float = Field(default=0.0, ge=0.0)
    """Factor on the mean squared distance of the weights from their start; 0 is the paper."""

    steps: int = Field(ge=1)
    """Optimizer steps of the whole run."""
    batch_rows: int = Field(default=32, ge=1)
    """Rows of one optimizer step, over all workers."""
    micro_batch_rows: int = Field(default=4, ge=1)
    """Most rows of one forward and backward pass of a worker."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Most source tokens of one such pass; a longer row is a pass of its own."""
    lr: float = Field(default=5e-5, gt=0.0)
    """Peak learning rate of AdamW."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up."""
    min_lr_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the peak that the cosine ends at."""
    warmup_share: float = Field(default=0.06, ge=0.0, le=1.0)
    """Share of the steps over which the learning rate rises from 0."""
    weight_decay: float = Field(default=0.1, ge=0.0)
    """Of matrices; the slot vector and biases have none."""
    clip_norm: float = Field(default=1.0, gt=0.0)
    """Largest norm of the gradient over all weights."""
    seed: int = 0
    """Decides the order of rows, their documents and ratios, and the start of low-rank projections."""
    gradient_checkpointing: bool = False
    """Compute layers again in the backward pass instead of keeping their activations."""

    num_workers: int = Field(default=0, ge=0)
    """Ray Train workers; 0 trains in this process without Ray."""
    shard_base: bool = False
    """Spread the base's layers over the workers (FSDP2), for bases that do not fit one GPU."""
    num_cpus_per_worker: float = Field(default=1.0, ge=0.0)
    """Logical CPUs each worker reserves."""
    num_gpus_per_worker: float = Field(default=0.0, ge=0.0)
    """GPUs each worker reserves; above 0 the workers talk over NCCL, else over Gloo."""
    threads_per_worker: int | None = Field(default=None, ge=1)
    """Torch threads of a worker; null leaves them as they are."""
    max_failures: int = Field(default=3, ge=0)
    """Times that lost workers are replaced before the run fails."""

    checkpoint_every_steps: int = Field(default=100, ge=1)
    """Optimizer steps between checkpoints."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Complete checkpoints that are kept."""
    eval_every_steps: int = Field(default=100, ge=1)
    """Optimizer steps between evaluations on the held-out rows."""
    dev_rows: int = Field(default=64, ge=1)
    """Held-out rows of each file, from its shuffled start."""
    export_dtype: str = "bfloat16"
    """Dtype of the exported sidecar."""
    tensorboard: bool = True
    """Write TensorBoard files beside the run's metrics."""
    curves: bool = True
    """Draw the curves as a PNG beside the run's metrics."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for fewest, most in (self.documents_per_row, *(s.documents_per_row or (1, 1) for s in self.stages)):
            if not 1 <= fewest <= most:
                raise ValueError(f"expected documents_per_row of 1 <= fewest <= most, got {fewest}, {most}")
        if self.num_workers and self.batch_rows % self.num_workers:
            raise ValueError(
                f"expected batch_rows to be a multiple of num_workers, got {self.batch_rows} and {self.num_workers}"
            )
        if self.batch_rows % (self.share_documents * max(self.num_workers, 1)):
            raise ValueError(
                f"expected batch_rows to be a multiple of share_documents times the workers, got {self.batch_rows} and "
                f"{self.share_documents}"
            )
        if self.shard_base and not self.num_workers:
            raise ValueError("shard_base needs num_workers of 1 or more")
        if self.control and (self.rank is None or self.shard_base or self.init_sidecar):
            raise ValueError("a control needs rank, and neither shard_base nor init_sidecar")
        starts = [stage.from_step for stage in self.stages]
        if starts != sorted(set(starts)):
            raise ValueError(f"expected stages in ascending order of from_step, got {starts}")
        return self

    def ratios_at(self, step: int) -> tuple[int, ...]:
        """Ratios that documents draw from in an optimizer step (from 1)."""
        return next((s.ratios for s in self._stages_before(step) if s.ratios), self.ratios)

    def documents_at(self, step: int) -> tuple[int, int]:
        """Fewest and most documents of a row in an optimizer step (from 1)."""
        stages = self._stages_before(step)
        return next((s.documents_per_row for s in stages if s.documents_per_row), self.documents_per_row)

    def _stages_before(self, step: int) -> list[Stage]:
        """Those that have begun, the latest first."""
        return [stage for stage in reversed(self.stages) if stage.from_step <= step]

    def all_ratios(self) -> tuple[int, ...]:
        """Every ratio the run trains for, ascending."""
        later = [ratio for stage in self.stages for ratio in stage.ratios or ()]
        return tuple(sorted({*self.ratios, *later}))

    def sidecar_config(self, *, trained: bool) -> SidecarConfig:
        """Settings of the sidecar that the run trains."""
        return SidecarConfig(
            ratios=self.all_ratios(),
            max_part_tokens=self.max_part_tokens,
            overlap_tokens=self.overlap_tokens,
            residual=self.residual,
            selection=self.selection,
            rank=self.rank,
            trained=trained,
        )

    def is_below_data_dir(self, file: DataFile) -> bool:
        """Whether a data file's path is relative."""
        return "://" not in file.path and not _local(file.path).is_absolute()

    def absolute(self) -> Self:
        """The same with local paths that mean the same in any folder: Ray Train gives each worker one of its own.

        Raises:
            ConfigError: a home directory that does not exist.
        """
        given = {"data_dir": self.data_dir, "output": self.output, "init_sidecar": self.init_sidecar}
        if _is_directory(self.model):
            given["model"] = self.model
        places = {name: str(_local(p).absolute()) for name, p in given.items() if p and not _is_remote(p)}
        return self.model_copy(update=places)

    def data_path(self, file: DataFile) -> str:
        """Where a data file is: a local path, or ``s3://bucket/key``.

        Raises:
            ConfigError: a home directory that does not exist.
        """
        if not self.is_below_data_dir(file):
            return file.path if _is_remote(file.path) else str(_local(file.path))
        if _is_remote(self.data_dir):
            return f"{self.data_dir.rstrip('/')}/{file.path}"
        return str(_local(self.data_dir) / file.path)


def _is_directory(model: str) -> bool:
    return model not in ALIASES and not _is_remote(model) and Path(model).is_dir()


def _is_remote(path: str) -> bool:
    return "://" in path.removeprefix(_FILE)


def _local(path: str) -> Path:
    try:
        return Path(path.removeprefix(_FILE)).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"expected the path of data, got {path!r}: there is no such home directory"
        ) from error
