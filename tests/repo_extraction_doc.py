"""docs/extraction.md names what the code has."""

import re
from pathlib import Path
from typing import get_args

from c2kv_core.store import FailureKind
from c2kv_core.store.dead_letters import FAILURES_SCHEMA
from pipelines.corpus.scan import BYTES_PER_DOCUMENT
from pipelines.extract import Phase
from pipelines.extract_config import ExtractConfig
from pipelines.extract_estimate import SAMPLE_DOCUMENTS
from pipelines.extract_metrics import METRICS
from pipelines.extract_units import BYTES_PER_TOKEN
from pipelines.plan import PENDING_BYTES

ROOT = Path(__file__).parent.parent
DOC = (ROOT / "docs" / "extraction.md").read_text()


def test_the_metrics_table_is_the_codes() -> None:
    rows = re.findall(r"^\| `(c2kv_\w+)` \| (\w+) \| (\w+) \| ([\w, ]*) \| (.+) \|$", DOC, re.MULTILINE)
    assert rows == [(n, m.kind, m.where, ", ".join(m.labels), m.description) for n, m in METRICS.items()]


def test_keys_of_the_configuration_exist() -> None:
    keyed = set(re.findall(r"`(\w+): ", DOC)) | set(re.findall(r"`(\w+_\w+)`", DOC))
    known = {*ExtractConfig.model_fields, *METRICS}
    named = {name for name in keyed if not name.startswith("test_") and name not in get_args(FailureKind)}
    assert named - {"too_long"} <= known, named - known


def test_kinds_of_failures_and_columns_are_the_codes() -> None:
    table = DOC.partition("## Documents that do harm")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` ", table, re.MULTILINE)) == set(get_args(FailureKind))
    assert [name for name in FAILURES_SCHEMA.names if name not in DOC and name != "bucket"] == []


def test_phases_and_numbers_are_the_codes() -> None:
    assert [phase for phase in get_args(Phase) if phase not in DOC] == []
    assert f"sample of {SAMPLE_DOCUMENTS} documents" in DOC
    assert f"{BYTES_PER_DOCUMENT} bytes a document while it is made, {PENDING_BYTES} to extract" in DOC
    assert f"estimated at {BYTES_PER_TOKEN} bytes a token" in DOC
    both = (BYTES_PER_DOCUMENT + PENDING_BYTES) * 1e8
    assert f"{both / 1e9:.1f} GB" in DOC and f"{both / 16 / 1e9:.1f} GB" in DOC


def test_the_scale_sheet_follows_from_its_assumptions() -> None:
    documents, tokens, rate, gpus = 1e8, 1000, 15_000, 1000
    hours = documents * tokens / rate / gpus / 3600
    assert f"| extraction | {hours:.1f} h |" in DOC
    record_mb = 32.8
    assert f"{rate / tokens * record_mb:.0f} MB/s each" in DOC
    shard_documents = 65_536 / tokens
    assert f"{documents / 64 / 1e6:.2f} million of {64 * record_mb / 1000:.1f} GB" in DOC
    assert f"{round(gpus * rate * 3 / 65_536, -1):.0f} requests a second" in DOC and shard_documents > 64


def test_the_tests_it_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", DOC))
    there = "\n".join(file.read_text() for file in Path(__file__).parent.glob("*.py"))
    assert named and [name for name in sorted(named) if f"def {name}(" not in there] == []


def test_commands_in_it_name_files_that_exist() -> None:
    for file in re.findall(r"--config (\S+)", DOC):
        assert (ROOT / file).is_file()
