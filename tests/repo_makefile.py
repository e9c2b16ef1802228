"""The commands that documents and continuous integration use exist, and no file depends on one machine."""

import re
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PUBLIC_TARGETS = {"venv", "demo", "test", "check", "test-faults", "soak", "fmt", "clean", "help"}

# Spelt in two parts, so that this file does not match itself.
FOREIGN = [
    "/" + r"(work|root|opt|mnt|Users)/\w",
    "/" + r"home/(?!ray/)\w",
    "py" + r"pi\.org",
    "python" + r"hosted\.org",
    r"download\.py" + r"torch\.org",
    r"registry\.npm" + "js",
    "conda" + r"\.anaconda\.org",
]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def tracked_files() -> list[Path]:
    """What git tracks or would track; outside a checkout there is nothing to check."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name.decode() for name in listing.stdout.split(b"\0") if name]
    return [f for f in files if f.is_file()]


def text_of(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def test_public_targets_exist() -> None:
    assert make_targets() >= PUBLIC_TARGETS


def test_help_lists_every_public_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {line.split()[0] for line in shown.splitlines()} >= PUBLIC_TARGETS


@pytest.mark.parametrize(
    "file", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("*/README.md")), ids=lambda f: f.name
)
def test_make_commands_in_documents_exist(file: Path) -> None:
    text = file.read_text()
    in_blocks = re.findall(r"^(?:\$ )?make ([a-z][a-z-]*)", text, re.MULTILINE)
    in_line = re.findall(r"`make ([a-z][a-z-]*)", text)
    assert set(in_blocks + in_line) <= make_targets()


def test_the_demo_installs_no_tools_of_developers() -> None:
    """What make would run on a fresh clone."""
    wanted = {}
    for target in ("demo", "test"):
        command = ["make", "--dry-run", "--always-make", target]
        wanted[target] = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-e ." in wanted["demo"] and "[dev" not in wanted["demo"]
    assert "-e '.[dev,train]'" in wanted["test"]
    assert all(" -q " in line for line in wanted["test"].splitlines() if " pip install " in line)


def test_the_store_of_the_examples_is_no_change_to_commit() -> None:
    assert "./store" in (ROOT / "README.md").read_text()
    if (ROOT / ".git").exists():
        subprocess.run(["git", "check-ignore", "-q", "store/store.json"], cwd=ROOT, check=True)


def test_ci_calls_the_same_targets() -> None:
    script = ROOT / ".ci" / "run"
    lines = script.read_text().splitlines()
    assert "set -euo pipefail" in lines
    assert [line for line in lines if line.startswith("make ")] == [
        "make check",
        "make test",
        "make test-faults",
    ]
    assert script.stat().st_mode & stat.S_IXUSR


def test_no_file_names_a_machine_or_a_registry() -> None:
    pattern = re.compile("|".join(FOREIGN))
    found = []
    for file in tracked_files():
        for number, line in enumerate((text_of(file) or "").splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_constraints_pin_exact_public_versions() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines
    # A local suffix (+cpu) exists in one index only; an editable or a file line on one machine only.
    assert not [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
