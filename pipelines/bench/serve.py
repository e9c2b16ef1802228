"""``c2kv bench serve``: first tokens and throughput from slots, with full prefill, and over a cached full prefix.

Speaks HTTP only, to servers that the command starts. Documents are random words, so that nothing is cached by chance.
"""

import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import httpx

from pipelines.bench.config import BenchServeConfig
from pipelines.bench.load import TIMEOUT_S, LoadError, Sample, closed_loop, open_loop
from pipelines.bench.report import BenchReport, Ratio

TTFT_LIMIT = 30.0
"""Bar of time to first token with full prefill over that from slots in memory, one request at a time."""
THROUGHPUT_LIMIT = 3.0
"""Bar of decoded tokens a second of the most concurrent level over those of one request at a time."""
DECODE_LIMIT = 0.7
"""Bar of time per output token over slots, over that of the full cache."""
OVERHEAD_LIMIT_MS = 15.0
"""Bar of what HTTP and Ray Serve add to a first token."""

_WORDS = [
    a + b
    for a in ("ba", "de", "ki", "lo", "mu", "na", "po", "ru", "sa", "ti")
    for b in ("len", "ver", "mont", "dal", "rick", "sea")
]

Place = Literal["memory", "disk", "s3"]
Server = Callable[[Place], AbstractContextManager[str]]
"""Starts a server whose documents come from a place; gives its URL."""


def bench_serve(config: BenchServeConfig, server: Server) -> BenchReport:
    """Measure ``warm_ttft_speedup``, ``throughput_16_over_1``, ``decode_slots_over_full``, ``overhead_ms_of_bar``."""
    report = BenchReport(name="serve")
    corpus = _corpus(config)
    with server("memory") as url:
        _put(url, corpus)
        memory = _levels(report, config, url, "memory", lambda n: _slots(config, corpus, n))
        _arrivals(report, config, url, corpus)
        prefill = _levels(report, config, url, "full_prefill", lambda n: _inline(config, corpus, n))
        prefix = _levels(
            report, config, url, "full_prefix_cached", lambda n: _prefix(config, corpus), warm=True
        )
        slots_s, full_s = _decoding(config, url, corpus)
    for place in ("disk", "s3") if config.s3 else ("disk",):
        with server(place) as url:
            if place == "s3":
                _put(url, corpus)
            _levels(report, config, url, place, lambda n: _slots(config, corpus, n))
    lowest, highest = min(config.concurrency), max(config.concurrency)
    report.ratios = {
        "warm_ttft_speedup": Ratio(
            value=_median_ttft_s(prefill[lowest]) / _median_ttft_s(memory[lowest]),
            baseline=f"TTFT from slots in memory, {_tokens(memory[lowest]):,} prompt tokens, warm",
            limit=TTFT_LIMIT,
            higher_is_better=True,
        ),
        f"throughput_{highest}_over_{lowest}": Ratio(
            value=_decoded_per_s(memory[highest]) / _decoded_per_s(memory[lowest]),
            baseline=f"decoded tokens/s at {lowest}",
            limit=THROUGHPUT_LIMIT,
            higher_is_better=True,
        ),
        "decode_slots_over_full": Ratio(
            value=slots_s / full_s,
            baseline="time per output token over the full cache of the same documents",
            limit=DECODE_LIMIT,
        ),
        "overhead_ms_of_bar": Ratio(
            value=_overhead_ms(memory[lowest]) / OVERHEAD_LIMIT_MS,
            baseline=f"{OVERHEAD_LIMIT_MS:g} ms, of HTTP and Ray Serve at the median first token",
            limit=1.0,
        ),
    }
    ttft = {"slots": memory, "full prefix cached": prefix, "full prefill": prefill}
    report.figures |= {
        "warm_ttft_ms_p50": {name: 1000 * _median_ttft_s(levels[lowest]) for name, levels in ttft.items()},
        "decode_ms_per_token_long": {"slots": 1000 * slots_s, "full": 1000 * full_s},
        "overhead_ms": _overhead_ms(memory[lowest]),
        "break_even_uses": 2,
    }
    return report


def _levels(
    report: BenchReport,
    config: BenchServeConfig,
    url: str,
    name: str,
    body: Callable[[int], dict[str, Any]],
    *,
    warm: bool = False,
) -> dict[int, list[Sample]]:
    """Samples by number of requests at a time; their summary goes into the report."""
    levels = {}
    heavy = name == "full_prefill"
    if not heavy or warm:
        asyncio.run(closed_loop(url, [body(0)], at_once=1))
    for at_once in config.concurrency:
        alone = config.prefill_repeats if heavy else config.repeats
        count = alone if at_once == 1 else at_once * (1 if heavy else config.requests_per_place)
        samples = asyncio.run(closed_loop(url, [body(n) for n in range(count)], at_once=at_once))
        levels[at_once] = samples
        report.figures[f"{name}_at_{at_once}"] = _summary(samples)
    return levels


