"""Identity of stored slots: everything that decides their bits, and its fingerprint."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from c2kv_core.document import Geometry
from c2kv_core.errors import IdentityError


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What made a stored record. Two identities are interchangeable only if equal."""

    format_version: int
    """Version of the record layout (``c2kv_core.store.FORMAT_VERSION``)."""
    base_digest: str
    """Digest of the base model's weights (``c2kv_core.digest``)."""
    tokenizer_digest: str
    """Digest of tokenizer and chat template."""
    rendering_version: int
    """Version of the text layout of documents (``c2kv_core.text``)."""
    splitter_version: int
    """Version of the rules that cut long documents into parts."""
    document_layout: str
    """``turns`` (a user turn a document) or ``block`` (documents share one user turn)."""
    rope: dict[str, Any]
    """RoPE parameters of the base config."""
    geometry: Geometry
    sidecar_digest: str
    """Digest of the sidecar's tensors."""
    ratio: int
    """k, source tokens per slot."""
    overlap_tokens: int
    residual: str
    max_part_tokens: int
    slot_dtype: str
    """``float32``, ``bfloat16`` or ``float16``: of the slots as they are used."""
    quantisation: str
    """Slot codec they are stored by: ``none`` or ``int8``."""
    selection: str = "none"

    @property
    def canonical_json(self) -> str:
        """JSON with sorted keys and no blanks: the text that is hashed."""
        described = asdict(self)
        if self.selection == "none":
            # As it was before there was the option: what is stored keeps its fingerprint.
            del described["selection"]
        return json.dumps(described, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @property
    def fingerprint(self) -> str:
        """SHA-256 hex of ``canonical_json``."""
        return hashlib.sha256(self.canonical_json.encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str) -> "Identity":
        """Parse ``canonical_json``.

        Raises:
            IdentityError: not the JSON of an identity of this version.
        """
        try:
            data = json.loads(text)
            return cls(**{**data, "geometry": Geometry(**data["geometry"])})
        except (ValueError, TypeError, KeyError) as error:
            raise IdentityError(f"expected the JSON of an identity, got something else: {error}") from error

    def differing_fields(self, other: "Identity") -> list[str]:
        """Names of the fields in which two identities differ, in declaration order."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
