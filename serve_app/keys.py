"""Bearer keys: who asks, by the hash of what they present.

The key file (YAML or JSON) is read anew when it changes, so that keys come and go without a restart. It holds hashes
only; keys are long and random (``c2kv keys new`` makes them), so that SHA-256 without a salt is enough.
"""

import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, Field

from c2kv_core.config import Config, parse_config
from c2kv_core.errors import ConfigError, InputError
from c2kv_core.store.names import check_namespace
from serve_app.caller import Caller, Role
from serve_app.config import ServeConfig
from serve_app.errors import ApiError, Fault

logger = logging.getLogger(__name__)

KEYS_VARIABLE = "C2KV_KEYS"
"""Environment variable that may hold the text of a key file."""
KEY_PREFIX = "c2kv-"
_LOOK_EVERY_S = 1.0
"""How often a key file is looked at."""


def _namespace(name: str) -> str:
    try:
        return check_namespace(name)
    except InputError as error:
        raise ValueError(str(error)) from error


_Namespace = Annotated[str, AfterValidator(_namespace)]


class KeyEntry(Config):
    """One key."""

    name: str = Field(min_length=1)
    """For logs and metrics."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Hex digest of the key."""
    namespace: _Namespace
    """Whose documents are read and written."""
    shared: tuple[_Namespace, ...] = ()
    """Further namespaces whose documents can be read, in the order in which they are searched."""
    roles: frozenset[Role] = frozenset({"query"})
    """``query`` asks, ``write`` puts and deletes documents, ``admin`` is kept for routes that there are not yet."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Null is without limit. Counted by each ingress replica."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Prompt and answer tokens; null is without limit. Counted by each ingress replica."""

    def grant(self) -> "Grant":
        """What presenting this key allows."""
        caller = Caller(name=self.name, namespace=self.namespace, shared=self.shared, roles=self.roles)
        return Grant(
            caller=caller,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
        )


class KeyFile(Config):
    """All keys."""

    keys: tuple[KeyEntry, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Grant:
    """Who asks, and how much."""

    caller: Caller
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


def new_key() -> tuple[str, str]:
    """A fresh key and its hash."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, hash_key(key)


def hash_key(key: str) -> str:
    """SHA-256 hex of a key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


class KeyRing:
    """Tells keys apart. Safe to share between threads."""

    def __init__(self, *, path: str | None, anybody: Caller, allow_anonymous: bool) -> None:
        """Read the keys.

        Args:
            path: key file; None takes the text in ``C2KV_KEYS``, if that is set.
            anybody: who asks without a key.
            allow_anonymous: whether that is allowed. Where no keys are configured, it is for this machine in any case.

        Raises:
            ConfigError: a key file that cannot be read.
        """
        self._path = path
        self._anybody, self._allow_anonymous = anybody, allow_anonymous
        self._lock = threading.Lock()
        self._looked_s = 0.0
        self._stamp: tuple[int, int] | None = None
        self._entries: tuple[KeyEntry, ...] = ()
        text = os.environ.get(KEYS_VARIABLE)
        if path is not None:
            self._stamp = _stamp(path)
            self._entries = _read(path)
        elif text:
            self._entries = _parsed(text, source=KEYS_VARIABLE)
        self._keyed = path is not None or bool(text)

    def grant(self, authorization: str | None, host: str | None, asked: str | None = None) -> Grant:
        """Who sends a request.

        Args:
            authorization: the header's value.
            host: address of the client.
            asked: the header ``Host``: by which name the client knows this server.

        Raises:
            ApiError: 401 without a valid key; 403 from elsewhere where no keys are configured.
        """
        if authorization is None or not self._keyed:
            return self._unkeyed(host, asked)
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorised("expected the header 'Authorization: Bearer KEY'")
        presented = hash_key(key.strip())
        found = None
        for entry in self._current():
            # Every hash is compared, each in constant time: how long it takes tells nothing.
            if hmac.compare_digest(entry.sha256, presented):
                found = entry
        if found is None:
            raise _unauthorised("the key is not known; ask for a new one")
        return found.grant()

    def _unkeyed(self, host: str | None, asked: str | None) -> Grant:
        # A page of a stranger's site, in a browser on this machine, asks from here too, but by its own site's name.
        local = _is_local(host) and _names_this_machine(asked)
        if self._allow_anonymous or (not self._keyed and local):
            return Grant(caller=self._anybody)
        if self._keyed:
            raise _unauthorised("expected the header 'Authorization: Bearer KEY'")
        message = (
            "this server has no keys, and so answers only its own machine, asked as localhost; set keys_file, or "
            "allow_anonymous to answer everybody"
        )
        raise ApiError(Fault(status=403, code="keys_required", message=message))

    def _current(self) -> tuple[KeyEntry, ...]:
        if self._path is None:
            return self._entries
        with self._lock:
            if time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
                self._looked_s = time.monotonic()
                self._reload(self._path)
            return self._entries

    def _reload(self, path: str) -> None:
        try:
            stamp = _stamp(path)
            if stamp != self._stamp:
                self._entries, self._stamp = _read(path), stamp
                logger.info("read %d keys anew from %s", len(self._entries), path)
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)


