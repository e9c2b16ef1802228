"""The ingress deployment: the HTTP API over deployment handles."""

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.api import create_api
from serve_app.config import ServeConfig
from serve_app.generator_client import HandleClient
from serve_app.store_watch import StoreWatch


@serve.ingress()
class Ingress:
    """Checks requests, streams answers. Holds no model, so one replica serves many generators."""

    def __init__(self, config: ServeConfig, generator: DeploymentHandle[Any]) -> None:
        self._config = config
        self._generator = generator

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after ``__init__``."""
        client = HandleClient(self._generator, retry_after_s=self._config.retry_after_s)
        return create_api(self._config, client, StoreWatch(self._config.store))
