"""How the ingress reaches generator replicas."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Literal, Protocol, cast

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.schema import ApplicationStatus

from serve_app.affinity import affinity_key
from serve_app.caller import Caller
from serve_app.errors import ApiError, overloaded, unavailable
from serve_app.events import ReplicaEvent, Reply, fault_in
from serve_app.protocol import AnyRequest, DocumentBody

_HEALTH_AGE_S = 1.0
"""How long an answer about health is given again, so that probes cost the controller little."""


DocumentAction = Literal["put", "get", "delete"]


class GeneratorClient(Protocol):
    """What the HTTP API asks of whatever makes answers."""

    def events(self, request: AnyRequest, caller: Caller) -> AsyncGenerator[ReplicaEvent, None]:
        """The events of one request; closing the iterator gives the answer up.

        Raises:
            ApiError: 503, because no replica can take it, or the one that had it is gone.
        """
        ...

    async def document(
        self, action: DocumentAction, caller: Caller, doc_id: str, body: DocumentBody | None = None
    ) -> dict[str, Any]:
        """Put (with a body), get or delete a document; what is told about it.

        Raises:
            ApiError: what the replica says, or 503 as above.
        """
        ...

    async def faults(self) -> list[str]:
        """Why requests cannot be answered now; empty while they can."""
        ...


class HandleClient:
    """Implements ``GeneratorClient`` over Serve's deployment handle."""

    def __init__(self, handle: DeploymentHandle[Any], *, retry_after_s: int) -> None:
        self._whole = handle
        self._handle = handle.options(stream=True)
        self._name = handle.deployment_name
        self._retry_after_s = retry_after_s
        self._faults: list[str] = []
        self._faults_until_s = 0.0

    async def events(self, request: AnyRequest, caller: Caller) -> AsyncGenerator[ReplicaEvent, None]:
        """See ``GeneratorClient``."""
        key = affinity_key(caller.namespace, [d.id for d in request.documents if d.id is not None])
        handle = self._handle if key is None else self._handle.options(session_id=key)
        response = cast(DeploymentResponseGenerator[ReplicaEvent], handle.generate.remote(request, caller))
        try:
            async for event in response:
                yield event
        except (BackPressureError, DeploymentUnavailableError, RayError) as error:
            raise self._refusal(error) from error
        except (GeneratorExit, asyncio.CancelledError):
            # The client is gone. Cancelling may meet the same errors as above; nobody is left to be told.
            with suppress(RayServeException, RayError):
                response.cancel()  # type: ignore[no-untyped-call]
            raise

    async def document(
        self, action: DocumentAction, caller: Caller, doc_id: str, body: DocumentBody | None = None
    ) -> dict[str, Any]:
        """See ``GeneratorClient``."""
        # To where requests for it will go: what it makes stays in that replica's memory.
        handle = self._whole.options(session_id=affinity_key(caller.namespace, [doc_id]) or "")
        method = getattr(handle, f"{action}_document")
        arguments = (caller, doc_id) if body is None else (caller, doc_id, body)
        try:
            reply: Reply = await method.remote(*arguments)
        except (BackPressureError, DeploymentUnavailableError, RayError) as error:
            raise self._refusal(error) from error
        if reply["event"] == "error":
            raise ApiError(fault_in(reply))
        return reply["result"]

    def _refusal(self, error: Exception) -> ApiError:
        if isinstance(error, BackPressureError):
            message = "all replicas are busy and the queue is full; try again later"
            return overloaded(message, retry_after_s=self._retry_after_s)
        message = "the replica that had this request is gone; try again"
        return unavailable(message, retry_after_s=self._retry_after_s)

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
        # Why is in Serve's status and logs: health is told without a key, and reasons hold paths and addresses.
        return [f"no replica of {self._name} is running; see `serve status`"]
