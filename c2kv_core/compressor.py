"""Everything that turns text into stored documents, loaded: what an extractor actor or a replica holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from c2kv_core.document import CompressedDocument, StoredDocument
from c2kv_core.extractor import Extractor
from c2kv_core.identity import Identity
from c2kv_core.models import load_base, parse_dtype
from c2kv_core.sidecar import Sidecar
from c2kv_core.spec import CompressorSpec
from c2kv_core.text import ChatRenderer, content_hash, document_parts


class SourceDocument(NamedTuple):
    """A document as its owner gives it."""

    doc_id: str
    title: str
    text: str


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
        """
        identities = spec.identities()
        model, tokenizer = load_base(spec.model, dtype=spec.dtype, device=spec.device)
        sidecar = spec.load_sidecar()
        if sidecar is None:
            sidecar = Sidecar.from_base(model, spec.untrained_config(), eos_token_id=tokenizer.eos_token_id)
        return cls(
            spec=spec,
            model=model,
            tokenizer=tokenizer,
            renderer=ChatRenderer(tokenizer),
            sidecar=sidecar,
            extractor=Extractor(model, sidecar),
            identities=identities,
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
        """
        flat = [ids for document in parts for ids in document]
        slots = self.extractor.extract_ratios(
            flat, ratios or self.spec.ratios, force_ratio=self.spec.force_ratio
        )
        dtype = parse_dtype(self.spec.slot_dtype)
        return {
            ratio: _regroup([d.to(dtype) for d in made], [len(document) for document in parts])
            for ratio, made in slots.items()
        }

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


def _regroup(flat: list[CompressedDocument], counts: list[int]) -> list[tuple[CompressedDocument, ...]]:
    grouped, start = [], 0
    for count in counts:
        grouped.append(tuple(flat[start : start + count]))
        start += count
    return grouped
