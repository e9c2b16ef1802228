"""One line of JSON for every request, and the id by which clients and operators speak of it.

Lines say who asked for what and what became of it. Texts, titles, prompts, answers and ids of documents are in none of
them: of a path only its template is told.
"""

import json
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.answers import Usage
from serve_app.caller import Caller
from serve_app.protocol import AnyRequest

LOGGER_NAME = "c2kv.access"
"""Of the logger that gets the lines, at level INFO."""
ID_HEADER = "x-request-id"

_logger = logging.getLogger(LOGGER_NAME)
_SANE_ID = re.compile(r"[A-Za-z0-9._:=+/@-]{1,128}")
_STATE = "c2kv.access"
"""Key of the ASGI scope."""

Outcome = Literal["finished", "failed", "client_left"]


@dataclass(kw_only=True)
class Access:
    """What is known of one request so far."""

    request_id: str
    method: str
    arrived_s: float = field(default_factory=time.monotonic)
    """By the monotonic clock."""
    status: int | None = None
    """HTTP status; null while no header has been sent."""
    code: str | None = None
    """Of the error, also of one that came after a stream had begun."""
    caller: Caller | None = None
    """Null until the key is known."""
    stream: bool = False
    documents: int = 0
    """How many the request names or brings."""
    usage: Usage | None = None
    """Of a finished answer."""
    first_text_s: float | None = None
    """From arrival to the first piece of the answer."""
    complete: bool = False
    """Whether the last byte was handed to the server."""
    body_broke_off: bool = False
    """Whether the client left before it had sent all."""

    def asked(self, request: AnyRequest) -> None:
        """Note what kind of answer is wanted."""
        self.stream, self.documents = bool(request.stream), len(request.documents)

    def text_came(self) -> None:
        """Note when the answer begins."""
        if self.first_text_s is None:
            self.first_text_s = time.monotonic() - self.arrived_s

    @property
    def outcome(self) -> Outcome:
        """What became of it."""
        if self.code is not None:
            return "failed"
        return "finished" if self.complete and not self.body_broke_off else "client_left"

    def line(self, route: str | None) -> str:
        """The line, for a route's template; null where no route matches."""
        usage = self.usage
        fields = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": self.request_id,
            "method": self.method,
            "route": route,
            "status": self.status,
            "outcome": self.outcome,
            "code": self.code,
            "key": None if self.caller is None else self.caller.name,
            "namespace": None if self.caller is None else self.caller.namespace,
            "stream": self.stream,
            "documents": self.documents,
            "prompt_tokens": None if usage is None else usage["prompt_tokens"],
            "completion_tokens": None if usage is None else usage["completion_tokens"],
            "ttft_ms": None if self.first_text_s is None else _ms(self.first_text_s),
            "total_ms": _ms(time.monotonic() - self.arrived_s),
        }
        return json.dumps(fields)


def access_of(request: Request) -> Access:
    """The record of a request that came through ``AccessLog``."""
    access = request.scope[_STATE]
    assert isinstance(access, Access)
    return access


class AccessLog:
    """Outermost layer of the application: gives requests their id and logs how they end."""

    def __init__(self, app: ASGIApp, *, echoed_outside: bool = False) -> None:
        """Wrap an application.

        Args:
            app: what answers.
            echoed_outside: whether a proxy in front puts the request's own header into the response, as Ray Serve's
                does; a second one would make the value a list.
        """
        self._app = app
        self._echoed_outside = echoed_outside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(ID_HEADER, "")
        is_sane = _SANE_ID.fullmatch(given) is not None
        access = Access(request_id=given if is_sane else uuid.uuid4().hex, method=scope["method"])
        scope[_STATE] = access

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                access.status = message["status"]
                if not (is_sane and self._echoed_outside):
                    MutableHeaders(scope=message)[ID_HEADER] = access.request_id
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                access.complete = True

        try:
            await self._app(scope, receive, noting)
        finally:
            # Without the mark of Serve's own lines, which enable_access_log turns off.
            _logger.info("%s", access.line(_template(scope)))


def _template(scope: Scope) -> str | None:
    route: Any = scope.get("route")
    return getattr(route, "path_format", None)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
