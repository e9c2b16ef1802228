"""Run configurations: typos are named with the nearest valid key, overrides win, nothing is guessed."""

from pathlib import Path
from typing import Literal, Self

import pytest
import yaml
from pydantic import model_validator

from c2kv_core.config import Config, load_config, parse_config, to_yaml
from c2kv_core.errors import ConfigError


class Optimiser(Config):
    """A nested group."""

    learning_rate: float = 1e-3
    """Step size."""
    warmup_steps: int = 10

    @model_validator(mode="after")
    def _warms_up(self) -> Self:
        if self.warmup_steps == 13:
            raise ValueError("expected another number of steps than 13")
        return self


class Run(Config):
    """A run."""

    model: str
    """Alias or directory."""
    ratios: tuple[int, ...] = (4,)
    limit: int | None = None
    mode: Literal["fast", "exact"] = "fast"
    optimiser: Optimiser = Optimiser()
    stages: tuple[Optimiser, ...] = ()
    second: Optimiser | None = None


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def fault(path: Path | None, *overrides: str) -> str:
    """The one-line message of a configuration that is refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(Run, path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_file_and_its_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, "model: tiny\nratios: [4, 8]\noptimiser:\n  warmup_steps: 3\n")
    config = load_config(Run, path)
    assert config == Run(model="tiny", ratios=(4, 8), optimiser=Optimiser(warmup_steps=3))
    assert config.optimiser.learning_rate == 1e-3


def test_overrides_win_and_are_read_as_yaml(tmp_path: Path) -> None:
    path = written(tmp_path, "model: tiny\nlimit: 5\noptimiser:\n  warmup_steps: 3\n")
    overrides = [
        "ratios=[4, 8]",
        "limit=null",
        "optimiser.learning_rate=0.5",
        "model=a=b",
        "optimiser.warmup_steps=4",
        "optimiser.warmup_steps=7",
    ]
    config = load_config(Run, path, overrides)
    assert config.ratios == (4, 8) and config.limit is None and config.model == "a=b"
    assert config.optimiser == Optimiser(learning_rate=0.5, warmup_steps=7)


def test_overrides_alone_and_an_empty_file_suffice(tmp_path: Path) -> None:
    assert load_config(Run, overrides=["model=tiny"]) == Run(model="tiny")
    assert load_config(Run, written(tmp_path, "# nothing\n"), ["model=tiny"]) == Run(model="tiny")


@pytest.mark.parametrize(
    ("text", "wrong", "near"),
    [
        ("model: tiny\nratio: [4]\n", "'ratio'", "'ratios'"),
        ("model: tiny\noptimizer:\n  warmup_steps: 1\n", "'optimizer'", "'optimiser'"),
        (
            "model: tiny\noptimiser:\n  learning_rte: 1\n",
            "'optimiser.learning_rte'",
            "'optimiser.learning_rate'",
        ),
        ("model: tiny\nstages:\n- warmup: 1\n", "'stages.0.warmup'", "'stages.0.warmup_steps'"),
        ("model: tiny\nsecond:\n  warmup: 1\n", "'second.warmup'", "'second.warmup_steps'"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(
    tmp_path: Path, text: str, wrong: str, near: str
) -> None:
    message = fault(written(tmp_path, text))
    assert f"unknown key {wrong}" in message and f"did you mean {near}?" in message
    assert str(tmp_path / "run.yaml") in message


def test_an_unknown_override_is_named_too() -> None:
    assert "did you mean 'limit'?" in fault(None, "model=tiny", "limits=3")
    assert "did you mean 'optimiser.warmup_steps'?" in fault(None, "model=tiny", "optimiser.warmup=3")


def test_nothing_is_suggested_that_is_far() -> None:
    assert fault(None, "model=tiny", "zzqq=1") == "command line: unknown key 'zzqq'"


def test_a_misspelt_key_is_told_before_the_one_that_is_missing_for_it() -> None:
    assert fault(None, "modell=tiny") == "command line: unknown key 'modell'; did you mean 'model'?"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ratios=4", "ratios: expected a list, as in [4], got 4"),
        ("optimiser=4", "optimiser: expected a group of keys, got 4"),
        ("optimiser.warmup_steps=13", "optimiser: expected another number of steps than 13"),
    ],
)
def test_faults_of_lists_and_groups_are_sentences(override: str, message: str) -> None:
    assert fault(None, "model=tiny", override) == f"command line: {message}"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("model: 3\n", "model", "3"),
        ("model: tiny\nlimit: many\n", "limit", "'many'"),
        ("model: tiny\nratios: 4\n", "ratios", "4"),
        ("model: tiny\nratios: [4, eight]\n", "ratios.1", "'eight'"),
        ("model: tiny\nmode: slow\n", "mode", "'slow'"),
        ("model: tiny\noptimiser: 3\n", "optimiser", "3"),
        ("model: tiny\noptimiser:\n  warmup_steps: 1.5\n", "optimiser.warmup_steps", "1.5"),
    ],
)
def test_a_wrong_type_or_value_is_named(tmp_path: Path, text: str, key: str, value: str) -> None:
    message = fault(written(tmp_path, text))
    assert f"{key}: " in message and f"got {value}" in message


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    assert "missing key 'model'" in fault(written(tmp_path, "limit: 3\n"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    message = fault(tmp_path / "none.yaml")
    assert "none.yaml" in message and "No such file" in message
    assert "directory" in fault(tmp_path)


@pytest.mark.parametrize(
    ("text", "got"),
    [("- a\n- b\n", "list"), ("just words\n", "str"), ("3\n", "int")],
)
def test_yaml_that_is_no_mapping_is_refused(tmp_path: Path, text: str, got: str) -> None:
    assert f"expected a mapping of keys to values, got {got}" in fault(written(tmp_path, text))


def test_text_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    assert "expected YAML" in fault(written(tmp_path, "model: [tiny\n"))
    path = tmp_path / "run.yaml"
    path.write_bytes(b"model: \xff\xfe\n")
    assert "expected YAML" in fault(path)


def test_yaml_cannot_make_objects(tmp_path: Path) -> None:
    assert "expected YAML" in fault(written(tmp_path, "model: !!python/object/apply:os.getcwd []\n"))


def test_keys_that_are_no_words_are_refused(tmp_path: Path) -> None:
    assert "1" in fault(written(tmp_path, "model: tiny\n1: 2\n"))


@pytest.mark.parametrize("override", ["model", "=tiny", "", "model.name=3", "limit=[3"])
def test_malformed_overrides_are_refused(tmp_path: Path, override: str) -> None:
    assert "override" in fault(written(tmp_path, "model: tiny\n"), override)


def test_the_resolved_configuration_reads_back(tmp_path: Path) -> None:
    config = Run(model="Eiche ж", ratios=(4, 8), limit=None, stages=(Optimiser(), Optimiser(warmup_steps=1)))
    text = to_yaml(config)
    assert "Eiche ж" in text
    assert load_config(Run, written(tmp_path, text)) == config
    assert parse_config(Run, yaml.safe_load(text), source="saved") == config


def test_configurations_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Run(model="tiny").model = "other"  # type: ignore[misc]
