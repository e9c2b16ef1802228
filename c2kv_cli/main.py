"""The command ``c2kv``."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from c2kv_cli.bench import app as bench_app
from c2kv_cli.demo import demo
from c2kv_cli.eval import eval_command
from c2kv_cli.extract import extract
from c2kv_cli.keys import app as keys_app
from c2kv_cli.options import keys_of
from c2kv_cli.serve import serve
from c2kv_cli.store import app as store_app
from c2kv_cli.train import train
from c2kv_core.errors import C2KVError, InputError
from pipelines.eval.config import EvalConfig
from pipelines.extract_config import ExtractConfig
from pipelines.interrupts import sigterm_interrupts
from pipelines.job import INTERRUPTED
from pipelines.train.config import TrainConfig
from serve_app.config import ServeConfig

app = typer.Typer(
    name="c2kv",
    help="Compressed, position-free KV caches for long-context answers: extract, serve, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train", epilog=keys_of(TrainConfig))(train)
app.command("extract", epilog=keys_of(ExtractConfig))(extract)
app.command("serve", epilog=keys_of(ServeConfig))(serve)
app.command("eval", epilog=keys_of(EvalConfig))(eval_command)
app.command("demo")(demo)
app.add_typer(store_app, name="store")
app.add_typer(bench_app, name="bench")
app.add_typer(keys_app, name="keys")


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"c2kv {version('c2kv')}")
        raise typer.Exit


@app.callback()
def _commands(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Compressed, position-free KV caches for long-context answers: extract, serve, measure."""


def main() -> None:
    """Entry point: exit codes 0 success, 1 the job failed, 2 bad input, 130 interrupted."""
    try:
        # Also for commands that take no care of it themselves; Ray's own handler ends a process with a stack trace.
        with sigterm_interrupts():
            code = app(standalone_mode=False)
    except C2KVError as error:
        _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        # Wrong flags and arguments; their message is Typer's own.
        describe = getattr(error, "format_message", error.__str__)
        message = " ".join(describe().split())
        if not message:
            # A command without its arguments: its help has been shown.
            sys.exit(InputError.exit_code)
        _fail(message, InputError.exit_code)
    except (KeyboardInterrupt, typer.Abort) as stop:
        _fail(str(stop) or "interrupted", INTERRUPTED)
    if code == INTERRUPTED:
        # Typer's form of a KeyboardInterrupt.
        _fail("interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"error: {message}\n" if code != INTERRUPTED else f"{message}\n")
    sys.exit(code)
