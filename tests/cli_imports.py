"""What needs no model starts without torch and transformers, which take seconds to import."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from c2kv_core.store import KVStore
from pipelines.eval.config import METHOD_NAMES
from pipelines.eval.methods import METHODS

HEAVY = {"torch", "transformers", "ray", "fastapi", "openai"}
COMMAND = f"""
import sys
from c2kv_cli.main import main
try:
    main()
finally:
    sys.stderr.write("imported: " + " ".join(sorted({HEAVY} & set(sys.modules))))
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["extract", "--help"], 0),
        (["keys", "new", "me"], 0),
        (["store", "ls", "{store}"], 0),
        (["extract", "ratos=4"], 2),
        (["train", "stps=4"], 2),
        (["eval", "datas=x"], 2),
        (["serve", "storr=x"], 2),
        (["bench", "store", "layer=4"], 2),
        (["demo", "--no-such-flag"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_commands_without_a_model_start_without_torch(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    store = KVStore.open(tmp_path / "store", create=True)
    given = [argument.format(store=store.uri) for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *given], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.endswith("imported: "), done.stderr


@pytest.mark.parametrize("package", ["c2kv_core", "c2kv_core.store", "c2kv_core.text"])
def test_every_exported_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


def test_exported_functions_hide_the_modules_of_their_names() -> None:
    code = (
        "import c2kv_core.compose, c2kv_core.generate, c2kv_core.store.served\n"
        "from c2kv_core import compose, generate\n"
        "from c2kv_core.store import served\n"
        "assert all(type(f).__name__ == 'function' for f in (compose, generate, served))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_methods_that_help_names_are_those_there_are() -> None:
    assert tuple(METHODS) == METHOD_NAMES
