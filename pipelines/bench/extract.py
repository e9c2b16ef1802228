"""``c2kv bench extract``: what compression costs beside the base model's plain prefill."""

from collections.abc import Callable

import torch
from pydantic import Field, PositiveInt

from c2kv_core import Compressor, CompressorSpec
from c2kv_core.config import Config
from pipelines.bench.extract_job import measure_driver, measure_job, measure_linearity
from pipelines.bench.memory import peak_bytes
from pipelines.bench.report import BenchReport, Ratio, alternate
from pipelines.extract_config import ExtractConfig

EXTRACT_LIMIT = 1.35
"""Bar of extract_over_prefill at k = 4; 1 + 1/k = 1.25 is what the arithmetic asks."""
MEMORY_LIMIT = 10.0
"""Bar of peak memory at 8,192 tokens over that at 1,024: linear is 8."""


class BenchExtractConfig(Config):
    """One document, extracted and prefilled in turn."""

    model: str = "smollm2-135m-instruct"
    sidecar: str | None = None
    ratio: int = Field(default=4, ge=1)
    tokens: int = Field(default=4096, ge=1)
    """Length of the document."""
    repeats: int = Field(default=5, ge=1)
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
    device: str = "cpu"
    num_gpus_per_actor: float = Field(default=0.0, ge=0.0)

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


def bench_extract(config: BenchExtractConfig) -> BenchReport:
    """Measure ``extract_over_prefill`` and ``memory_growth``, then the job: see ``extract_job``.

    The prefill is the stock model's: SDPA, no mask, cache kept, logits of the last token only.
    """
    report = BenchReport(name="extract")
    measure_driver(report, config.driver_documents)
    compressor = Compressor.load(
        CompressorSpec(
            model=config.model,
            sidecar=config.sidecar,
            ratios=(config.ratio,),
            dtype=config.dtype,
            device=config.device,
        )
    )
    medians = alternate(
        {
            "prefill": _prefill(compressor, config.tokens),
            "extract": _extraction(compressor, config.tokens, config.ratio),
        },
        repeats=config.repeats,
    )
    report.ratios["extract_over_prefill"] = Ratio(
        value=medians["extract"] / medians["prefill"],
        baseline="stock model's plain prefill of the same tokens",
        limit=EXTRACT_LIMIT,
    )
    report.figures |= {
        "tokens": config.tokens,
        "ratio": config.ratio,
        "repeats": config.repeats,
        "prefill_s": medians["prefill"],
        "extract_s": medians["extract"],
        "extract_tokens_per_s": config.tokens / medians["extract"],
    }
    _measure_memory(report, compressor, config)
    del compressor
    if config.job_documents:
        measure_job(report, config.job(), documents=config.job_documents, words=config.job_words)
        measure_linearity(report, config.job(), documents=4, words=config.job_words)
    return report


def _measure_memory(report: BenchReport, compressor: Compressor, config: BenchExtractConfig) -> None:
    peaks = {
        n: peak_bytes(_extraction(compressor, n, config.ratio), config.device) for n in config.memory_tokens
    }
    known = {n: p for n, p in peaks.items() if p is not None}
    report.figures["peak_bytes_above_model"] = peaks
    if len(known) < 2:
        return
    first, last = min(known), max(known)
    report.ratios["memory_growth"] = Ratio(
        value=known[last] / known[first],
        baseline=f"peak above the model at {first} tokens, against {last} tokens ({last / first:g} times as many)",
        limit=MEMORY_LIMIT,
    )


def _ids(compressor: Compressor, tokens: int) -> torch.Tensor:
    vocabulary = compressor.model.config.vocab_size
    return torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def _prefill(compressor: Compressor, tokens: int) -> Callable[[], object]:
    ids = _ids(compressor, tokens).to(compressor.model.device)

    @torch.no_grad()
    def run() -> object:
        return compressor.model(ids, use_cache=True, logits_to_keep=1)

    return run


def _extraction(compressor: Compressor, tokens: int, ratio: int) -> Callable[[], object]:
    ids = [_ids(compressor, tokens)[0].tolist()]
    # The bench measures lengths beyond the part a sidecar is trained for; only time and memory count here.
    return lambda: compressor.extractor.extract(ids, ratio, force_ratio=True)
