"""The training loop of one worker: resume, step, evaluate, save, export."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core.errors import NonFiniteLossError, TrainingError
from pipelines.train.attempts import Attempt
from pipelines.train.board import Board
from pipelines.train.card import model_card
from pipelines.train.checkpoint import Checkpoints, name_of
from pipelines.train.config import TrainConfig
from pipelines.train.curves import draw_curves
from pipelines.train.dev import DevSet
from pipelines.train.export import (
    best_path,
    collect_best,
    export_control,
    export_sidecar,
    load_best,
    save_best,
)
from pipelines.train.extras import check_extras
from pipelines.train.folder import CURVES, REPORT, RunFolder
from pipelines.train.ingest import dropped_rows
from pipelines.train.prepare import Prepared
from pipelines.train.progress import (
    FITTING,
    LOADING,
    MEASURING,
    TRAINING,
    WRITING,
    OnProgress,
    Progress,
    tell_phase,
)
from pipelines.train.records import Records
from pipelines.train.selection import FITTED, start_selection
from pipelines.train.setup import TrainingSetup, set_up
from pipelines.train.state import Best, RunState, restore, state_tensors
from pipelines.train.trainer import NonFiniteLossSignal, StepRecord, Trainer
from pipelines.train.world import World


def train_worker(
    config: TrainConfig,
    world: World,
    *,
    owner: str,
    device: torch.device | None = None,
    shard: Callable[[PreTrainedModel], None] | None = None,
    progress: OnProgress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train until the last step; the leader writes all files.

    Args:
        config: the run.
        world: this worker's place.
        owner: the driver that started this worker, which has claimed the run.
        device: overrides the configuration's.
        shard: spreads the base over the workers.
        progress: called when something else begins, and after every step.
        stop: asked after every step whether to save a checkpoint and leave; only for a single worker.

    Raises:
        KeyboardInterrupt: told to stop; the checkpoint is written.
        InputError: model, data or sidecar cannot be used.
        TrainingError: non-finite loss, a later attempt has taken over, or the storage failed.
    """
    if config.threads_per_worker is not None:
        torch.set_num_threads(config.threads_per_worker)
    check_extras(config)
    folder = RunFolder(config)
    claimed = Attempt.claim(folder.storage, owner=owner, renew=True).number if world.leads else 0
    attempt = Attempt(folder.storage, world.broadcast(claimed))
    # The leader alone is watched.
    progress = progress if world.leads else None
    tell_phase(progress, LOADING, steps=config.steps)
    setup = set_up(config, device=device, shard=shard)
    if setup.unfitted and not folder.storage.exists(FITTED):
        tell_phase(progress, FITTING, steps=config.steps)
    start_selection(setup, world, folder)
    run = _Run(setup, world, folder, attempt)
    if not run.resume() and run.dev:
        tell_phase(progress, MEASURING, steps=config.steps)
        run.measure_start()
    record = None
    run.follow(progress, record)
    while run.state.step < config.steps:
        record = run.step()
        run.follow(progress, record)
        if stop() and run.state.step < config.steps:
            run.save()
            raise KeyboardInterrupt
    run.follow(progress, record, phase=WRITING)
    run.finish()


