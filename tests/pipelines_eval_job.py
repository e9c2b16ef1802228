"""The whole job and its commands: form of the report, files, limits, bad input, interruption."""

import _thread
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from c2kv_cli.demo_questions import SYSTEM as DEMO_SYSTEM
from c2kv_cli.main import main
from c2kv_core import SidecarConfig
from c2kv_core.errors import InputError
from c2kv_core.models import load_base
from pipelines.eval.__main__ import main as module_main
from pipelines.eval.config import EvalConfig
from pipelines.eval.evaluate import evaluate
from pipelines.eval.methods import METHODS
from pipelines.train.config import SYSTEM as TRAINED_SYSTEM
from tests.eval_kit import row, write_rows
from tests.tiny_models import random_sidecar, save_tiny_model

NEED_A_CONTROL = {"tuned", "tuned_none"}
"""Tested in pipelines_control."""

ROW_KEYS = {
    "method",
    "ratio",
    "f1",
    "f1_low",
    "f1_high",
    "f1_minus_full",
    "f1_minus_full_low",
    "f1_minus_full_high",
    "exact_match",
    "answer_recall",
    "answer_nll",
    "answer_nll_low",
    "answer_nll_high",
    "bytes_per_source_token",
    "questions",
    "seconds",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(write_rows(tmp_path / "rows.jsonl", [row(place, passage=place // 2) for place in range(6)]))


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``c2kv eval``."""
    monkeypatch.setattr(sys, "argv", ["c2kv", "eval", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def error_line(err: str) -> str:
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    return line


def report(data: str, model_dir: str, **settings: Any) -> dict[str, Any]:
    config = {"ratios": (4, 8), "max_new_tokens": 4, "distractors": 1, "resamples": 200, **settings}
    return evaluate(EvalConfig(data=data, model=model_dir, **config)).to_dict()


def timeless(found: dict[str, Any]) -> dict[str, Any]:
    rows = [{k: v for k, v in r.items() if k != "seconds"} for r in found["methods"]]
    return {**found, "methods": rows, "elapsed_s": None}


def test_every_method_has_its_rows(data: str, model_dir: str) -> None:
    found = report(data, model_dir, methods=tuple(name for name in METHODS if name not in NEED_A_CONTROL))
    assert [(r["method"], r["ratio"]) for r in found["methods"]] == [
        ("full", None),
        ("none", None),
        ("c2kv", 4),
        ("c2kv", 8),
        ("untrained", 4),
        ("untrained", 8),
        ("truncate", 4),
        ("truncate", 8),
        ("reuse", 1),
        ("cacheblend", 1),
    ]
    rows = {(r["method"], r["ratio"]): r for r in found["methods"]}
    # 3 layers, keys and values, 2 heads of 8 elements in bfloat16
    full_bytes = 3 * 2 * 2 * 8 * 2
    assert {
        rows[name, ratio]["bytes_per_source_token"] for name, ratio in (("full", None), ("reuse", 1))
    } == {full_bytes}
    assert rows["none", None]["bytes_per_source_token"] == 0
    assert full_bytes / 4 <= rows["c2kv", 4]["bytes_per_source_token"] < full_bytes / 3.5
    assert rows["truncate", 4]["bytes_per_source_token"] <= rows["c2kv", 4]["bytes_per_source_token"]
    for r in found["methods"]:
        assert set(r) == ROW_KEYS
        assert r["questions"] == 6 and r["seconds"] > 0
        assert r["f1_low"] <= r["f1"] <= r["f1_high"]
        assert r["answer_nll_low"] <= r["answer_nll"] <= r["answer_nll_high"]
        assert (r["f1_minus_full"] is None) == (r["method"] == "full")
    assert (found["sidecar"], found["sidecar_directory"], found["seed"]) == ("untrained", None, 0)
    assert found["config"]["distractors"] == 1
    json.dumps(found)


def test_the_document_names_every_method_and_column() -> None:
    text = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text()
    columns = {key.removesuffix("_low").removesuffix("_high") for key in ROW_KEYS}
    assert [name for name in sorted(columns | set(METHODS)) if f"`{name}`" not in text] == ["method", "ratio"]


def test_training_evaluation_and_demo_ask_alike() -> None:
    assert EvalConfig(data="-").system == TRAINED_SYSTEM == DEMO_SYSTEM


def test_without_full_compute_there_is_no_difference_to_it(data: str, model_dir: str) -> None:
    (found,) = report(data, model_dir, methods=("none",))["methods"]
    assert found["f1_minus_full"] is None


def test_the_same_twice_and_other_contexts_by_another_seed(data: str, model_dir: str) -> None:
    methods = ("full", "c2kv", "truncate")
    once = report(data, model_dir, methods=methods)
    assert timeless(report(data, model_dir, methods=methods)) == timeless(once)
    other = report(data, model_dir, methods=methods, seed=1)
    assert [r["answer_nll"] for r in other["methods"]] != [r["answer_nll"] for r in once["methods"]]


def test_a_row_does_not_depend_on_the_other_methods(data: str, model_dir: str) -> None:
    (alone,) = report(data, model_dir, methods=("c2kv",), ratios=(8,))["methods"]
    together = report(data, model_dir, methods=("full", "cacheblend", "c2kv"))["methods"][-1]
    assert alone["ratio"] == together["ratio"] == 8
    # several ratios share one pass over the tokens, so this is exact
    assert (alone["f1"], alone["answer_nll"]) == (together["f1"], together["answer_nll"])


def test_limit_and_predictions(data: str, model_dir: str, tmp_path: Path) -> None:
    target = tmp_path / "predictions.jsonl"
    found = report(data, model_dir, methods=("full", "c2kv"), limit=3, predictions=str(target))
    assert {r["questions"] for r in found["methods"]} == {3}
    said = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(said) == 3 * 3
    full = [s for s in said if s["method"] == "full"]
    assert sum(s["nll"] for s in full) / 3 == pytest.approx(found["methods"][0]["answer_nll"])
    assert sum(s["f1"] for s in full) / 3 == pytest.approx(found["methods"][0]["f1"])
    assert set(said[0]) >= {"question_id", "prediction", "answers", "exact_match", "answer_recall"}


def test_a_trained_sidecar_is_named_and_used(data: str, model_dir: str, tmp_path: Path) -> None:
    model, _ = load_base(model_dir)
    random_sidecar(model, SidecarConfig(ratios=(4,), trained=True)).save(tmp_path / "sidecar")
    found = report(
        data, model_dir, methods=("c2kv", "untrained"), ratios=(4,), sidecar=str(tmp_path / "sidecar")
    )
    assert (found["sidecar"], found["sidecar_directory"]) == ("trained", str(tmp_path / "sidecar"))
    trained, untrained = found["methods"]
    assert trained["answer_nll"] != untrained["answer_nll"]


def test_questions_beyond_the_model_are_left_out_for_every_method(tmp_path: Path, model_dir: str) -> None:
    huge = {"id": "huge", "title": "", "text": "The oak is tall. " * 1500}
    file = write_rows(
        tmp_path / "rows.jsonl", [row(0), row(1, documents=[huge], supporting=["huge"]), row(2)]
    )
    found = report(str(file), model_dir, methods=("full", "none"), distractors=0)
    assert {r["questions"] for r in found["methods"]} == {2}
    (skipped,) = found["skipped"]
    assert skipped["id"] == "q-1"
    assert "the model has 4096" in skipped["reason"]
    only = write_rows(tmp_path / "only.jsonl", [row(1, documents=[huge], supporting=["huge"])])
    with pytest.raises(InputError, match="no question fits the model"):
        report(str(only), model_dir, methods=("none",), distractors=0)


def test_the_command_prints_one_object_or_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: str, model_dir: str
) -> None:
    base = ["--data", data, "--model", model_dir, "--methods", "full, c2kv", "--ratio", "8", "--limit", "2"]
    settings = ["max_new_tokens=3", "resamples=100"]
    code, out, _ = run(monkeypatch, capsys, *base, "--json", *settings)
    assert code == 0
    assert [(r["method"], r["ratio"]) for r in json.loads(out)["methods"]] == [("full", None), ("c2kv", 8)]
    code, out, err = run(monkeypatch, capsys, *base, *settings)
    assert code == 0
    told = [line for line in err.splitlines() if line.startswith(("loading the model", "evaluating"))]
    assert told[0] == "loading the model ..."
    assert told[1].startswith("evaluating: 0 of ") and told[-1].endswith(" questions")
    assert "answer NLL" in out and "c2kv" in out and "The sidecar is untrained" in out


def test_the_module_form_prints_the_same_report(
    capsys: pytest.CaptureFixture[str], data: str, model_dir: str, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(f"data: {data}\nmodel: {model_dir}\nmethods: [none]\n")
    assert module_main(["--config", str(tmp_path / "run.yaml"), "max_new_tokens=2", "limit=2"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["limit"] == 2


BAD = [
    (["--data", "nowhere.jsonl"], "expected a question file at nowhere.jsonl, found none"),
    (["--methods", "full,c2kb"], "unknown method 'c2kb'; did you mean 'c2kv'?"),
    (["--model", "./nowhere"], "expected a Hugging Face directory at nowhere"),
    (["--sidecar", "nowhere"], "expected a sidecar in nowhere"),
    (["--ratio", "0"], "1 or more source tokens per slot, got 0"),
    (["--limit", "0"], "limit: input should be greater than or equal to 1, got 0"),
    (["--predictions", "no/such/folder/p.jsonl"], "cannot write the predictions to no/such/folder"),
    (["distracters=1"], "unknown key 'distracters'; did you mean 'distractors'?"),
    (["distractors=1", "context_tokens=9"], "expected distractors or context_tokens, got both"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[c[0] for c, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: str,
    model_dir: str,
    change: list[str],
    message: str,
) -> None:
    code, out, err = run(monkeypatch, capsys, "--data", data, "--model", model_dir, *change)
    assert message in error_line(err)
    assert (code, out) == (2, "")


def test_a_broken_line_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: str, model_dir: str
) -> None:
    with Path(data).open("a") as file:
        file.write('{"id": \n')
    code, _, err = run(monkeypatch, capsys, "--data", data, "--model", model_dir)
    assert (code, "line 7: broken JSON" in error_line(err)) == (2, True)


def test_an_interrupted_run_exits_130_and_leaves_whole_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, model_dir: str
) -> None:
    data = write_rows(tmp_path / "many.jsonl", [row(place) for place in range(2000)])
    target = tmp_path / "predictions.jsonl"

    def interrupt_after_the_first_answer() -> None:
        while not (target.is_file() and target.stat().st_size):
            time.sleep(0.01)
        _thread.interrupt_main()

    threading.Thread(target=interrupt_after_the_first_answer, daemon=True).start()
    code, out, err = run(
        monkeypatch, capsys, "--data", str(data), "--model", model_dir, "--predictions", str(target)
    )
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert all(json.loads(line)["method"] for line in target.read_text().splitlines())
