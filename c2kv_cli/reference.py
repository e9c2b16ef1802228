"""``docs/configuration.md`` from the configurations themselves: ``python -m c2kv_cli.reference`` writes it."""

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from c2kv_core.config import Config, models_in
from pipelines.bench.config import BenchExtractConfig, BenchServeConfig, BenchStoreConfig
from pipelines.eval.config import EvalConfig
from pipelines.extract_config import ExtractConfig
from pipelines.train.config import TrainConfig
from serve_app.config import ServeConfig

COMMANDS: dict[str, type[Config]] = {
    "extract": ExtractConfig,
    "serve": ServeConfig,
    "train": TrainConfig,
    "eval": EvalConfig,
    "bench extract": BenchExtractConfig,
    "bench store": BenchStoreConfig,
    "bench serve": BenchServeConfig,
}
REFERENCE = "docs/configuration.md"
HEAD = """# Configuration

Every key of every command. Written by `make reference` from the code: do not edit. Keys come from a YAML file
(`--config FILE`) and from `key=value` on the command line, which wins; values are YAML, and dots reach into groups
(`columns.id=name`).
"""


def reference() -> str:
    """The whole document."""
    return "\n".join([HEAD, *(line for name, kind in COMMANDS.items() for line in _command(name, kind))])


def _command(name: str, kind: type[Config]) -> Iterator[str]:
    yield f"## c2kv {name}\n"
    yield from _table(kind)
    for key, group in _groups(kind, ""):
        yield f"### {name}: {key}\n"
        yield from _table(group)


def _groups(kind: type[Config], before: str) -> Iterator[tuple[str, type[Config]]]:
    """The groups of keys within a configuration, each once, by the key that first has it."""
    seen: set[type] = set()
    for key, field in kind.model_fields.items():
        for group in models_in(field.annotation):
            if issubclass(group, Config) and group not in seen:
                seen.add(group)
                yield f"{before}{key}", group
                yield from _groups(group, f"{before}{key}.")


def _table(kind: type[Config]) -> Iterator[str]:
    yield f"{_line(kind.__doc__ or '')}\n"
    yield "| key | value | default | meaning |\n| --- | --- | --- | --- |"
    for key, field in kind.model_fields.items():
        cells = [f"`{key}`", _value(field), _default(field), _line(field.description or "")]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _line(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Config):
        return "its own"
    return f"`{json.dumps(default, ensure_ascii=False, default=sorted)}`"


def _value(field: FieldInfo) -> str:
    """What may stand there, with its bounds."""
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [
        f"{sign} {getattr(one, name):g}"
        for one in field.metadata
        for name, sign in signs.items()
        if getattr(one, name, None) is not None
    ]
    return ", ".join([_kind(field.annotation), *bounds])


def _kind(annotation: Any) -> str:
    """A type in words."""
    parts, origin = get_args(annotation), get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _kind(part) for part in parts)
    if origin is dict:
        return f"{_kind(parts[0])} to {_kind(parts[1])}"
    if origin in (tuple, list, set, frozenset):
        if origin is tuple and Ellipsis not in parts:
            return f"list of {len(parts)}: {', '.join(map(_kind, parts))}"
        return f"list of {_kind(parts[0])}"
    if origin is not None or hasattr(annotation, "__metadata__"):
        return _kind(parts[0])
    names = {str: "text", bool: "true or false", int: "whole number", float: "number"}
    return names.get(annotation, "group" if models_in(annotation) else str(annotation))


if __name__ == "__main__":
    file = Path(__file__).parent.parent / REFERENCE
    file.write_text(reference(), encoding="utf-8")
    sys.stderr.write(f"{file} is written\n")
