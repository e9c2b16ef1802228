"""Rules of style that the linters cannot express."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES = 400
FOLDERS = ["c2kv_core", "pipelines", "serve_app", "c2kv_cli", "tests", "examples"]
FILES = sorted(f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py"))

# Spelt in parts, so that this file does not match itself.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def by_path(file: Path) -> str:
    return str(file.relative_to(ROOT))


def broad_handlers(tree: ast.AST) -> Iterator[int]:
    """Line numbers of handlers that catch everything, by whatever name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {ast.unparse(c).removeprefix("builtins.") if c else "everything" for c in caught}
            if names & {"everything", "Exception", "BaseException"}:
                yield node.lineno


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", FILES, ids=by_path)
def test_source_file_keeps_the_rules(file: Path) -> None:
    text = file.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_FILE_LINES, "split it: one concept a file"
    assert not list(broad_handlers(tree)), "name the exceptions that are expected"
    assert not [m for m in imported_modules(tree) if m.startswith("unittest.mock")], "test the real thing"
    assert not UNFINISHED.findall(text), "finish it, or write it into an issue"


@pytest.mark.parametrize("package", ["c2kv_core", "pipelines", "serve_app", "c2kv_cli"])
def test_package_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


@pytest.mark.parametrize(
    "source",
    ["except:", "except Exception:", "except BaseException as e:", "except (ValueError, Exception):"],
)
def test_a_broad_handler_is_found(source: str) -> None:
    assert list(broad_handlers(ast.parse(f"try:\n    pass\n{source}\n    pass\n"))) == [3]


def test_a_narrow_handler_is_allowed() -> None:
    assert not list(broad_handlers(ast.parse("try:\n    pass\nexcept (OSError, ValueError):\n    pass\n")))
