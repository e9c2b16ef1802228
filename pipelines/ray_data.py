"""Settings of Ray Data for one dataset."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_datasets(**settings: Any) -> Iterator[None]:
    """Datasets that are made inside keep these settings of ``DataContext``, and draw no bars of their own."""
    from ray.data import DataContext

    # At errors it prints the trace of every failure, which is told on one line.
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = DataContext.get_current()
    wanted: dict[str, Any] = {"enable_progress_bars": False, **settings}
    before = {name: getattr(context, name) for name in wanted}
    for name, value in wanted.items():
        setattr(context, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(context, name, value)
