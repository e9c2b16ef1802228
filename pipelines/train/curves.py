"""The curves of a run as one PNG: loss by ratio with reference lines, held-out loss, gradient norm, tokens a second."""

import io
from typing import Any

from pipelines.train.dev import FULL, NONE

SMOOTH = 50
"""Windows that a curve is averaged over: about this many points are drawn."""


def draw_curves(
    title: str, steps: list[dict[str, Any]], dev: list[dict[str, Any]], references: dict[str, Any]
) -> bytes:
    """PNG of a run's records, as ``Records`` keeps them; the package is there, as ``check_extras`` says."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(title)
    losses, held_out, norms, speed = figure.subplots(2, 2).flat
    _losses(losses, steps)
    _held_out(held_out, dev, references)
    x, y = _smooth([(s["step"], s["gradient_norm"]) for s in steps])
    norms.plot(x, y)
    norms.set(title="gradient norm before clipping", xlabel="step", yscale="log")
    x, y = _smooth([(s["step"], s["source_tokens"] / s["elapsed_s"]) for s in steps])
    speed.plot(x, y)
    speed.set(title="source tokens a second", xlabel="step", ylim=(0, None))
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=100)
    return out.getvalue()


def _losses(axes: Any, steps: list[dict[str, Any]]) -> None:
    ratios = sorted({ratio for s in steps for ratio in s["by_ratio"]}, key=int)
    for ratio in ratios:
        x, y = _smooth([(s["step"], s["by_ratio"][ratio]) for s in steps if ratio in s["by_ratio"]])
        axes.plot(x, y, label=f"k = {ratio}")
    for name in sorted({name for s in steps for name in s["parts"]}):
        x, y = _smooth([(s["step"], s["parts"][name]) for s in steps if name in s["parts"]])
        axes.plot(x, y, linestyle=":", label=name.replace("_", " "))
    axes.set(title="training: answer cross-entropy (nats a token)", xlabel="step")
    if ratios:
        axes.legend()


def _held_out(axes: Any, dev: list[dict[str, Any]], references: dict[str, Any]) -> None:
    """Means over files; the value at step 0 is that of the sidecar that the run began with."""
    axes.set(title="held-out: answer cross-entropy (nats a token)", xlabel="step")
    if not dev:
        axes.text(0.5, 0.5, "no held-out rows", ha="center", transform=axes.transAxes)
        return
    files = list(dev[0]["answer"])
    for ratio in dev[0]["answer"][files[0]]:
        values = [sum(d["answer"][f][ratio] for f in files) / len(files) for d in dev]
        (line,) = axes.plot([d["step"] for d in dev], values, marker=".", label=f"k = {ratio}")
        axes.axhline(
            values[0],
            linestyle=":",
            linewidth=0.8,
            color=line.get_color(),
            label=f"k = {ratio}, at the start",
        )
    for name, style in ((FULL, "--"), (NONE, "-.")):
        known = [references[f][name] for f in files if name in references.get(f, {})]
        if known:
            axes.axhline(sum(known) / len(known), linestyle=style, color="grey", label=name)
    axes.legend()


def _smooth(points: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
    size = max(1, len(points) // SMOOTH)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return (
        [sum(x for x, _ in group) / len(group) for group in groups],
        [sum(y for _, y in group) / len(group) for group in groups],
    )
