"""Bad input: one clear line, exit code 2, nothing half-written."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from c2kv_cli.main import main
from c2kv_core.store import KVStore
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"id": "a", "title": "", "text": "The oak is tall."}\n')
    return file


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``c2kv``."""
    monkeypatch.setattr(sys, "argv", ["c2kv", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def error_line(err: str) -> str:
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


BAD_EXTRACT = [
    (["--corpus", "nowhere.jsonl"], "expected a corpus at nowhere.jsonl, found nothing"),
    (["--model", "./nowhere"], "expected a Hugging Face directory at nowhere"),
    (["--ratio", "0"], "1 or more source tokens per slot, got 0"),
    (["--sidecar", "nowhere"], "expected a sidecar in nowhere"),
    (["--limit", "0"], "limit: input should be greater than or equal to 1, got 0"),
    (["--namespace", "Not Valid"], "namespace"),
    (["ratos=4"], "unknown key 'ratos'; did you mean 'ratios'?"),
    (["slot_dtype=int3"], "expected dtype"),
    (["--no-such-flag"], "No such option: --no-such-flag"),
]


@pytest.mark.parametrize(("change", "message"), BAD_EXTRACT, ids=[c[0] for c, _ in BAD_EXTRACT])
def test_extract_refuses_bad_input_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    corpus: Path,
    model_dir: str,
    change: list[str],
    message: str,
) -> None:
    store = tmp_path / "store"
    base = ["--corpus", str(corpus), "--store", str(store), "--model", model_dir]
    code, out, err = run(monkeypatch, capsys, "extract", *base, *change)
    assert message in error_line(err)
    assert (code, out) == (2, "")
    assert not list(store.glob("shards/**/*.arrow"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": "a", "text": "x"}\n{"id"\n', "line 2: broken JSON"),
        ('{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}\n', "(document 2); ids must be unique"),
    ],
)
def test_a_bad_corpus_leaves_no_store_behind(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    corpus: Path,
    model_dir: str,
    text: str,
    message: str,
) -> None:
    corpus.write_text(text)
    store = tmp_path / "store"
    code, _, err = run(
        monkeypatch, capsys, "extract", "--corpus", str(corpus), "--store", str(store), "--model", model_dir
    )
    assert (code, message in error_line(err)) == (2, True)
    assert not store.exists()


def test_a_folder_that_is_no_store_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    corpus: Path,
    model_dir: str,
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    code, _, err = run(
        monkeypatch,
        capsys,
        "extract",
        "--corpus",
        str(corpus),
        "--store",
        str(tmp_path / "mine"),
        "--model",
        model_dir,
    )
    assert code == 2
    assert "store" in error_line(err)
    assert [f.name for f in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    "arguments", [["ls"], ["verify"], ["gc"], ["show", "x"], ["rm", "x"]], ids=lambda a: a[0]
)
def test_store_commands_on_no_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]
) -> None:
    command, *rest = arguments
    code, _, err = run(monkeypatch, capsys, "store", command, str(tmp_path / "none"), *rest)
    assert code == 2
    assert "no store at" in error_line(err)
    assert not (tmp_path / "none").exists()


def test_an_unknown_key_in_a_file_is_named_with_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("corpus: x\nstore: y\nnamspace: z\n")
    code, _, err = run(monkeypatch, capsys, "extract", "--config", str(tmp_path / "run.yaml"))
    assert code == 2
    assert error_line(err).endswith("run.yaml: unknown key 'namspace'; did you mean 'namespace'?")


@pytest.mark.slow
def test_the_module_form_exits_the_same_way(tmp_path: Path, model_dir: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pipelines.extract",
            "corpus=nowhere",
            f"store={tmp_path / 's'}",
            f"model={model_dir}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected a corpus at nowhere" in error_line(done.stderr)
    assert not (tmp_path / "s").exists()


@pytest.mark.ray
@pytest.mark.slow
def test_json_is_one_object_on_stdout_and_store_commands_read_it_back(
    ray_cluster: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    corpus: Path,
    model_dir: str,
) -> None:
    store = str(tmp_path / "store")
    code, out, _ = run(
        monkeypatch,
        capsys,
        "extract",
        "--corpus",
        str(corpus),
        "--store",
        store,
        "--model",
        model_dir,
        "--json",
    )
    report = json.loads(out)
    assert (code, report["extracted"], report["sidecar"]) == (0, 1, "untrained")

    _, out, _ = run(monkeypatch, capsys, "store", "ls", store, "--json")
    (group,) = json.loads(out)["groups"]
    assert (group["documents"], group["fingerprint"], group["ratio"]) == (1, report["fingerprints"]["4"], 4)
    _, out, _ = run(monkeypatch, capsys, "store", "ls", store, "--documents")
    assert [line.split("\t")[-1] for line in out.splitlines()] == ["id", "a"]
    _, out, _ = run(monkeypatch, capsys, "store", "ls", store)
    assert group["sidecar"][:12] in out

    _, out, _ = run(monkeypatch, capsys, "store", "show", store, "a", "--json")
    assert json.loads(out)["records"][0]["source_tokens"] == report["source_tokens"]

    assert "nothing was promoted" in run(monkeypatch, capsys, "store", "served", store)[1]
    run(monkeypatch, capsys, "store", "promote", store, report["fingerprints"]["4"])
    _, out, _ = run(monkeypatch, capsys, "store", "served", store)
    assert out.splitlines()[1].split("\t")[:3] == ["default", "1", report["fingerprints"]["4"][:12]]
    _, out, _ = run(monkeypatch, capsys, "store", "served", store, "--json")
    assert [entry["version"] for entry in json.loads(out)["namespaces"]["default"]] == [1]

    (shard,) = Path(store).glob("shards/**/*.arrow")
    row = KVStore.open(store).rows()[0]
    with shard.open("r+b") as file:
        file.seek(row.offset + row.length - 1)
        last = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([last[0] ^ 1]))
    code, out, err = run(monkeypatch, capsys, "store", "verify", store, "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)
    assert "1 of 1 records are damaged" in error_line(err)

    code, _, err = run(monkeypatch, capsys, "store", "rm", store, "nope")
    assert code == 2
    assert "'nope'" in error_line(err)
    code, out, _ = run(monkeypatch, capsys, "store", "rm", store, "a", "--json")
    assert (code, json.loads(out)) == (0, {"removed": 1, "missing": []})
    code, out, _ = run(monkeypatch, capsys, "store", "gc", store, "--retention-s", "0", "--json")
    assert (code, len(json.loads(out)["removed"])) == (0, 1)
    assert not shard.exists()


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, capsys, "--version") == (0, f"c2kv {version('c2kv')}\n", "")
