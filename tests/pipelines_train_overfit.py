"""A tiny model learns eight rows, and what it learned is the method: an independent computation reads its slots too."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from c2kv_core import Compressor, CompressorSpec, slot_attention, slot_stream
from pipelines.train.config import SYSTEM, TrainConfig
from pipelines.train.run import train
from tests import oracle
from tests.pipelines_train_kit import OVERFIT_STEPS, metrics, tiny_model_dir, train_config, tree_row

LEARNED = 0.2
"""Mean answer cross-entropy, nats a token, of slots that hold the answers; the start is above 7."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny")


def overfit(tmp_path: Path, model_dir: Path) -> TrainConfig:
    """Train until the trainer itself sees almost no loss."""
    config = train_config(
        tmp_path,
        model_dir,
        documents_per_row=(1, 1),
        ratios=(4,),
        steps=OVERFIT_STEPS,
        batch_rows=8,
        micro_batch_rows=8,
        checkpoint_every_steps=1000,
    )
    report = train(config)
    assert metrics(config)[0]["answer"] > 7
    assert report["last"]["answer"] < LEARNED / 2
    return config


def oracle_loss(config: TrainConfig) -> float:
    """Mean answer cross-entropy over the rows, computed token by token from the exported sidecar."""
    exported = Path(config.output) / config.run / "sidecar"
    made = Compressor.load(CompressorSpec(model=config.model, sidecar=str(exported), ratios=(4,)))
    model, renderer = made.model, made.renderer
    _, prefix = oracle.read(model, [], renderer.prefix_ids(SYSTEM), 0)
    total = 0.0
    with torch.no_grad():
        for place in range(8):
            row = tree_row(place)
            (document,) = row["documents"]
            ids = renderer.document_ids(document["title"], document["text"])
            slots = oracle.extract(model, made.sidecar, ids, 4)
            entries, end = oracle.slot_entries([slots], len(prefix))
            question = renderer.question_ids([{"role": "user", "content": row["question"]}])
            answer = [
                *made.tokenizer(row["answers"][0], add_special_tokens=False)["input_ids"],
                made.tokenizer.eos_token_id,
            ]
            logits, _ = oracle.read(model, [*prefix, *entries], [*question, *answer[:-1]], end)
            told = logits[len(question) - 1 :].log_softmax(-1)
            total -= float(told.gather(1, torch.tensor(answer)[:, None]).mean())
    return total / 8


def test_eight_rows_are_learned(tmp_path: Path, model_dir: Path) -> None:
    config = overfit(tmp_path, model_dir)
    # the export is bfloat16
    assert oracle_loss(config) < LEARNED


def no_own_block(
    attend: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    """Every slot reads the block after its own: of a document of equal blocks, the wrong words."""

    def broken(*args: Tensor, **settings: object) -> Tensor:
        q, slot_k, slot_v, token_k, token_v = args
        ratio = int(str(settings["ratio"]))
        return attend(q, slot_k, slot_v, token_k.roll(-ratio, 2), token_v.roll(-ratio, 2), **settings)

    return broken


def sees_later_slots(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The mask between slots is gone."""

    def broken(*args: Tensor, **settings: object) -> Tensor:
        triu = torch.Tensor.triu
        try:
            torch.Tensor.triu = lambda x, diagonal=0: torch.zeros_like(x)  # type: ignore[method-assign]
            return attend(*args, **settings)
        finally:
            torch.Tensor.triu = triu  # type: ignore[method-assign]

    return broken


@pytest.mark.parametrize("fault", [no_own_block, sees_later_slots], ids=["block", "later slots"])
def test_a_broken_mask_is_noticed(
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Callable[..., Tensor]], Callable[..., Tensor]],
) -> None:
    monkeypatch.setattr(slot_stream, "slot_attention", fault(slot_attention.slot_attention))
    assert oracle_loss(overfit(tmp_path, model_dir)) > 2 * LEARNED


def test_broken_positions_are_noticed(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_block_starts(num_tokens: int, ratio: int) -> Tensor:
        return torch.arange(math.ceil(num_tokens / ratio)) * ratio

    monkeypatch.setattr(slot_stream, "slot_positions", at_block_starts)
    assert oracle_loss(overfit(tmp_path, model_dir)) > 2 * LEARNED
