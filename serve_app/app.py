"""The Serve application. ``serve run serve_app.app:build store=PATH``, or ``import_path`` with ``args`` in YAML.

``serve build`` wants an application that is already bound: ``serve_app.app:app`` is one, configured by the YAML file
that ``C2KV_SERVE_CONFIG`` names.
"""

import os
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import BackpressureConfig, RequestRouterConfig

from c2kv_core.config import load_config, parse_config
from c2kv_core.errors import ConfigError
from serve_app.affinity import ROUTER
from serve_app.config import DRAIN_MARGIN_S, ServeConfig
from serve_app.ingress import Ingress
from serve_app.replica import Generator

CONFIG_VARIABLE = "C2KV_SERVE_CONFIG"
"""Environment variable that names the YAML file for ``app``."""
_INGRESS_CPUS = 0.1
_TARGET_SHARE = 0.75
"""Of the requests a replica runs at once: beyond that another one is wanted."""
_INGRESS_SPARE_REQUESTS = 64
"""Places at the ingress beyond those that wait for an answer: for refusals, ``/v1/models`` and ``/healthz``."""


def build(args: dict[str, Any]) -> Application:
    """The application from plain values.

    Args:
        args: fields of ``ServeConfig``.

    Raises:
        ConfigError: an unknown key, a wrong type or value.
    """
    return bind(parse_config(ServeConfig, args, source="args of serve_app.app:build"))


def bind(config: ServeConfig) -> Application:
    """The application: an ingress over generators."""
    generator = serve.deployment(
        **_scale(config),
        **_routing(config),
        max_ongoing_requests=config.max_ongoing_requests,
        max_queued_requests=config.max_queued_requests,
        graceful_shutdown_timeout_s=config.drain_s,
        ray_actor_options={"num_cpus": config.num_cpus, "num_gpus": config.num_gpus},
    )(Generator)
    waiting = config.most_replicas * config.max_ongoing_requests + config.max_queued_requests
    ingress = serve.deployment(
        max_ongoing_requests=waiting + _INGRESS_SPARE_REQUESTS,
        max_queued_requests=_INGRESS_SPARE_REQUESTS,
        backpressure_config=BackpressureConfig(status_code=503, retry_after_s=config.retry_after_s),
        # Answers pass through the ingress, so it must outlive the generators' draining.
        graceful_shutdown_timeout_s=config.drain_s + DRAIN_MARGIN_S,
        ray_actor_options={"num_cpus": _INGRESS_CPUS},
        # It has an access log of its own, which says more of each request.
        logging_config={"enable_access_log": False},
    )(Ingress)
    return ingress.bind(config, generator.bind(config))


def _scale(config: ServeConfig) -> dict[str, Any]:
    if config.max_replicas is None:
        return {"num_replicas": config.num_replicas}
    return {
        "autoscaling_config": {
            "min_replicas": config.num_replicas,
            "max_replicas": config.max_replicas,
            "target_ongoing_requests": max(1.0, _TARGET_SHARE * config.max_running),
            "upscale_delay_s": config.upscale_delay_s,
            "downscale_delay_s": config.downscale_delay_s,
        }
    }


def _routing(config: ServeConfig) -> dict[str, Any]:
    if config.routing == "load" or config.most_replicas == 1:
        return {}
    router: Any = ROUTER
    return {"request_router_config": RequestRouterConfig(request_router_class=router)}


def __getattr__(name: str) -> Application:
    # Bound on demand, so that importing this module needs no configuration.
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = os.environ.get(CONFIG_VARIABLE)
    if not file:
        raise ConfigError(f"set {CONFIG_VARIABLE} to the YAML file that configures serve_app.app:app")
    return bind(load_config(ServeConfig, file))
