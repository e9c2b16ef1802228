"""How the ingress reaches generator replicas."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Protocol, cast

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.schema import ApplicationStatus

from serve_app.errors import overloaded, unavailable
from serve_app.events import ReplicaEvent
from serve_app.protocol import ChatRequest

_HEALTH_AGE_S = 1.0
"""How long an answer about health is given again, so that probes cost the controller little."""


class GeneratorClient(Protocol):
    """What the HTTP API asks of whatever makes answers."""

    def events(self, request: ChatRequest) -> AsyncGenerator[ReplicaEvent, None]:
        """The events of one request; closing the iterator gives the answer up.

        Raises:
            ApiError: 503, because no replica can take it, or the one that had it is gone.
        """
        ...

    async def faults(self) -> list[str]:
        """Why requests cannot be answered now; empty while they can."""
        ...


class HandleClient:
    """Implements ``GeneratorClient`` over Serve's deployment handle."""

    def __init__(self, handle: DeploymentHandle[Any], *, retry_after_s: int) -> None:
        self._handle = handle.options(stream=True)
        self._name = handle.deployment_name
        self._retry_after_s = retry_after_s
        self._faults: list[str] = []
        self._faults_until_s = 0.0

    async def events(self, request: ChatRequest) -> AsyncGenerator[ReplicaEvent, None]:
        """See ``GeneratorClient``."""
        response = cast(DeploymentResponseGenerator[ReplicaEvent], self._handle.generate.remote(request))
        try:
            async for event in response:
                yield event
        except BackPressureError as error:
            raise overloaded(
                "all replicas are busy and the queue is full; try again later",
                retry_after_s=self._retry_after_s,
            ) from error
        except (DeploymentUnavailableError, RayError) as error:
            raise unavailable(
                "the replica that made this answer is gone; try again", retry_after_s=self._retry_after_s
            ) from error
        except (GeneratorExit, asyncio.CancelledError):
            # The client is gone. Cancelling may meet the same errors as above; nobody is left to be told.
            with suppress(RayServeException, RayError):
                response.cancel()  # type: ignore[no-untyped-call]
            raise

    async def faults(self) -> list[str]:
        """See ``GeneratorClient``. Asks Serve's controller, so that busy replicas need not answer."""
        if time.monotonic() >= self._faults_until_s:
            self._faults = await asyncio.to_thread(self._ask_controller)
            self._faults_until_s = time.monotonic() + _HEALTH_AGE_S
        return self._faults

    def _ask_controller(self) -> list[str]:
        name = serve.get_replica_context().app_name
        application = serve.status().applications.get(name)
        if application is None:
            return [f"Serve knows no application {name!r}"]
        deployment = application.deployments.get(self._name)
        states = deployment.replica_states if deployment is not None else {}
        running = sum(count for state, count in states.items() if state == "RUNNING")
        if running and application.status != ApplicationStatus.DELETING:
            return []
        reasons = [f"no replica of {self._name} is running"]
        if deployment is not None and deployment.message:
            reasons.append(deployment.message)
        return reasons
