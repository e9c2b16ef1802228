"""The ingress deployment: the HTTP API over deployment handles."""

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import TaskCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api import create_api
from serve_app.config import ServeConfig
from serve_app.generator_client import HandleClient
from serve_app.serve_logs import log_with_serve
from serve_app.store_watch import StoreWatch


@serve.ingress()
class Ingress:
    """Checks requests, streams answers. Holds no model, so one replica serves many generators."""

    def __init__(self, config: ServeConfig, generator: DeploymentHandle[Any]) -> None:
        self._config = config
        self._generator = generator

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after ``__init__``."""
        log_with_serve(access=self._config.access_log)
        client = HandleClient(self._generator, retry_after_s=self._config.retry_after_s)
        api = create_api(self._config, client, StoreWatch(self._config.store), ids_echoed_outside=True)
        api.add_middleware(Disconnects)
        return api


class Disconnects:
    """Says in ASGI's words that a client has left, where Serve raises that its request was cancelled."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""

        async def receiving() -> Message:
            try:
                return await receive()
            except TaskCancelledError:
                return {"type": "http.disconnect"}

        await self._app(scope, receiving, send)
