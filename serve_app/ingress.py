"""The ingress deployment: the HTTP API over deployment handles."""

import logging
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.access_log import LOGGER_NAME
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
        log_with_serve()
        return create_api(self._config, client, StoreWatch(self._config.store), ids_echoed_outside=True)


class _ToServe(logging.Handler):
    """Hands records to Serve's logger, whatever its handlers are by then: a change of logging_config replaces them."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("ray.serve").handle(record)


def log_with_serve() -> None:
    """Write access lines into the log file of this replica, where Serve's own lines go."""
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [_ToServe()]
