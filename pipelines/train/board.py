"""TensorBoard files of a run, in the run folder beside its records."""

import tempfile
from pathlib import Path

from pipelines.train.dev import DevRecord
from pipelines.train.folder import TENSORBOARD, RunFolder, writing
from pipelines.train.trainer import StepRecord


class Board:
    """Writes scalars; steps after the one the run goes on from are hidden."""

    def __init__(self, folder: RunFolder, *, after_step: int) -> None:
        """Open the event file; the package is there, as ``check_extras`` says."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._local = folder, Path(f"{folder.storage.uri}/{TENSORBOARD}")
        if "://" in folder.storage.uri:
            # Event files grow; object storage takes whole files only.
            self._local = Path(tempfile.mkdtemp(prefix="c2kv-tensorboard-"))
        with writing(folder.location):
            self._writer = SummaryWriter(str(self._local), purge_step=after_step + 1)

    def add(self, record: StepRecord) -> None:
        """A finished step."""
        scalars = {
            "train/loss": record.loss,
            "train/answer": record.answer,
            "train/gradient_norm": record.gradient_norm,
            "train/learning_rate": record.learning_rate,
            "train/source_tokens_per_s": record.source_tokens / record.elapsed_s,
            "train/rows_per_s": record.rows / record.elapsed_s,
            **{f"train/answer_at_{ratio}": loss for ratio, loss in record.by_ratio.items()},
            **{f"train/{name}": value for name, value in record.parts.items()},
        }
        if record.mfu is not None:
            scalars["train/mfu"] = record.mfu
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, record.step)

    def add_dev(self, record: DevRecord) -> None:
        """An evaluation."""
        for file, by_ratio in record.answer.items():
            for ratio, loss in by_ratio.items():
                self._writer.add_scalar(f"dev/{file}_at_{ratio}", loss, record.step)

    def flush(self) -> None:
        """Make what was added visible."""
        self._writer.flush()
        if "://" in self._folder.storage.uri:
            with writing(self._folder.location):
                for file in self._local.iterdir():
                    self._folder.storage.put(f"{TENSORBOARD}/{file.name}", file.read_bytes())
