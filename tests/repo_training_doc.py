"""What docs/training.md tells to do works; its numbers follow from the models' shapes."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from c2kv_cli.main import main
from c2kv_core import Sidecar, hf_adapter
from c2kv_core.config import load_config
from pipelines.train.config import TrainConfig
from pipelines.train.flops import StepTokens, layer_weights, step_flops
from pipelines.train.folder import MAY_CHANGE
from tests.pipelines_train_kit import read_files, tiny_model_dir

ROOT = Path(__file__).parent.parent
GPUS_FLOPS = 8 * 0.35 * 989e12
ASKED = 60


def qwen3_4b() -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def llama_31_8b() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    return LlamaForCausalLM(config)


def table(column: int) -> dict[str, str]:
    lines = (ROOT / "docs/training.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return {row[0].split(",")[0].split(":")[0]: row[column] for row in rows if len(row) == 3}


@pytest.mark.parametrize(
    ("build", "column", "file"),
    [(qwen3_4b, 1, "train.yaml"), (llama_31_8b, 2, "train-llama-3.1-8b.yaml")],
    ids=["qwen3-4b", "llama-3.1-8b"],
)
def test_the_planning_table_follows_from_shapes(build: object, column: int, file: str) -> None:
    with torch.device("meta"):
        model: PreTrainedModel = build()  # type: ignore[operator]
    config = load_config(TrainConfig, ROOT / "cluster" / file)
    told = table(column)
    weights = layer_weights(model)
    with torch.device("meta"):
        sidecar = Sidecar.from_base(model, config.sidecar_config(trained=True), eos_token_id=0)
    trained = sum(p.numel() for p in sidecar.parameters())
    shape = hf_adapter.geometry(model.config)
    kv_bytes = 10 * 1024 * 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim
    between = 2560 * 2 * shape.layers * model.config.hidden_size
    base = 2 * sum(p.numel() for p in model.parameters())
    assert told["weights of the decoder layers"] == f"{weights / 1e9:.2f} B"
    assert told["sidecar"].endswith(("M", "GB"))
    text = (ROOT / "docs/training.md").read_text()
    for number in (f"{trained / 1e6:.0f} M", f"{base / 1e9:.1f} GB", f"{20 * trained / 1e9:.1f} GB"):
        assert number in text
    assert told["keys and values of ten documents of 1"] == f"{kv_bytes / 1e9:.1f} GB"
    assert told["slot states between layers at ratio 4"] == f"{between / 1e9:.1f} GB"
    total = base + 20 * trained + kv_bytes + between + 4e9
    assert abs(total / 1e9 - float(told["GPU memory"].split()[0])) < 2
    rows = config.steps * config.batch_rows
    source = 6 * 1024
    slots = source * sum(1 / k for k in config.ratios) / len(config.ratios)
    tokens = StepTokens(source=source, slots=int(1.5 * slots), asked=int(1.5 * ASKED), taught=0)
    flops = rows * step_flops(tokens, weights=weights)
    assert told["operations at that length"] == f"{flops:.1e}".replace("e+", "e")
    assert told["time on 8 H100 at 35 % of 989 TFLOP/s"] == f"{flops / GPUS_FLOPS / 60:.0f} min"
    assert told["source tokens"] == f"{rows * source / 1e6:.0f} M"


def block(kind: str, start: str = "") -> str:
    """The first block of code of a kind, or of any line that begins so."""
    text = (ROOT / "docs/training.md").read_text()
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return str(next(found for found in blocks if found.startswith(start)))


def test_the_smallest_run_trains_on_the_row_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.jsonl").write_text(block("json"))
    command, job, *overrides = shlex.split(block("", "c2kv train --data"))
    assert (command, job) == ("c2kv", "train")
    model = tiny_model_dir(tmp_path / "tiny")
    monkeypatch.setattr(sys, "argv", [command, job, *overrides, f"model={model}", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    report = json.loads(capsys.readouterr().out)
    assert (ended.value.code, report["step"], report["rows_left_out"]) == (0, 2, {})


def test_what_a_run_may_go_on_with_is_listed() -> None:
    text = (ROOT / "docs/training.md").read_text()
    listed = text.partition("except for these keys")[2].partition("(`data_dir`")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == MAY_CHANGE


def test_the_way_to_make_a_file_gives_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ask = {"id": "q1", "question": "Who planted it?", "answers": [{"text": "a baker", "answer_start": 9}]}
    squad = {"data": [{"title": "The_oak", "paragraphs": [{"context": "Planted by a baker.", "qas": [ask]}]}]}
    (tmp_path / "train-v1.1.json").write_text(json.dumps(squad))
    exec(block("python"), {})
    recipe = load_config(TrainConfig, ROOT / "examples/train-smollm2.yaml", ["data_dir=."])
    (file,) = read_files(recipe, recipe.data[:1])
    (row,) = file.rows
    assert (row.question, row.answer, row.documents[0].title) == ("Who planted it?", "a baker", "The oak")


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("train-*.yaml")), ids=lambda file: file.stem)
def test_recipes_of_the_default_model_fit_the_package(file: Path) -> None:
    recipe = load_config(TrainConfig, file, [])
    assert recipe.model == "smollm2-135m-instruct"
    assert recipe.all_ratios() == (4, 8, 16)
    weights = 30 * recipe.rank * (3 * 576 + 576 + 2 * 192) if recipe.rank else 0
    assert 0 < 2 * weights < 20e6, "bytes in bfloat16"
    assert all(source.licence != "not stated" for source in (*recipe.data, *recipe.dev))
