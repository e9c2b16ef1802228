"""``c2kv serve``: an OpenAI-shaped endpoint over a store, until it is stopped."""

import signal
from contextlib import suppress
from typing import Annotated

import typer

from c2kv_cli.options import ConfigFile, Overrides, resolve
from c2kv_core.errors import InputError
from pipelines.ray_session import WORKER_PORTS, places_of_this_node, ray_session
from serve_app.config import ServeConfig
from serve_app.keys import check_keys
from serve_app.launch import check_port_free


def serve(
    overrides: Overrides = None,
    config: ConfigFile = None,
    store: Annotated[str | None, typer.Option(help="Store to serve documents from.")] = None,
    model: Annotated[str | None, typer.Option(help="Alias, Hugging Face directory or hub id.")] = None,
    sidecar: Annotated[
        str | None, typer.Option(help="Sidecar directory or s3:// URI; by default the shipped one.")
    ] = None,
    ratio: Annotated[int | None, typer.Option(help="Source tokens per slot the store was made with.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Tenant whose documents are served.")] = None,
    keys_file: Annotated[
        str | None, typer.Option(help="File of bearer keys; `c2kv keys new` makes entries.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine's need keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Port of this machine's Prometheus metrics; by default any that is free."),
    ] = None,
) -> None:
    """Serve answers over a store's documents at /v1/chat/completions, until Ctrl-C."""
    settings = resolve(
        ServeConfig,
        config,
        overrides,
        store=store,
        model=model,
        sidecar=sidecar,
        ratio=ratio,
        namespace=namespace,
        keys_file=keys_file,
    )
    run(settings, host=host, port=port, metrics_port=metrics_port)


def run(config: ServeConfig, *, host: str, port: int, metrics_port: int | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then stop all that was started.

    Raises:
        InputError: a subclass that says what cannot be used; nothing has been started then.
        C2KVError: the application could not be brought up.
    """
    from serve_app.launch import start
    from serve_app.probe import probe

    check_keys(config, host)
    check_port_free(host, port)
    if metrics_port is not None:
        _check_metrics_port(metrics_port)
    found = probe(config)
    for remark in found.remarks(config):
        _say(f"note: {remark}")
    spread = f" in {found.namespaces} namespaces" if found.namespaces > 1 else ""
    _say(f"starting {config.model_id} over {found.documents} documents{spread} of {config.store} ...")

    with ray_session(metrics_port=metrics_port) as started_ray:
        running = start(config, host=host, port=port)
        try:
            _say(f"ready: {running.url}/v1 (model {config.model_id}); stop with Ctrl-C")
            places = places_of_this_node()
            _say(f"metrics: {places.metrics_url}")
            _say(f"logs: {places.logs / 'serve'}")
            with suppress(KeyboardInterrupt):
                while True:
                    signal.pause()
            _say("stopping: answers that have begun are finished first")
        finally:
            running.stop(ray_stops_too=started_ray)


def _check_metrics_port(port: int) -> None:
    if port in WORKER_PORTS:
        raise InputError(
            f"expected a metrics port outside {WORKER_PORTS[0]}-{WORKER_PORTS[-1]}, where Ray's workers listen, "
            f"got {port}"
        )
    check_port_free("0.0.0.0", port, option="--metrics-port")  # Ray listens on all addresses


def _say(line: str) -> None:
    """For people: standard output is left to programs."""
    typer.echo(line, err=True)
