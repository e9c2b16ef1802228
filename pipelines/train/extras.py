"""What a run shows itself with and a plain installation lacks: looked for before anything is read or written."""

import sys
from importlib.util import find_spec

from c2kv_core.errors import ConfigError
from pipelines.train.config import TrainConfig

PACKAGES = {"curves": "matplotlib", "tensorboard": "tensorboard"}
"""Setting and what it needs."""


def check_extras(config: TrainConfig) -> None:
    """Fail before training, not in it.

    Raises:
        ConfigError: a setting is on and its package is not installed; names all such.
    """
    missing = [name for name, package in PACKAGES.items() if getattr(config, name) and not find_spec(package)]
    if missing:
        packages = " and ".join(PACKAGES[name] for name in missing)
        off = " ".join(f"{name}=false" for name in missing)
        raise ConfigError(
            f"not installed: {packages}, for {' and '.join(missing)}; "
            f"run `{sys.executable} -m pip install {' '.join(PACKAGES[name] for name in missing)}`, or give {off}"
        )
