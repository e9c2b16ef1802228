"""The model card of an exported sidecar."""

from typing import Any

from c2kv_core.config import to_yaml
from c2kv_core.sidecar import is_fitted
from pipelines.train.dev import FULL, NONE
from pipelines.train.ingest import RowFile
from pipelines.train.setup import TrainingSetup
from pipelines.train.state import RunState


def model_card(
    setup: TrainingSetup,
    state: RunState,
    *,
    steps: list[dict[str, Any]],
    dev: list[dict[str, Any]],
    exported_step: int,
    drift: float,
) -> str:
    """Markdown: data, amounts, losses, held-out table, drift, configuration."""
    config = setup.config
    sections = [
        f"# C2KV sidecar for {config.model}",
        f"Trained by `c2kv train`, run `{config.run}`. The base model's weights are not in here and were not changed "
        f"(digest of its tensors in {config.dtype}: {setup.untrained_digest[:16]} before and after).",
        "## Data",
        _data_table(setup.files),
        f"Rows are drawn by weight with seed {config.seed}; "
        f"{config.documents_per_row[0]} to {config.documents_per_row[1]} documents a row, the supporting ones and "
        "distractors from the same file.",
        "## Training",
        _amounts(state, exported_step, drift, setup),
        "## Losses",
        _loss_table(steps),
    ]
    if dev:
        sections += ["## Held-out answer cross-entropy (nats a token)", _dev_table(state, dev, exported_step)]
    sections += ["## Configuration", f"```yaml\n{to_yaml(config)}```"]
    return "\n\n".join(sections) + "\n"


def _data_table(files: list[RowFile]) -> str:
    rows = [
        [
            f.source.path.rpartition("/")[2],
            f"{len(f.rows):,}",
            _weight(f),
            f.source.licence,
            f"{sum(f.dropped.values()):,}",
        ]
        for f in files
    ]
    return _table(["file", "usable rows", "weight", "licence", "rows left out"], rows)


def _weight(file: RowFile) -> str:
    return "by rows" if file.source.weight is None else f"{file.source.weight:g}"


def _amounts(state: RunState, exported_step: int, drift: float, setup: TrainingSetup) -> str:
    sizes = {name: p.numel() for name, p in setup.sidecar.named_parameters()}
    fitted = sum(size for name, size in sizes.items() if is_fitted(name))
    lines = [
        f"- steps: {state.step:,} of {setup.config.batch_rows} rows; exported: step {exported_step:,}"
        + (" (best on held-out rows)" if state.best else " (last)"),
        f"- rows: {state.rows:,}; source tokens: {state.source_tokens:,}; answer tokens: {state.answer_tokens:,}",
        f"- rows replaced because they did not fit: {state.dropped:,}",
        f"- trained weights: {sum(sizes.values()) - fitted:,}; moved by {drift:.4f} of their size at the start",
        *([f"- weights fitted before the first step: {fitted:,}"] if fitted else []),
        f"- wall time of the steps: {state.seconds:,.0f} s",
    ]
    return "\n".join(lines)


def _loss_table(steps: list[dict[str, Any]]) -> str:
    """Means over tenths of the run."""
    size = max(1, len(steps) // 10)
    rows = []
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        mean = {key: sum(s[key] for s in part) / len(part) for key in ("loss", "answer", "gradient_norm")}
        span = f"{part[0]['step']} to {part[-1]['step']}"
        rows.append([span, *(f"{mean[key]:.4f}" for key in ("loss", "answer", "gradient_norm"))])
    return _table(["steps", "loss", "answer cross-entropy", "gradient norm"], rows)


def _dev_table(state: RunState, dev: list[dict[str, Any]], exported_step: int) -> str:
    chosen = next((d for d in dev if d["step"] == exported_step), dev[-1])
    start = dev[0]
    ratios = list(next(iter(chosen["answer"].values())))
    header = ["file", FULL, NONE, *(f"k = {k}" for k in ratios), *(f"k = {k}, at the start" for k in ratios)]
    rows = []
    for name, answer in chosen["answer"].items():
        lines = state.references.get(name, {})
        fixed = [f"{lines[key]:.3f}" if key in lines else "" for key in (FULL, NONE)]
        now = [f"{answer[k]:.3f}" for k in ratios]
        rows.append([name, *fixed, *now, *(f"{start['answer'][name][k]:.3f}" for k in ratios)])
    return _table(header, rows)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
