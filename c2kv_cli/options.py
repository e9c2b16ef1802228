"""Options that commands share, and what turns them into a configuration."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from c2kv_core.config import Config, load_config

C = TypeVar("C", bound=Config)

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file; flags win over it.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Any key of the file.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, all else on stderr.")]


def resolve(kind: type[C], path: Path | None, overrides: list[str] | None, **flags: Any) -> C:
    """The configuration: file, then ``key=value``, then the flags that were given.

    Raises:
        ConfigError: unknown key, wrong type or value.
    """
    given = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value not in (None, [], ())]
    return load_config(kind, path, [*(overrides or []), *given])


def keys_of(kind: type[Config]) -> str:
    """All keys of a configuration with their defaults, for the end of a command's help."""
    named = [
        name
        if field.is_required()
        else f"{name}={json.dumps(field.get_default(call_default_factory=True), default=str)}"
        for name, field in kind.model_fields.items()
    ]
    return f"Keys: {', '.join(named)}. Each is described in docs/configuration.md."


def print_json(report: dict[str, Any]) -> None:
    """One object on stdout."""
    sys.stdout.write(json.dumps(report) + "\n")