class _Run:
    """One worker's run and what it has so far."""

    def __init__(self, setup: TrainingSetup, world: World, folder: RunFolder, attempt: Attempt) -> None:
        self.setup, self.world, self.folder, self.attempt = setup, world, folder, attempt
        self.config = setup.config
        self.trainer = Trainer(setup, world)
        self.checkpoints = Checkpoints(folder.storage)
        self.dev = DevSet(setup, world)
        self.state = RunState()
        self.records = Records(folder, up_to_step=0)
        self.board: Board | None = None
        self._header = setup.sidecar.header
        self._resumed_at = 0

    def resume(self) -> bool:
        """Go to the newest checkpoint, the same on every worker; gives whether there is any."""
        step, attempt = self._newest()
        if attempt:
            checkpoint = self.checkpoints.read(name_of(step, attempt))
            if checkpoint is None:
                raise TrainingError(
                    f"checkpoint {name_of(step, attempt)} in {self.folder.location} vanished while it was read; "
                    "run the same command again"
                )
            restore(self.trainer, checkpoint.tensors)
            self.state = RunState.from_dict(checkpoint.state)
        self.records = Records(self.folder, up_to_step=self.state.step)
        if self.config.tensorboard and self.world.leads:
            self.board = Board(self.folder, after_step=self.state.step)
        self._resumed_at = self.state.step
        return bool(attempt)

    def measure_start(self) -> None:
        """Held-out losses before the first step, and those that no training changes."""
        self.state.references = self.dev.references()
        self._evaluate()

    def _newest(self) -> tuple[int, int]:
        found = self.checkpoints.newest() if self.world.leads else None
        if self.world.leads:
            self.attempt.record(self.checkpoints.names())
            self.checkpoints.collect(keep=self.config.keep_checkpoints)
        step = self.world.broadcast(int(found.state["step"]) if found else 0)
        attempt = self.world.broadcast(int(found.name.rpartition("-a")[2]) if found else 0)
        return step, attempt

    def step(self) -> StepRecord:
        """One optimizer step, then evaluation and checkpoint where they are due."""
        try:
            record = self.trainer.step(self.state.step + 1)
        except NonFiniteLossSignal as signal:
            raise self._not_finite(signal) from signal
        self.state.count(record)
        self.records.add(record)
        if self.board is not None:
            self.board.add(record)
        last = record.step == self.config.steps
        if self.dev and (last or record.step % self.config.eval_every_steps == 0):
            self._evaluate()
        if last or record.step % self.config.checkpoint_every_steps == 0:
            self.save()
        return record

    def _evaluate(self) -> None:
        record = self.dev.evaluate(self.state.step)
        self.records.add_dev(record)
        if self.board is not None:
            self.board.add_dev(record)
        if self.state.best is None or record.score < self.state.best.score:
            path = best_path(record.step, self.attempt.number)
            if self.world.leads:
                save_best(self.folder, path, dict(self.trainer.weights.named))
            self.state.best = Best(step=record.step, score=record.score, path=path)

    def save(self) -> None:
        """Write a checkpoint, and what is shown of the run."""
        if not self.world.leads:
            return
        self.records.save()
        if self.board is not None:
            self.board.flush()
        if self.config.curves:
            self._draw()
        self.checkpoints.save(
            self.attempt, self.state.step, state_tensors(self.trainer), self.state.to_dict()
        )
        self.checkpoints.collect(keep=self.config.keep_checkpoints)

    def _draw(self) -> None:
        title = f"{self.config.run}: {self.config.model}"
        png = draw_curves(title, self.records.steps, self.records.dev, self.state.references)
        with self.folder.writing():
            self.folder.storage.put(CURVES, png)

    def _not_finite(self, signal: NonFiniteLossSignal) -> NonFiniteLossError:
        path = f"non_finite/step-{signal.step:08d}-rank-{self.world.rank}.json"
        self.folder.put_json(path, [_readable(row) for row in signal.rows])
        return NonFiniteLossError(
            f"the loss is {signal.loss} and its gradient {signal.norm} at step {signal.step}; its rows are in "
            f"{self.folder.location}/{path}; lower lr, or look at these rows; the same command goes on from the last "
            "checkpoint"
        )

    def follow(
        self, progress: OnProgress | None, record: StepRecord | None, *, phase: str = TRAINING
    ) -> None:
        """Tell whoever watches."""
        if progress is not None:
            best = self.state.best.score if self.state.best else None
            progress(
                Progress(
                    phase=phase,
                    step=self.state.step,
                    steps=self.config.steps,
                    record=record,
                    best_score=best,
                )
            )

    def finish(self) -> None:
        """Check that the base is untouched, export, report."""
        # By every worker: a base that is spread over them is gathered together.
        if self.setup.base_tensors_digest() != self.setup.untrained_digest:
            raise TrainingError("the base model's weights changed in training; this is a fault of the job")
        if not self.world.leads:
            return
        self.attempt.require_latest()
        if self.config.curves and not self.folder.storage.exists(CURVES):
            # A finished run may ask for them later.
            self._draw()
        best = self.state.best
        last = {name: p.detach() for name, p in self.trainer.weights.named.items()}
        weights = load_best(self.folder, best.path) if best else last
        self.trainer.weights.load(weights)
        exported_step, drift = best.step if best else self.state.step, self.trainer.weights.drift()
        made = self._export(weights, exported_step, drift)
        collect_best(self.folder, best.path if best else None)
        self.folder.put_json(REPORT, self._report(made, exported_step, drift))

    def _export(self, weights: dict[str, Tensor], exported_step: int, drift: float) -> str:
        """Write the sidecar, or the control; gives its place below the run folder."""
        if self.config.control:
            return export_control(
                self.folder,
                self._header,
                weights,
                documents=self.config.control,
                dtype=self.config.export_dtype,
            )
        card = model_card(
            self.setup,
            self.state,
            steps=self.records.steps,
            dev=self.records.dev,
            exported_step=exported_step,
            drift=drift,
        )
        return export_sidecar(self.folder, self._header, weights, card=card, dtype=self.config.export_dtype)

    def _report(self, made: str, exported_step: int, drift: float) -> dict[str, Any]:
        return {
            "run": self.config.run,
            "folder": self.folder.location,
            made: f"{self.folder.location}/{made}",
            "attempts": self.attempt.starts(),
            "attempt_steps": self.state.step - self._resumed_at,
            "exported_step": exported_step,
            "drift": drift,
            "rows_left_out": dropped_rows(self.setup.files),
            "last": self.records.steps[-1],
            "dev": self.records.dev[-1] if self.records.dev else None,
            **asdict(self.state),
        }


def _readable(row: Prepared) -> dict[str, Any]:
    sample = row.sample
    return {
        "row": sample.row.row_id,
        "file": sample.dataset,
        "ratios": sample.ratios,
        "documents": [d._asdict() for d in sample.documents],
        "question": sample.row.question,
        "answer": sample.row.answer,
        "asked": [asdict(asked) for asked in row.asked],
    }