def _arrivals(report: BenchReport, config: BenchServeConfig, url: str, corpus: dict[str, str]) -> None:
    bodies = [_slots(config, corpus, number) for number in range(config.arrivals)]
    for rate in config.arrivals_per_s:
        samples = asyncio.run(open_loop(url, bodies, arrivals_per_s=rate, seed=config.seed))
        report.figures[f"memory_open_loop_at_{rate:g}_per_s"] = _summary(samples)


def _summary(samples: Sequence[Sample]) -> dict[str, float]:
    ttft = sorted(sample.ttft_s for sample in samples)
    return {
        "ttft_ms_p50": 1000 * statistics.median(ttft),
        "ttft_ms_p95": 1000 * ttft[min(len(ttft) - 1, round(0.95 * (len(ttft) - 1)))],
        "decoded_tokens_per_s": _decoded_per_s(samples),
        "requests_per_s": len(samples) / (max(s.last_s for s in samples) - min(s.sent_s for s in samples)),
        "ms_per_token_p50": 1000 * statistics.median(sample.per_token_s for sample in samples),
    }


def _decoding(config: BenchServeConfig, url: str, corpus: dict[str, str]) -> tuple[float, float]:
    """Seconds of an output token over many documents as slots, and over their full cache; taken in turn."""
    ids = list(corpus)[: config.long_documents]
    bodies = {
        "slots": {"documents": [{"id": doc_id} for doc_id in ids]},
        "full": {"documents": [], "messages": _messages("\n\n".join(corpus[doc_id] for doc_id in ids))},
    }
    taken: dict[str, list[float]] = {name: [] for name in bodies}
    for attempt in range(1 + config.repeats):
        for name, body in bodies.items():
            (sample,) = asyncio.run(closed_loop(url, [{**_body(config), **body}], at_once=1))
            if attempt:  # the first reads or prefills
                taken[name].append(sample.per_token_s)
    return statistics.median(taken["slots"]), statistics.median(taken["full"])


def _corpus(config: BenchServeConfig) -> dict[str, str]:
    """Texts of random words by id; about two tokens a word."""
    draw = random.Random(config.seed)
    count = max(config.documents * 3, config.long_documents)
    return {
        f"bench-{n}": " ".join(
            draw.choices(_WORDS, k=round(config.document_tokens / _TOKENS_A_WORD))
        ).capitalize()
        + "."
        for n in range(count)
    }


_TOKENS_A_WORD = 2.35
"""Of these words, by the default model's tokenizer."""


def _put(url: str, corpus: dict[str, str]) -> None:
    async def put_all() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
            for doc_id, text in corpus.items():
                answer = await http.put(f"/v1/documents/{doc_id}", json={"title": "Note", "text": text})
                if answer.status_code != 200:
                    raise LoadError(f"a document was not stored: {answer.status_code} {answer.text[:300]}")

    asyncio.run(put_all())


def _chosen(config: BenchServeConfig, corpus: dict[str, str], number: int) -> list[str]:
    return random.Random(f"{config.seed} {number}").sample(sorted(corpus), config.documents)


def _slots(config: BenchServeConfig, corpus: dict[str, str], number: int) -> dict[str, Any]:
    documents = [{"id": doc_id} for doc_id in _chosen(config, corpus, number)]
    return {**_body(config), "documents": documents}


def _inline(config: BenchServeConfig, corpus: dict[str, str], number: int) -> dict[str, Any]:
    documents = [{"title": "Note", "text": corpus[doc_id]} for doc_id in _chosen(config, corpus, number)]
    return {**_body(config), "documents": documents, "c2kv": {"on_missing": "text"}}


def _prefix(config: BenchServeConfig, corpus: dict[str, str]) -> dict[str, Any]:
    """The same documents as system message, whose full keys and values the server keeps."""
    texts = "\n\n".join(corpus[doc_id] for doc_id in _chosen(config, corpus, 0))
    return {**_body(config), "messages": _messages(texts)}


def _body(config: BenchServeConfig) -> dict[str, Any]:
    return {
        "messages": _messages("You answer questions about the documents."),
        "max_tokens": config.new_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }


def _messages(system: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": "Which place do the notes name most often, and why does it matter?"},
    ]


def _median_ttft_s(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.ttft_s for sample in samples)


def _tokens(samples: Sequence[Sample]) -> int:
    return round(statistics.median(sample.prompt_tokens for sample in samples))


def _decoded_per_s(samples: Sequence[Sample]) -> float:
    """Tokens after the first of each answer, over the time in which any answer was being decoded.

    Raises:
        LoadError: no answer took any.
    """
    spans = sorted((sample.first_s, sample.last_s) for sample in samples)
    busy_s, end_s = 0.0, 0.0
    for first_s, last_s in spans:
        busy_s += max(0.0, last_s - max(first_s, end_s))
        end_s = max(end_s, last_s)
    if not busy_s:
        raise LoadError("each answer came in one piece, so that its decoding has no length; raise new_tokens")
    return sum(sample.tokens - 1 for sample in samples) / busy_s


def _overhead_ms(samples: Sequence[Sample]) -> float:
    return statistics.median(1000 * sample.ttft_s - sample.inside_ms for sample in samples)
