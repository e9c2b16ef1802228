"""``c2kv bench extract``: what compression costs beside the base model's plain prefill."""

from collections.abc import Callable

import torch

from c2kv_core import Compressor, CompressorSpec
from pipelines.bench.config import BenchExtractConfig
from pipelines.bench.extract_job import measure_driver, measure_job, measure_linearity
from pipelines.bench.memory import peak_bytes
from pipelines.bench.report import BenchReport, Ratio, alternate

EXTRACT_LIMIT = 1.35
"""Bar of extract_over_prefill at k = 4; 1 + 1/k = 1.25 is what the arithmetic asks."""
MEMORY_LIMIT = 10.0
"""Bar of peak memory at 8,192 tokens over that at 1,024: linear is 8."""


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
