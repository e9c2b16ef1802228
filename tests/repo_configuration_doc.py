"""docs/configuration.md is what the configurations say."""

from pathlib import Path

import pytest

from c2kv_cli.options import keys_of
from c2kv_cli.reference import COMMANDS, REFERENCE, reference
from c2kv_core.config import Config

ROOT = Path(__file__).parent.parent


def test_the_reference_is_up_to_date() -> None:
    assert (ROOT / REFERENCE).read_text(encoding="utf-8") == reference(), "run `make reference`"


@pytest.mark.parametrize("kind", COMMANDS.values(), ids=lambda kind: kind.__name__)
def test_every_key_has_a_meaning_and_help_names_the_reference(kind: type[Config]) -> None:
    assert not [name for name, field in kind.model_fields.items() if not field.description]
    assert keys_of(kind).endswith(f"Each is described in {REFERENCE}.")
