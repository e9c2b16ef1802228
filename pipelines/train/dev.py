"""Answer cross-entropy on held-out rows: by ratio, and of full compute and no documents as reference lines."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from c2kv_core import ComposedContext
from c2kv_core.errors import CorpusError
from pipelines.train.asks import Ask
from pipelines.train.objective import ask_losses
from pipelines.train.prepare import Prepared
from pipelines.train.row import RowError
from pipelines.train.sampler import DocumentSampler, Sample
from pipelines.train.setup import TrainingSetup
from pipelines.train.sharing import shared_rows
from pipelines.train.stream import micro_batches
from pipelines.train.teacher import full_contexts
from pipelines.train.world import World, sum_numbers

FULL = "full compute"
NONE = "no documents"


@dataclass(frozen=True, kw_only=True)
class DevRecord:
    """Held-out losses after a step, nats a token, means over rows."""

    step: int
    answer: dict[str, dict[str, float]]
    """By file, then by ratio."""

    @property
    def score(self) -> float:
        """Mean over files and ratios: what the best sidecar is chosen by."""
        values = [value for by_ratio in self.answer.values() for value in by_ratio.values()]
        return sum(values) / len(values)


class DevSet:
    """Held-out rows with fixed documents, shared out over the workers."""

    def __init__(self, setup: TrainingSetup, world: World) -> None:
        self._setup, self._world = setup, world
        self._ratios = setup.config.all_ratios()
        self._rows = {f.name: self._prepare(index) for index, f in enumerate(setup.dev_files)}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def evaluate(self, step: int) -> DevRecord:
        """Losses of the sidecar as it is now, every document of a row at the same ratio."""
        answer = {
            name: self._means(rows, self._setup.objective.held_out) for name, rows in self._rows.items()
        }
        return DevRecord(step=step, answer=answer)

    def references(self) -> dict[str, Any]:
        """Losses that no sidecar changes: ``{file: {"full compute": ..., "no documents": ...}}``."""
        return {name: self._means(rows, self._reference_losses) for name, rows in self._rows.items()}

    def _prepare(self, index: int) -> list[Prepared]:
        config, files = self._setup.config, self._setup.dev_files
        # As in training: judged on near documents alone, a run that learns to find far ones would export its start.
        sampler = DocumentSampler(files, pack_words=config.pack_words, gap_tokens=config.gap_tokens)
        rows = files[index].rows
        order = np.random.default_rng([config.seed, 4, index]).permutation(len(rows))
        prepared: list[Prepared] = []
        fault: RowError | None = None
        for place in order:
            random = np.random.default_rng([config.seed, 5, index, int(place)])
            sample = sampler.sample(
                index, rows[int(place)], self._ratios, counts=config.documents_per_row, random=random
            )
            try:
                prepared.append(self._setup.preparer.prepare(self._at_every_ratio(sample)))
            except RowError as error:
                fault = error
                continue
            if len(prepared) == config.dev_rows:
                break
        if not prepared:
            raise CorpusError(
                f"expected rows of {files[index].name} that can be evaluated, found none among {len(rows)}, the last: "
                f"{fault}; raise max_row_tokens or lower documents_per_row"
            )
        if config.share_documents > 1:
            prepared = self._sharing(index, prepared)
        if config.shard_base:
            # Workers that share a base's layers must call them equally often: each evaluates all rows.
            return prepared
        return prepared[self._world.rank :: self._world.size]

    def _sharing(self, index: int, rows: list[Prepared]) -> list[Prepared]:
        """As in training."""
        config, size = self._setup.config, self._setup.config.share_documents
        random = np.random.default_rng([config.seed, 8, index])
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        limits = {
            "max_row_tokens": self._setup.preparer.max_row_tokens,
            "gap_tokens": config.gap_tokens,
        }
        return [row for group in groups for row in shared_rows(group, random=random, **limits)]

    def _at_every_ratio(self, sample: Sample) -> Sample:
        return replace(sample, ratios=tuple((ratio,) * len(sample.documents) for ratio in self._ratios))

    def _means(
        self, rows: list[Prepared], losses: Callable[[Sequence[Prepared]], dict[str, float]]
    ) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        names = [*map(str, self._ratios), "control", FULL, NONE, "rows"]
        groups = micro_batches(rows, **self._setup.stream.limits())
        with torch.no_grad():
            for group in groups:
                sums["rows"] += len(group)
                for name, value in losses(group).items():
                    sums[name] += value
        total = sum_numbers(self._world, sums, names, self._setup.device)
        asked = [name for name in names[:-1] if total[name]]
        return {name: total[name] / total["rows"] for name in asked}

    def _reference_losses(self, rows: Sequence[Prepared]) -> dict[str, float]:
        setup = self._setup
        found = {FULL: self._ask(full_contexts(setup.model, setup.prefix_ids, rows), rows)}
        if setup.prefix is not None:
            found[NONE] = self._ask([setup.prefix] * len(rows), rows)
        return found

    def _ask(self, contexts: Sequence[ComposedContext], rows: Sequence[Prepared]) -> float:
        """Sum over rows."""
        asks = [Ask(context=c, asked=row.asked) for c, row in zip(contexts, rows, strict=True)]
        return float(ask_losses(self._setup.model, asks).sum())
