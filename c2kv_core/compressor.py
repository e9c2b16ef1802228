"""Everything that turns text into stored documents, loaded: what an extractor actor or a replica holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from c2kv_core.base_digest import base_digest
from c2kv_core.document import CompressedDocument, SourceDocument, StoredDocument
from c2kv_core.errors import IdentityError, InputError
from c2kv_core.extractor import Extractor
from c2kv_core.identity import Identity
from c2kv_core.models import load_base, model_directory, parse_dtype
from c2kv_core.sidecar import Sidecar
from c2kv_core.spec import CompressorSpec
from c2kv_core.store import as_stored
from c2kv_core.text import ChatRenderer, content_hash, document_parts


@dataclass(frozen=True, kw_only=True)
class Compressor:
    """A model, its tokenizer and a sidecar, ready to compress."""

    spec: CompressorSpec
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    renderer: ChatRenderer
    sidecar: Sidecar
    extractor: Extractor
    identities: dict[int, Identity]
    """Identity of the slots at each of the spec's ratios."""

    @classmethod
    def load(cls, spec: CompressorSpec) -> "Compressor":
        """Load weights and check that everything fits.

        Raises:
            InputError: a subclass that says which part cannot be used.
            IdentityError: files changed while they were loaded, so nobody knows what the slots would be.
        """
        identities = spec.identities()
        model, tokenizer = load_base(spec.model, dtype=spec.dtype, device=spec.device)
        sidecar = spec.load_sidecar()
        if _digests(identities) != {(base_digest(model_directory(spec.model)), _digest(sidecar, identities))}:
            raise IdentityError(
                f"the files of model {spec.model!r} or of its sidecar changed while they were loaded; try again "
                "when nobody writes there"
            )
        if sidecar is None:
            sidecar = Sidecar.from_base(model, spec.untrained_config(), eos_token_id=tokenizer.eos_token_id)
        return cls(
            spec=spec,
            model=model,
            tokenizer=tokenizer,
            renderer=ChatRenderer(tokenizer),
            sidecar=sidecar,
            extractor=Extractor(model, sidecar, max_batch_tokens=spec.max_batch_tokens),
            identities=identities,
        )

    def beside(self, spec: CompressorSpec) -> "Compressor":
        """A compressor with another sidecar or other settings over the same base, whose weights are shared.

        Raises:
            InputError: another base, dtype or device, or a part that cannot be used.
            IdentityError: files changed while they were loaded.
        """
        for name in ("model", "dtype", "device"):
            own, came = getattr(self.spec, name), getattr(spec, name)
            if own != came:
                raise InputError(f"expected {name} {own!r}, that of the loaded base, got {came!r}")
        identities = spec.identities()
        sidecar = spec.load_sidecar()
        bases = {identity.base_digest for identity in (*identities.values(), *self.identities.values())}
        if len(bases) != 1 or _digests(identities) != {(bases.pop(), _digest(sidecar, identities))}:
            raise IdentityError(
                f"the files of model {spec.model!r} or of a sidecar changed while they were loaded; try again "
                "when nobody writes there"
            )
        if sidecar is None:
            sidecar = Sidecar.from_base(
                self.model, spec.untrained_config(), eos_token_id=self.tokenizer.eos_token_id
            )
        return replace(
            self, spec=spec, sidecar=sidecar, extractor=Extractor(self.model, sidecar), identities=identities
        )

    @property
    def max_part_tokens(self) -> int:
        """Longest part, turn and title included."""
        return self.sidecar.config.max_part_tokens

    def part_ids(self, title: str, text: str) -> list[list[int]]:
        """Token ids of each part of a document.

        Raises:
            InputError: the document has no text.
        """
        return document_parts(self.renderer, title, text, max_part_tokens=self.max_part_tokens)

    def compress(
        self, parts: Sequence[Sequence[Sequence[int]]], ratios: Sequence[int] | None = None
    ) -> dict[int, list[tuple[CompressedDocument, ...]]]:
        """Slots of documents given as token ids of their parts: ``{ratio: [parts of each document]}``.

        Documents are batched together by length; the token states are computed once for all ratios.

        Raises:
            InputError: slots that are not finite in the dtype they are stored in.
        """
        flat = [ids for document in parts for ids in document]
        dtype = parse_dtype(self.spec.slot_dtype)
        slots = self.extractor.extract_ratios(
            flat,
            ratios or self.spec.ratios,
            force_ratio=self.spec.force_ratio,
            # At once: a long document would fill a GPU with slots that only wait to be stored.
            finish=lambda part: _finite(part.to(dtype, device="cpu")),
        )
        counts = [len(document) for document in parts]
        return {ratio: _regroup(made, counts) for ratio, made in slots.items()}

    def as_read(self, parts: Sequence[CompressedDocument]) -> tuple[CompressedDocument, ...]:
        """Parts as the store gives them back: the same, or rounded where it keeps slots quantised."""
        codec = self.spec.quantisation
        return tuple(part if codec == "none" else as_stored(part, codec)[0] for part in parts)

    def stored(
        self, namespace: str, source: SourceDocument, parts: tuple[CompressedDocument, ...]
    ) -> StoredDocument:
        """The record of a compressed document."""
        return StoredDocument(
            namespace=namespace,
            doc_id=source.doc_id,
            content_hash=content_hash(source.title, source.text),
            title=source.title,
            parts=parts,
        )


def _finite(part: CompressedDocument) -> CompressedDocument:
    """The part itself: checksums would seal infinities and NaNs like any other bytes, and answers would be empty."""
    for name, tensor in (("keys", part.keys), ("values", part.values)):
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(
                f"{name} of a part of {part.num_tokens} tokens are not finite in {tensor.dtype}; use bfloat16 or "
                "float32 for dtype and slot_dtype, and check the sidecar"
            )
    return part


def _digests(identities: dict[int, Identity]) -> set[tuple[str, str]]:
    return {(identity.base_digest, identity.sidecar_digest) for identity in identities.values()}


def _digest(sidecar: Sidecar | None, identities: dict[int, Identity]) -> str:
    """Of the tensors at hand; an untrained sidecar follows from the base's."""
    return next(iter(identities.values())).sidecar_digest if sidecar is None else sidecar.digest()


def _regroup(flat: list[CompressedDocument], counts: list[int]) -> list[tuple[CompressedDocument, ...]]:
    grouped, start = [], 0
    for count in counts:
        grouped.append(tuple(flat[start : start + count]))
        start += count
    return grouped
