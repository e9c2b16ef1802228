"""What every ``python -m pipelines.<job>`` does: parse, run, report, exit."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from c2kv_core.config import Config, load_config
from c2kv_core.errors import C2KVError
from pipelines.interrupts import sigterm_interrupts

C = TypeVar("C", bound=Config)

INTERRUPTED = 130


def job_main(kind: type[C], run: Callable[[C], dict[str, Any]], arguments: list[str] | None) -> int:
    """Run a job from ``--config FILE key=value ...``; its report is one JSON object on stdout.

    A report may hold a ``complaint``: why the job, which came to its end, is no success.

    Returns:
        Exit code: 0 success, 1 the job failed, 2 bad input, 130 interrupted. Errors are one line on stderr.
    """
    parser = argparse.ArgumentParser(description=kind.__doc__)
    parser.add_argument("--config", metavar="FILE", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override the file's keys")
    given = parser.parse_args(arguments)
    try:
        with sigterm_interrupts():
            report = run(load_config(kind, given.config, given.overrides))
    except C2KVError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    sys.stdout.write(json.dumps(report) + "\n")
    if (complaint := report.get("complaint")) is not None:
        sys.stderr.write(f"error: {complaint}\n")
        return C2KVError.exit_code
    return 0
