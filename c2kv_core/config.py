"""Run configurations: one YAML file and ``key=value`` overrides into a typed, frozen model.

Unknown keys are refused by name with the nearest valid one, also nested ones. Messages are one line.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from c2kv_core.errors import ConfigError


class Config(BaseModel):
    """Base of all configurations: frozen, strict about keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


C = TypeVar("C", bound=Config)


def load_config(kind: type[C], path: str | Path | None = None, overrides: Sequence[str] = ()) -> C:
    """A configuration from a YAML file (optional) and overrides ``key=value``, which win.

    Args:
        kind: the configuration's class.
        path: YAML mapping; dotted overrides reach into nested mappings.
        overrides: values are read as YAML, so that ``ratios=[4, 8]`` and ``limit=null`` work.

    Raises:
        ConfigError: file missing or no mapping, unknown key, wrong type or value.
    """
    data: dict[str, Any] = {}
    if path is not None:
        data = _read_mapping(Path(path))
    for override in overrides:
        _apply(data, override)
    overridden = [override.partition("=")[0] for override in overrides]
    return parse_config(kind, data, source=str(path) if path else "command line", overridden=overridden)


def parse_config(kind: type[C], data: dict[str, Any], *, source: str, overridden: Sequence[str] = ()) -> C:
    """A configuration from a mapping.

    Args:
        kind: the configuration's class.
        data: keys and values.
        source: where they come from, for messages.
        overridden: dotted keys that came from the command line instead.

    Raises:
        ConfigError: unknown key, wrong type or value; the message names where it came from.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        fault = _first_fault(error)
        place = ".".join(map(str, fault["loc"]))
        if any(place == key or place.startswith(f"{key}.") for key in overridden):
            source = "command line"
        raise ConfigError(f"{source}: {_told(kind, fault)}") from error


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML, to be saved beside a run's outputs."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected YAML, got: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {type(data).__name__}")
    return data


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"expected an override of the form key=value, got {override!r}")
    *path, last = key.split(".")
    for name in path:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise ConfigError(f"override {override!r}: {name} is a value, not a group of keys")
    try:
        data[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: expected a YAML value") from error


def _first_fault(error: ValidationError) -> ErrorDetails:
    """An unknown key before all else: it may be another, misspelt, that is missing."""
    faults = error.errors(include_url=False)
    return next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])


def _told(kind: type[BaseModel], fault: ErrorDetails) -> str:
    where = ".".join(map(str, fault["loc"])) or "configuration"
    if fault["type"] == "extra_forbidden":
        *group, last = fault["loc"]
        near = difflib.get_close_matches(str(last), _keys_at(kind, tuple(group)), n=1)
        # Far from all there are, a guess would mislead.
        meant = ".".join(map(str, [*group, *near]))
        return f"unknown key {where!r}; did you mean {meant!r}?" if near else f"unknown key {where!r}"
    if fault["type"] == "missing":
        return f"missing key {where!r}, which has no default"
    if fault["type"] in ("tuple_type", "list_type"):
        return f"{where}: expected a list, as in [{fault['input']}], got {fault['input']!r}"
    if fault["type"] == "model_type":
        return f"{where}: expected a group of keys, got {fault['input']!r}"
    if fault["type"] == "value_error" and isinstance(fault["input"], dict | BaseModel):
        # A validator of a whole group says what came itself.
        sentence = str(fault["ctx"]["error"])
        return f"{where}: {sentence}" if fault["loc"] else sentence
    return f"{where}: {fault['msg'][0].lower()}{fault['msg'][1:]}, got {fault['input']!r}"


def _keys_at(kind: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Keys that are valid at a place of the configuration, also inside lists and optional groups."""
    kinds = [kind]
    for name in path:
        if isinstance(name, int):
            continue
        fields = [k.model_fields[name] for k in kinds if name in k.model_fields]
        kinds = [inner for field in fields for inner in models_in(field.annotation)]
    return [key for k in kinds for key in k.model_fields]


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The groups of keys that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in models_in(part)]
