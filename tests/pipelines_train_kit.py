"""Tiny models, rows and configurations for the training tests."""

import json
import random
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.train.config import DataFile, TrainConfig
from pipelines.train.ingest import RowFile, open_rows
from tests.pipelines_sources import write_jsonl
from tests.tiny_models import save_tiny_model

TREES = ("oak", "ash", "birch", "elm", "pine", "yew", "fir", "beech")
OVERFIT_STEPS = 150


def tiny_model_dir(directory: Path) -> Path:
    """A model that is large enough to learn eight answers."""
    return save_tiny_model(directory, hidden_size=96, intermediate_size=192, num_hidden_layers=4)


def tree_row(place: int, **changes: Any) -> dict[str, Any]:
    """A row whose answer only its document tells."""
    words = random.Random(place).choices(["tall", "white", "slow", "bark", "grey"], k=10)
    tree = TREES[place % len(TREES)]
    document = {"id": f"doc-{place}", "title": tree, "text": f"The {tree} grows here. {' '.join(words)}"}
    return {
        "id": f"row-{place}",
        "documents": [document],
        "question": "Which tree is it?",
        "answers": [tree],
        "supporting": [document["id"]],
        **changes,
    }


def tree_file(file: Path, rows: int = 8) -> Path:
    """A data file of such rows."""
    return write_jsonl(file, [tree_row(place) for place in range(rows)])


def train_config(tmp_path: Path, model: Path, **changes: Any) -> TrainConfig:
    """A short run; ``changes`` override its settings."""
    data = tmp_path / "trees.jsonl"
    if not data.exists():
        tree_file(data)
    settings: dict[str, Any] = {
        "data": [{"path": str(data), "licence": "CC0-1.0"}],
        "output": str(tmp_path / "runs"),
        "run": "tiny",
        "model": str(model),
        "ratios": (2, 4),
        "documents_per_row": (1, 3),
        "max_part_tokens": 64,
        "steps": 6,
        "batch_rows": 4,
        "micro_batch_rows": 2,
        "lr": 1e-2,
        "weight_decay": 0.0,
        "checkpoint_every_steps": 2,
        "eval_every_steps": 3,
        "threads_per_worker": 1,
        "tensorboard": False,
        "curves": False,
    }
    return TrainConfig.model_validate({**settings, **changes})


def read_files(config: TrainConfig, files: Sequence[DataFile]) -> list[RowFile]:
    """The rows of data files, as a run of their own takes them in."""
    taken, _ = open_rows(config.model_copy(update={"data": tuple(files), "dev": (), "run": uuid.uuid4().hex}))
    return taken


def files_of(tmp_path: Path, *sizes: int, weights: tuple[float | None, ...] = ()) -> list[RowFile]:
    """Files of so many rows each, taken in."""
    made = [tree_file(tmp_path / f"{place}.jsonl", rows=size) for place, size in enumerate(sizes)]
    given = weights or (None,) * len(sizes)
    sources = tuple(DataFile(path=str(f), weight=w) for f, w in zip(made, given, strict=True))
    return read_files(train_config(tmp_path, Path("unused")), sources)


def losses(config: TrainConfig) -> list[float]:
    """The loss of every step of a run."""
    return [step["loss"] for step in metrics(config)]


def metrics(config: TrainConfig) -> list[dict[str, Any]]:
    """What a run recorded, without wall times."""
    text = (Path(config.output) / config.run / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    return [{key: value for key, value in row.items() if key != "elapsed_s"} for row in rows]
