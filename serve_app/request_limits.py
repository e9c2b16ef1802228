"""What can be refused by the numbers in a request alone: at the ingress, before it is sent on, and in the replica."""

from serve_app.config import ServeConfig
from serve_app.errors import bad_request
from serve_app.protocol import AnyRequest


def check_limits(request: AnyRequest, config: ServeConfig) -> None:
    """Refuse more documents or answer tokens than are served.

    Raises:
        ApiError: 400.
    """
    count, most = len(request.documents), config.max_documents
    if count > most:
        raise bad_request(
            f"expected at most {most} documents, got {count}", code="too_many_documents", param="documents"
        )
    limit = config.max_new_tokens_limit
    if (request.token_limit or 1) > limit:
        raise bad_request(
            f"expected max_tokens of at most {limit}, got {request.token_limit}", param="max_tokens"
        )
