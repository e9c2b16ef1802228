"""Errors of the API: OpenAI's form, with a code that never changes.

::

    400  invalid_json, invalid_request, unknown_parameter, unsupported_parameter, context_length_exceeded,
         ratio_not_served, too_many_documents
    401  invalid_api_key                                        403  keys_required, role_required
    404  document_not_found, model_not_found, not_found         405  method_not_allowed
    413  request_too_large, document_too_long
    429  rate_limit_exceeded                                     (with Retry-After)
    500  internal_error
    503  overloaded, store_unavailable, replica_unavailable     (with Retry-After)
    504  deadline_exceeded
"""

import logging
from dataclasses import dataclass
from typing import Any

from c2kv_core.errors import (
    C2KVError,
    ContextLengthError,
    InputError,
    RatioError,
    StoreError,
    StoreFormatError,
    TemplateError,
)

logger = logging.getLogger(__name__)

STORE_RETRY_AFTER_S = 5
"""Seconds after which a client should try again when the store failed."""


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""OpenAI's coarse classes by status; all others below 500 are invalid requests."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why a request failed, in plain values that cross threads and processes."""

    status: int
    """HTTP status."""
    code: str
    """Stable, for programs."""
    message: str
    """For a person: what was expected, what came, what to do."""
    param: str | None = None
    """The part of the request at fault."""
    retry_after_s: int | None = None
    """Seconds to wait before trying again; None where that would not help."""

    @property
    def type(self) -> str:
        """OpenAI's coarse class of the error."""
        if self.status >= 500:
            return "server_error"
        return _TYPES.get(self.status, "invalid_request_error")

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that clients get."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Response headers."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


class ApiError(Exception):
    """Ends a request with a fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def bad_request(message: str, *, code: str = "invalid_request", param: str | None = None) -> ApiError:
    """Status 400."""
    return ApiError(Fault(status=400, code=code, message=message, param=param))


def overloaded(message: str, *, retry_after_s: int) -> ApiError:
    """Status 503: no capacity now."""
    return ApiError(Fault(status=503, code="overloaded", message=message, retry_after_s=retry_after_s))


def unavailable(message: str, *, retry_after_s: int) -> ApiError:
    """Status 503: the replica that had the request is gone."""
    return ApiError(
        Fault(status=503, code="replica_unavailable", message=message, retry_after_s=retry_after_s)
    )


def deadline_exceeded(during: str) -> ApiError:
    """Status 504."""
    message = f"the deadline passed while {during}; ask for less, or give a longer c2kv.deadline_ms"
    return ApiError(Fault(status=504, code="deadline_exceeded", message=message))


INTERNAL = Fault(
    status=500, code="internal_error", message="the answer failed inside the server; see its log"
)


def fault_of(error: C2KVError) -> Fault:
    """What a client is told about an error of the core."""
    match error:
        case ContextLengthError():
            return Fault(status=400, code="context_length_exceeded", message=str(error), param="messages")
        case RatioError():
            return Fault(status=400, code="ratio_not_served", message=str(error), param="c2kv.ratio")
        case TemplateError():
            return Fault(status=400, code="invalid_request", message=str(error), param="messages")
        case StoreFormatError():  # it was one when the server started
            return _store_fault(error)
        case InputError():
            return Fault(status=400, code="invalid_request", message=str(error))
        case StoreError():
            return _store_fault(error)
    return INTERNAL


def _store_fault(error: C2KVError) -> Fault:
    # Where it is and how it fails is not for clients.
    logger.warning("the store cannot be used: %s", error)
    return Fault(
        status=503,
        code="store_unavailable",
        message="the store cannot be used now; try again",
        param="documents",
        retry_after_s=STORE_RETRY_AFTER_S,
    )