def key_ring(config: ServeConfig) -> KeyRing:
    """The keys of a configuration.

    Raises:
        ConfigError: a key file that cannot be read.
    """
    return KeyRing(path=config.keys_file, anybody=config.anybody(), allow_anonymous=config.allow_anonymous)


def has_keys(config: ServeConfig) -> bool:
    """Whether keys say who reads what, if only an empty list; none are read."""
    return config.keys_file is not None or bool(os.environ.get(KEYS_VARIABLE))


def check_keys(config: ServeConfig, host: str) -> None:
    """Refuse to listen where strangers are, without keys.

    Raises:
        ConfigError: says what to set.
    """
    key_ring(config)
    if not (has_keys(config) or config.allow_anonymous or _is_local(host) or host == "localhost"):
        raise ConfigError(
            f"without keys only 127.0.0.1 can be served, got host {host}; give --keys-file (`c2kv keys new` makes "
            "entries), or allow_anonymous=true to answer everybody"
        )


def _read(path: str) -> tuple[KeyEntry, ...]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the key file {path}: {error}") from error
    return _parsed(text, source=path)


def _parsed(text: str, *, source: str) -> tuple[KeyEntry, ...]:
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: expected YAML with a list 'keys', got something else") from error
    lists = [name.value for name, _ in node.value].count("keys") if isinstance(node, yaml.MappingNode) else 0
    if lists > 1:  # YAML would take the last alone
        raise ConfigError(f"{source}: expected one list 'keys', got {lists}; put all entries under the first")
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected a mapping with a list 'keys', got {type(data).__name__}")
    entries = parse_config(KeyFile, data, source=source).keys
    for what in ("name", "sha256"):
        values = [getattr(entry, what) for entry in entries]
        repeated = {value for value in values if values.count(value) > 1}
        if repeated:
            raise ConfigError(f"{source}: expected each {what} once, got {sorted(repeated)[0]!r} again")
    return entries


def _stamp(path: str) -> tuple[int, int]:
    try:
        # Follows the links by which Kubernetes swaps mounted secrets.
        status = Path(path).expanduser().stat()
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from error
    return (status.st_mtime_ns, status.st_ino)


def _is_local(host: str | None) -> bool:
    try:
        return host is not None and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _names_this_machine(asked: str | None) -> bool:
    try:
        name = urlsplit(f"//{asked or 'localhost'}").hostname
    except ValueError:
        return False
    return name == "localhost" or _is_local(name)


def _unauthorised(message: str) -> ApiError:
    return ApiError(Fault(status=401, code="invalid_api_key", message=message))
