"""What turns text into slots, by name: enough to tell their identity without loading any weights."""

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from c2kv_core.alias import ALIASES
from c2kv_core.errors import InputError, RatioError, SidecarError
from c2kv_core.identity import Identity
from c2kv_core.sidecar_config import SidecarConfig
from c2kv_core.slots import check_ratio

# What needs torch and transformers is imported where it is used: every configuration names a spec, also for `--help`.
if TYPE_CHECKING:
    from c2kv_core.sidecar import Sidecar


@dataclass(frozen=True, kw_only=True)
class CompressorSpec:
    """Names of the base, the sidecar and the settings of one way to compress."""

    model: str = "smollm2-135m-instruct"
    """Alias, Hugging Face directory or hub id."""
    sidecar: str | None = None
    """Sidecar directory or ``s3://`` URI; None takes the one shipped for the alias, else an untrained one."""
    ratios: tuple[int, ...] = (4,)
    """Source tokens per slot; all are computed in one pass."""
    force_ratio: bool = False
    """Allow ratios the sidecar was not trained for."""
    dtype: str = "float32"
    """Computing dtype."""
    device: str = "cpu"
    slot_dtype: str = "bfloat16"
    """Dtype of slots between extraction and use."""
    quantisation: str = "none"
    """Codec by which slots are stored: ``none`` or ``int8``."""
    max_batch_tokens: int = 4096
    """Padded tokens of one forward pass; of no influence on what slots are, beyond rounding."""

    def __post_init__(self) -> None:
        from c2kv_core.models import parse_dtype
        from c2kv_core.store import CODECS

        if not self.ratios:
            raise RatioError("expected at least one ratio, got none")
        for ratio in self.ratios:
            check_ratio(ratio)
        parse_dtype(self.dtype)
        parse_dtype(self.slot_dtype)
        if self.quantisation not in CODECS:
            raise InputError(f"expected quantisation {' or '.join(CODECS)}, got {self.quantisation!r}")

    def sidecar_directory(self) -> Path | None:
        """Where the sidecar is; None means an untrained one."""
        if self.sidecar is not None:
            from c2kv_core.remote_sidecar import sidecar_directory

            return sidecar_directory(self.sidecar)
        shipped = Path(str(resources.files("c2kv_core"))) / "pretrained" / self.model
        return shipped if self.model in ALIASES and shipped.is_dir() else None

    def load_sidecar(self) -> "Sidecar | None":
        """The sidecar, or None for an untrained one, which ``Sidecar.from_base`` makes from the model.

        Raises:
            SidecarError: unreadable.
            RatioError: a ratio it was not trained for, not forced.
        """
        directory = self.sidecar_directory()
        if directory is None:
            return None
        from c2kv_core.sidecar import Sidecar

        sidecar = Sidecar.load(directory)
        if not self.force_ratio:
            for ratio in self.ratios:
                sidecar.config.require_ratio(ratio)
        return sidecar

    def is_trained(self) -> bool:
        """Whether the sidecar is more than the copy of the base it started as.

        Raises:
            SidecarError: unreadable.
            RatioError: a ratio it was not trained for, not forced.
        """
        sidecar = self.load_sidecar()
        return sidecar is not None and sidecar.config.trained

    def untrained_config(self) -> SidecarConfig:
        """Settings of the untrained sidecar."""
        return SidecarConfig(ratios=self.ratios)

    def max_positions(self) -> int:
        """Positions that the model was made for. Reads its configuration only.

        Raises:
            ModelError: it cannot be found.
        """
        from transformers import AutoConfig

        from c2kv_core.models import model_directory

        return int(AutoConfig.from_pretrained(model_directory(self.model)).max_position_embeddings)

    def identities(self) -> dict[int, Identity]:
        """Identity of stored slots for each ratio. Reads files, loads no weights.

        Raises:
            InputError: a subclass that says which part cannot be used.
        """
        from transformers import AutoConfig

        from c2kv_core import hf_adapter
        from c2kv_core.architecture import check_supported, rope_parameters
        from c2kv_core.base_digest import base_digest
        from c2kv_core.models import load_tokenizer, model_directory
        from c2kv_core.store import FORMAT_VERSION
        from c2kv_core.text import RENDERING_VERSION, SPLITTER_VERSION, ChatRenderer

        directory = model_directory(self.model)
        config = AutoConfig.from_pretrained(directory)
        check_supported(config)
        renderer = ChatRenderer(load_tokenizer(directory))
        weights = base_digest(directory)
        settings, digest = self._sidecar_identity(weights)
        return {
            ratio: Identity(
                format_version=FORMAT_VERSION,
                base_digest=weights,
                tokenizer_digest=renderer.digest(),
                rendering_version=RENDERING_VERSION,
                splitter_version=SPLITTER_VERSION,
                document_layout=renderer.layout,
                rope=rope_parameters(config),
                geometry=hf_adapter.geometry(config),
                sidecar_digest=digest,
                ratio=ratio,
                overlap_tokens=settings.overlap_tokens,
                residual=settings.residual,
                selection=settings.selection,
                max_part_tokens=settings.max_part_tokens,
                slot_dtype=self.slot_dtype,
                quantisation=self.quantisation,
            )
            for ratio in self.ratios
        }

    def _sidecar_identity(self, weights: str) -> tuple[SidecarConfig, str]:
        sidecar = self.load_sidecar()
        if sidecar is None:
            settings = self.untrained_config()
            # An untrained sidecar follows from the base, so the base's digest stands for its tensors.
            meaning = {**asdict(settings), "ratios": None, "base": weights}
            if settings.selection == "none":
                del meaning["selection"]
            return settings, "untrained-" + hashlib.sha256(
                json.dumps(meaning, sort_keys=True).encode()
            ).hexdigest()
        recorded = sidecar.header.base_digest
        if recorded and recorded != weights:
            raise SidecarError(
                f"the sidecar was trained for base weights {recorded[:12]}, those of {self.model} are {weights[:12]}; "
                "give the model it was trained for"
            )
        return sidecar.config, sidecar.digest()
