"""A client of S3 or a server that speaks it, made from the standard AWS settings, and its errors in plain words."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
)

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 20.0
"""Longest silence of a server within an answer."""
ATTEMPTS = 4
"""Tries of one request, with exponential pauses between them."""
POOL_CONNECTIONS = 32
"""Connections that are kept open; also the most requests at once."""

_DEFAULT_REGION = "us-east-1"
MISSING = {"NoSuchKey", "NoSuchUpload", "404"}
"""Codes of what is not there."""
TAKEN = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
"""Codes of a conditional write that another writer won."""
_ADVICE = {
    "NoSuchBucket": "there is no such bucket; create it, or correct the URI",
    "InvalidAccessKeyId": "the server does not know the access key; check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret key is wrong; check AWS_SECRET_ACCESS_KEY",
    "AccessDenied": "access denied; the credentials lack a permission (docs/store.md lists those needed)",
    "403": "access denied; check the credentials and their permissions (docs/store.md lists those needed)",
    "ExpiredToken": "the credentials have expired; renew them",
    "InvalidToken": "the session token is not valid; check AWS_SESSION_TOKEN",
    "RequestTimeTooSkewed": "this machine's clock differs from the server's; set it right",
    "InsufficientStorage": "the server has no space left",
    "SlowDown": "the server asks for fewer requests; try again later",
}
"""What to do, by the code of S3's error."""


class ObjectStorageError(OSError):
    """A request that object storage refused, or that did not reach it; says what to do."""


@dataclass(frozen=True, kw_only=True)
class S3Settings:
    """Where requests go, and who sends them."""

    endpoint: str | None
    """URL of a server; None is AWS."""
    region: str
    access_key: str
    secret_key: str
    token: str | None

    def delta_options(self) -> dict[str, str]:
        """The same for delta-rs."""
        options = {
            "AWS_REGION": self.region,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "timeout": f"{READ_TIMEOUT_S:.0f}s",
            "connect_timeout": f"{CONNECT_TIMEOUT_S:.0f}s",
            # A commit creates its file only if that is absent; every S3 server we support can do that.
            "conditional_put": "etag",
        }
        if self.token:
            options["AWS_SESSION_TOKEN"] = self.token
        if self.endpoint:
            options |= {
                "AWS_ENDPOINT_URL": self.endpoint,
                "AWS_ALLOW_HTTP": str(self.endpoint.startswith("http://")).lower(),
                "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
            }
        return options


class S3Session:
    """Credentials and settings, found where AWS's own tools look for them; renewed when they expire."""

    def __init__(self) -> None:
        with plain_errors("read the AWS settings"):
            self._session = botocore.session.get_session()
            given = os.environ.get("AWS_REGION") or self._session.get_config_variable("region")
        self._region = given or _DEFAULT_REGION
        self._endpoint = self._configured_endpoint()

    def settings(self) -> S3Settings:
        """As they are now.

        Raises:
            ObjectStorageError: no credentials are set.
        """
        with plain_errors("find credentials"):
            found = self._session.get_credentials()
            if found is None:
                raise NoCredentialsError
            frozen = found.get_frozen_credentials()
        return S3Settings(
            endpoint=self._endpoint,
            region=self._region,
            access_key=frozen.access_key or "",
            secret_key=frozen.secret_key or "",
            token=frozen.token,
        )

    def _configured_endpoint(self) -> str | None:
        """From the environment or the profile, so that shards and tables go to the same place."""
        named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if not named:
            profile = self._session.get_scoped_config()
            services = self._session.full_config.get("services", {}).get(profile.get("services", ""), {})
            named = services.get("s3", {}).get("endpoint_url") or profile.get("endpoint_url")
        if named and not urlsplit(named).hostname:
            raise ObjectStorageError(
                f"expected an endpoint as http://host:port or https://host, got {named!r}"
            )
        return named or None

    def client(self) -> Any:
        """A client that many threads may share."""
        self.settings()
        return self._session.create_client(
            "s3",
            region_name=self._region,
            endpoint_url=self._endpoint,
            config=Config(
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=READ_TIMEOUT_S,
                retries={"total_max_attempts": ATTEMPTS, "mode": "standard"},
                max_pool_connections=POOL_CONNECTIONS,
                s3={"addressing_style": "path" if self._endpoint else "auto"},
                # Our records carry checksums; not every server knows S3's newer ones.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


@contextmanager
def plain_errors(doing: str) -> Iterator[None]:
    """Errors of the client leave as FileNotFoundError or ObjectStorageError.

    Args:
        doing: what is tried, with its object, for the message.
    """
    try:
        yield
    except ClientError as error:
        told = error.response.get("Error", {})
        code = str(told.get("Code", "unknown"))
        if code in MISSING:
            raise FileNotFoundError(errno.ENOENT, "no such object", doing) from error
        said = _ADVICE.get(code) or f"{code}: {str(told.get('Message', '')).strip() or 'no reason given'}"
        raise ObjectStorageError(f"{doing}: {said}") from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise ObjectStorageError(
            f"{doing}: no AWS credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role"
        ) from error
    except EndpointConnectionError as error:
        raise ObjectStorageError(
            f"{doing}: nothing answers at {error.kwargs.get('endpoint_url')}; check AWS_ENDPOINT_URL and the server"
        ) from error
    except (ConnectionError, HTTPClientError) as error:
        raise ObjectStorageError(f"{doing}: the connection failed {ATTEMPTS} times: {error}") from error
    except BotoCoreError as error:
        raise ObjectStorageError(f"{doing}: {error}") from error


def error_code(error: ClientError) -> str:
    """S3's code of an error; the HTTP status where it has none."""
    told = error.response.get("Error", {})
    return str(told.get("Code") or error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
