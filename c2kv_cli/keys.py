"""``c2kv keys``: bearer keys for the endpoint."""

from typing import Annotated

import typer
import yaml

from c2kv_cli.options import AsJson, print_json
from c2kv_core.config import parse_config
from serve_app.keys import KeyEntry, new_key

app = typer.Typer(help="Bearer keys for the endpoint.", no_args_is_help=True)


@app.callback()
def _keys() -> None:
    """Bearer keys for the endpoint."""


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Whose key it is, for logs and metrics.")],
    namespace: Annotated[str, typer.Option(help="Tenant whose documents it reads and writes.")] = "default",
    role: Annotated[list[str] | None, typer.Option(help="query, write or admin; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key: the key on stderr, shown once; its entry for the key file on stdout."""
    key, digest = new_key()
    data = {"name": name, "sha256": digest, "namespace": namespace, "roles": role or ["query"]}
    entry = parse_config(KeyEntry, data, source="command line")
    entries = [{**data, "roles": sorted(entry.roles)}]
    if as_json:
        print_json({"key": key, "entry": entries[0]})
        return
    typer.echo(f"key (shown only now): {key}", err=True)
    typer.echo(yaml.safe_dump({"keys": entries}, sort_keys=False).strip())
