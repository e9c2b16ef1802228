"""docs/serving.md and the dashboard name what the code has."""

import json
import re
from pathlib import Path
from typing import get_args

import yaml

from c2kv_core.config import parse_config
from c2kv_core.store import MissReason
from serve_app.config import ServeConfig
from serve_app.metrics import METRICS

ROOT = Path(__file__).parent.parent
DOC = (ROOT / "docs/serving.md").read_text()
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def test_the_metrics_table_is_the_codes() -> None:
    rows = re.findall(r"^\| `(c2kv_\w+)` \| (\w+) \| ([\w, ]*) \| (.+) \|$", DOC, re.MULTILINE)
    assert rows == [(name, s.kind, ", ".join(s.labels), s.description) for name, s in METRICS.items()]


def test_the_dashboard_uses_only_metrics_and_labels_that_exist() -> None:
    dashboard = json.loads((ROOT / "cluster/grafana-serving.json").read_text())
    exprs = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    known = {f"ray_{name}{suffix}": spec for name, spec in METRICS.items() for suffix in SUFFIXES[spec.kind]}
    used = set()
    for expr in exprs:
        (name,) = set(re.findall(r"ray_\w+", expr))
        assert name in known, expr
        used.add(name)
        grouped = re.findall(r"by \(([^)]*)\)", expr)
        labels = {label.strip() for group in grouped for label in group.split(",")} - {"le", ""}
        labels |= set(re.findall(r"{(\w+)=", expr))
        assert labels <= set(known[name].labels), expr
    shown = {name for name in METRICS if any(f"ray_{name}{s}" in used for s in SUFFIXES[METRICS[name].kind])}
    assert shown == set(METRICS)


def test_the_reasons_of_fallbacks_are_the_codes() -> None:
    listed = DOC.partition("Reasons: ")[2].partition(".")[0]
    assert set(re.findall(r"`(\w+)`", listed)) - {"fetch_timeout_s"} >= set(get_args(MissReason)) - {
        "unreachable"
    }
    assert "`unreachable`" in DOC


def test_defaults_in_the_table_of_limits_are_the_codes() -> None:
    fields = ServeConfig.model_fields
    for text, name in (
        ("| 16, 32 |", "max_running"),
        ("`max_queued_requests` | 32 ", "max_queued_requests"),
        ("| 300 s |", "max_request_s"),
        ("| 4 MiB, 64, 65,536 |", "max_documents"),
    ):
        assert text in DOC
        number = {"| 16, 32 |": 16, "| 300 s |": 300, "| 4 MiB, 64, 65,536 |": 64}.get(text, 32)
        assert fields[name].default == number
    assert fields["max_document_tokens"].default == 65_536
    assert fields["max_request_bytes"].default == 4 * 2**20
    assert fields["max_ongoing_requests"].default == 32


def test_the_sample_configuration_is_one() -> None:
    (sample,) = re.findall(r"```yaml\n# serve.yaml\n(.*?)```", DOC, re.DOTALL)
    settings = yaml.safe_load(sample)
    config = parse_config(ServeConfig, settings, source="docs/serving.md")
    assert config.keys_file and len(settings) > 10
