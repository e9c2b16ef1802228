"""What all editions of a replica share: tokenizer, memory, limits, threads; and how an edition is put together."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from c2kv_core import hf_adapter
from c2kv_core.compressor import Compressor
from c2kv_core.store import DiskTier
from serve_app.answering import Answerer
from serve_app.byte_lru import ByteLru
from serve_app.config import ServeConfig
from serve_app.context_builder import ContextBuilder, Prefixes
from serve_app.cost_gate import CostGate
from serve_app.documents import DocumentResolver
from serve_app.edition import Edition
from serve_app.fetching import DocumentFetcher
from serve_app.fitting import Fitting
from serve_app.hot_documents import HotDocuments
from serve_app.probe import open_store
from serve_app.slot_memory import SlotMemory


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Parts that do not depend on the identity of slots."""

    config: ServeConfig
    tokenizer_lock: threading.Lock
    """Fast tokenizers refuse to be reconfigured while another thread encodes."""
    fitting: Fitting
    memory: SlotMemory
    disk: DiskTier | None
    hot: HotDocuments | None
    """What is asked for most; None where nobody wants to know."""
    prefixes: Prefixes
    readers: ThreadPoolExecutor
    """Reads and tokenising stay off the event loop and off the model's thread."""

    @classmethod
    def of(cls, config: ServeConfig, compressor: Compressor) -> "Shared":
        """Make them."""
        lock = threading.Lock()
        return cls(
            config=config,
            tokenizer_lock=lock,
            fitting=Fitting(
                compressor.renderer,
                positions=hf_adapter.max_positions(compressor.model),
                tokenizer_lock=lock,
            ),
            memory=SlotMemory(max_bytes=config.memory_cache_bytes),
            disk=None
            if config.disk_cache_dir is None
            else DiskTier(
                config.disk_cache_dir,
                max_bytes=config.disk_cache_bytes,
                max_age_s=config.disk_cache_max_age_s,
            ),
            hot=HotDocuments(config.store) if config.warm_up_documents else None,
            prefixes=ByteLru(config.prefix_cache_bytes),
            readers=ThreadPoolExecutor(config.fetch_threads, thread_name_prefix="c2kv-fetch"),
        )

    def edition(self, compressor: Compressor) -> Edition:
        """The edition of a compressor of one ratio.

        Raises:
            StoreFormatError: no store there.
            StoreError: it cannot be read.
        """
        ((ratio, identity),) = compressor.identities.items()
        store = open_store(self.config, identity, disk=self.disk)
        gate = CostGate(factor=self.config.remake_factor)
        memory = self.memory.under(identity.fingerprint)
        fetcher = DocumentFetcher(
            store=store,
            memory=memory,
            threads=self.config.fetch_threads,
            gate=gate,
            on_use=None if self.hot is None else self.hot.used,
        )
        contexts = ContextBuilder(
            compressor=compressor, ratio=ratio, memory=memory, prefixes=self.prefixes, gate=gate
        )
        resolver = DocumentResolver(
            compressor=compressor,
            fetcher=fetcher,
            memory=memory,
            tokenizer_lock=self.tokenizer_lock,
            fitting=self.fitting,
        )
        return Edition(
            identity=identity,
            compressor=compressor,
            store=store,
            memory=memory,
            resolver=resolver,
            answerer=Answerer(compressor, contexts, ratio=ratio),
            fetcher=fetcher,
        )
