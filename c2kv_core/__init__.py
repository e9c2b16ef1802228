"""C2KV: documents as compressed key/value slots that compose in any order, and the store that keeps them."""

from typing import TYPE_CHECKING

from c2kv_core.lazy import make_lazy

if TYPE_CHECKING:
    from c2kv_core.compose import ComposedContext, compose, prefill
    from c2kv_core.compressor import Compressor
    from c2kv_core.document import CompressedDocument, Geometry, SourceDocument, StoredDocument
    from c2kv_core.errors import C2KVError
    from c2kv_core.extractor import Extractor
    from c2kv_core.generate import generate
    from c2kv_core.identity import Identity
    from c2kv_core.models import load_base
    from c2kv_core.sampling import SamplingParams
    from c2kv_core.sidecar import Sidecar
    from c2kv_core.sidecar_config import SidecarConfig
    from c2kv_core.spec import CompressorSpec

__all__ = [
    "C2KVError",
    "ComposedContext",
    "CompressedDocument",
    "Compressor",
    "CompressorSpec",
    "Extractor",
    "Geometry",
    "Identity",
    "SamplingParams",
    "Sidecar",
    "SidecarConfig",
    "SourceDocument",
    "StoredDocument",
    "compose",
    "generate",
    "load_base",
    "prefill",
]

make_lazy(
    __name__,
    {
        "ComposedContext": "compose",
        "compose": "compose",
        "prefill": "compose",
        "Compressor": "compressor",
        "SourceDocument": "document",
        "CompressedDocument": "document",
        "Geometry": "document",
        "StoredDocument": "document",
        "C2KVError": "errors",
        "Extractor": "extractor",
        "generate": "generate",
        "Identity": "identity",
        "load_base": "models",
        "SamplingParams": "sampling",
        "Sidecar": "sidecar",
        "SidecarConfig": "sidecar_config",
        "CompressorSpec": "spec",
    },
)
