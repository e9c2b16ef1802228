"""Settings of a sidecar that decide what its slots mean."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from c2kv_core.document import Geometry
from c2kv_core.errors import RatioError, SidecarError
from c2kv_core.slots import check_ratio

SIDECAR_FORMAT_VERSION = 1
RESIDUALS = ("none", "embed_mean", "embed_last")
"""``embed_mean`` adds the mean normed embedding of a slot's block to its q/k/v input in layer 0; ``embed_last`` adds
the embedding of the block's last token to the slot vector, so that an untrained slot stands for that token."""

SHARING = "heads"
SELECTIONS = ("none", "topk", SHARING)
"""``topk``: each head keeps keys and values of the tokens it scores highest, one a slot, for slots to start from.
``heads``: as many on average, but heads that look tokens up keep more than others (``c2kv_core.head_slots``)."""


@dataclass(frozen=True, kw_only=True)
class SidecarConfig:
    """How a sidecar compresses. All fields are saved beside its tensors."""

    ratios: tuple[int, ...] = (4,)
    """Source tokens per slot it was (or is to be) trained for, ascending."""
    max_part_tokens: int = 1024
    """Longest part it was trained for; longer documents are split. 1,024 in the paper's recipe."""
    overlap_tokens: int = 0
    """Tokens before its block that a slot also sees; 0 is the paper."""
    residual: str = "none"
    """Addition to the slots' first input, one of ``RESIDUALS``; ``none`` is the paper."""
    selection: str = "none"
    """What keys and values of slots start from, one of ``SELECTIONS``; ``none`` (own projections) is the paper."""
    rank: int | None = None
    """Rank of the projections' deltas on the base's; None stores full projections."""
    trained: bool = False
    """False for a sidecar that is still the copy of the base it started as."""

    def __post_init__(self) -> None:
        if not self.ratios:
            raise RatioError("expected at least one ratio in the sidecar's config, got none")
        object.__setattr__(self, "ratios", tuple(sorted({check_ratio(k) for k in self.ratios})))
        if self.residual not in RESIDUALS:
            raise SidecarError(f"expected residual {' or '.join(RESIDUALS)}, got {self.residual!r}")
        if self.selection not in SELECTIONS:
            raise SidecarError(f"expected selection {' or '.join(SELECTIONS)}, got {self.selection!r}")
        for name, least in (("max_part_tokens", 1), ("overlap_tokens", 0)):
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                raise SidecarError(f"expected {name} of {least} or more, got {getattr(self, name)!r}")
        if self.rank is not None and (type(self.rank) is not int or self.rank < 1):
            raise SidecarError(f"expected rank of 1 or more, or null for full projections, got {self.rank!r}")
        if type(self.trained) is not bool:
            raise SidecarError(f"expected trained true or false, got {self.trained!r}")

    def require_ratio(self, ratio: int) -> int:
        """The ratio itself.

        Raises:
            RatioError: not among those the sidecar was trained for.
        """
        if check_ratio(ratio) not in self.ratios:
            known = ", ".join(map(str, self.ratios))
            raise RatioError(
                f"ratio {ratio} is not one this sidecar is for ({known}); give one of these, or force_ratio=true"
            )
        return ratio


@dataclass(frozen=True, kw_only=True)
class SidecarHeader:
    """The JSON file beside a sidecar's tensors."""

    format_version: int
    config: SidecarConfig
    geometry: Geometry
    base_digest: str
    """Digest of the base weights the sidecar is for; empty where it was not recorded."""

    def to_json(self) -> str:
        """Readable JSON."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str) -> "SidecarHeader":
        """Parse ``to_json``.

        Raises:
            SidecarError: not such JSON, an unknown key, or another format version.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise SidecarError(f"{source}: expected JSON, got something else: {error}") from error
        version = data.get("format_version") if isinstance(data, dict) else None
        if version != SIDECAR_FORMAT_VERSION:
            raise SidecarError(f"{source}: expected format_version {SIDECAR_FORMAT_VERSION}, got {version!r}")
        try:
            config = SidecarConfig(**_known(SidecarConfig, data["config"], source))
            geometry = Geometry(**_known(Geometry, data["geometry"], source))
            return cls(
                format_version=version, config=config, geometry=geometry, base_digest=str(data["base_digest"])
            )
        except (KeyError, TypeError) as error:
            raise SidecarError(f"{source}: incomplete or mistyped: {error}") from error


def _known(kind: type, data: dict[str, Any], source: str) -> dict[str, Any]:
    unknown = sorted(set(data) - {f.name for f in fields(kind)})
    if unknown:
        raise SidecarError(
            f"{source}: unknown key {unknown[0]!r}; this release may be too old for the sidecar"
        )
    return data
