"""The methods by name."""

import difflib
from collections.abc import Callable, Sequence

from c2kv_core.errors import ConfigError
from pipelines.eval.methods.cacheblend import CacheBlend
from pipelines.eval.methods.full import FullCompute
from pipelines.eval.methods.method import Method, MethodContext, Setup
from pipelines.eval.methods.none import NoDocuments
from pipelines.eval.methods.reuse import NaiveReuse
from pipelines.eval.methods.slots import Slots, UntrainedSlots
from pipelines.eval.methods.truncate import Truncation
from pipelines.eval.methods.tuned import Tuned, TunedWithoutDocuments

METHODS: dict[str, Callable[[Setup], Method]] = {
    "full": FullCompute,
    "none": NoDocuments,
    "c2kv": Slots,
    "untrained": UntrainedSlots,
    "truncate": Truncation,
    "reuse": NaiveReuse,
    "cacheblend": CacheBlend,
    "tuned": Tuned,
    "tuned_none": TunedWithoutDocuments,
}


def check_methods(names: Sequence[str]) -> None:
    """Refuse names that are none, and repeats.

    Raises:
        ConfigError: names the nearest method, if one is near.
    """
    for name in names:
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, n=1)
            hint = f"did you mean {near[0]!r}? The" if near else "the"
            raise ConfigError(f"unknown method {name!r}; {hint} methods are {', '.join(METHODS)}")
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ConfigError(f"expected each method once, got {repeated[0]!r} several times")


__all__ = ["METHODS", "Method", "MethodContext", "Setup", "check_methods"]
