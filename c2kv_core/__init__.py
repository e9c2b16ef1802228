"""C2KV: documents as compressed key/value slots that compose in any order, and the store that keeps them."""

from c2kv_core.compose import ComposedContext, compose, prefill
from c2kv_core.compressor import Compressor, SourceDocument
from c2kv_core.document import CompressedDocument, Geometry, StoredDocument
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
