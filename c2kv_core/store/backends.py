"""Which storage stands behind a URI: the one place that decides what back ends there are."""

import os
from pathlib import Path
from urllib.parse import unquote

from c2kv_core.errors import InputError
from c2kv_core.store.local_storage import LocalStorage
from c2kv_core.store.s3_storage import S3Storage
from c2kv_core.store.storage import Storage, split_uri


def open_storage(uri: str | os.PathLike[str]) -> Storage:
    """The storage behind a path, ``file://`` or ``s3://`` URI. Touches nothing yet.

    Raises:
        InputError: a scheme that is not supported, or a path that cannot hold a store.
    """
    text = os.fspath(uri)
    if not text:
        raise InputError("expected the directory or s3:// URI of a store, got ''")
    if "://" not in text:
        return LocalStorage(Path(text))
    parts = split_uri(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and not (parts.query or parts.fragment):
        return LocalStorage(Path(unquote(parts.path)))
    if parts.scheme == "s3":
        return S3Storage(text)
    raise InputError(f"expected a local directory, a file:// or an s3:// URI as store, got {text!r}")
