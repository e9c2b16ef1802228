"""Answer cross-entropy on held-out rows: by ratio, and of full compute and no documents as reference lines."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from c2kv_core import compose, hf_adapter
from pipelines.train.asks import Ask, ask_states, predictions
from pipelines.train.loss import answer_losses
from pipelines.train.prepare import Prepared
from pipelines.train.row import RowError
from pipelines.train.sampler import DocumentSampler, Sample
from pipelines.train.setup import TrainingSetup
from pipelines.train.stream import micro_batches
from pipelines.train.teacher import teacher_states
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
        answer = {name: self._means(rows, self._slot_losses) for name, rows in self._rows.items()}
        return DevRecord(step=step, answer=answer)

    def references(self) -> dict[str, Any]:
        """Losses that no sidecar changes: ``{file: {"full compute": ..., "no documents": ...}}``."""
        return {name: self._means(rows, self._reference_losses) for name, rows in self._rows.items()}

    def _prepare(self, index: int) -> list[Prepared]:
        config, files = self._setup.config, self._setup.dev_files
        fewest, most = config.documents_per_row
        sampler = DocumentSampler(files, fewest=fewest, most=most)
        rows = files[index].rows
        order = np.random.default_rng([config.seed, 4, index]).permutation(len(rows))
        prepared: list[Prepared] = []
        for place in order:
            random = np.random.default_rng([config.seed, 5, index, int(place)])
            sample = sampler.sample(index, rows[int(place)], self._ratios, random=random)
            try:
                prepared.append(self._setup.preparer.prepare(self._at_every_ratio(sample)))
            except RowError:
                continue
            if len(prepared) == config.dev_rows:
                break
        if config.shard_base:
            # Workers that share a base's layers must call them equally often: each evaluates all rows.
            return prepared
        return prepared[self._world.rank :: self._world.size]

    def _at_every_ratio(self, sample: Sample) -> Sample:
        return replace(sample, ratios=tuple((ratio,) * len(sample.documents) for ratio in self._ratios))

    def _means(
        self, rows: list[Prepared], losses: Callable[[Sequence[Prepared]], dict[str, float]]
    ) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        names = [str(ratio) for ratio in self._ratios] + [FULL, NONE, "rows"]
        groups = micro_batches(rows, **self._setup.stream.limits())
        with torch.no_grad():
            for group in groups:
                sums["rows"] += len(group)
                for name, value in losses(group).items():
                    sums[name] += value
        total = sum_numbers(self._world, sums, names, self._setup.device)
        asked = [name for name in names[:-1] if total[name]]
        return {name: total[name] / total["rows"] for name in asked}

    def _slot_losses(self, rows: Sequence[Prepared]) -> dict[str, float]:
        setup = self._setup
        views = setup.objective.views(rows)
        found = {}
        for place, ratio in enumerate(self._ratios):
            asks = [
                Ask(
                    context=compose(setup.model, setup.prefix, views[i][place]),
                    question_ids=row.question_ids,
                    answer_ids=row.answer_ids,
                )
                for i, row in enumerate(rows)
            ]
            found[str(ratio)] = self._ask(asks)
        return found

    def _reference_losses(self, rows: Sequence[Prepared]) -> dict[str, float]:
        setup = self._setup
        pairs = [(row.question_ids, row.answer_ids) for row in rows]
        wanted = predictions(pairs, questions=False, device=setup.device)
        states = teacher_states(setup.model, setup.prefix_ids, rows, wanted)
        logits = hf_adapter.logits(setup.model, states)
        found = {FULL: float(answer_losses(logits, wanted, len(rows)).sum())}
        if setup.prefix is not None:
            asks = [Ask(context=setup.prefix, question_ids=q, answer_ids=a) for q, a in pairs]
            found[NONE] = self._ask(asks)
        return found

    def _ask(self, asks: list[Ask]) -> float:
        pairs = [(a.question_ids, a.answer_ids) for a in asks]
        wanted = predictions(pairs, questions=False, device=self._setup.device)
        states = ask_states(self._setup.model, asks)
        logits = hf_adapter.logits(self._setup.model, states[wanted.rows, wanted.places])
        return float(answer_losses(logits, wanted, len(asks)).sum())
