"""From a configuration to a service that answers: the parts and how they hang together."""

import logging

import torch

from c2kv_core.compressor import Compressor
from serve_app.answering import Answerer
from serve_app.batch_engine import BatchEngine
from serve_app.config import ServeConfig
from serve_app.context_builder import ContextBuilder
from serve_app.engine import Engine
from serve_app.metrics import Recorder
from serve_app.places import Limits
from serve_app.probe import open_store, probe
from serve_app.service import ChatService
from serve_app.slot_memory import SlotMemory

logger = logging.getLogger(__name__)

_STANDS_BACK = 10
"""Niceness of maths on the CPU, which otherwise delays what carries tokens to clients. Launching GPU work is quick."""


def load_service(config: ServeConfig, recorder: Recorder | None = None) -> tuple[ChatService, Engine]:
    """Load weights, open the store, start the engine.

    Raises:
        InputError: a subclass that says what cannot be used.
        StoreError: the store cannot be read.
    """
    for remark in probe(config).remarks(config):
        logger.warning(remark)
    threads = config.threads()
    if threads is not None:
        torch.set_num_threads(threads)
    compressor = Compressor.load(config.compressor_spec())
    memory = SlotMemory(max_bytes=config.memory_cache_bytes)
    contexts = ContextBuilder(
        compressor=compressor,
        ratio=config.ratio,
        memory=memory,
        prefix_cache_bytes=config.prefix_cache_bytes,
    )
    answerer = Answerer(compressor, contexts, ratio=config.ratio)
    engine = BatchEngine(
        answerer.turns,
        answerer.step,
        answerer.size_bytes,
        limits=Limits(
            max_running=config.max_running,
            max_running_bytes=config.max_running_bytes,
            max_waiting=config.max_waiting,
        ),
        stall_timeout_s=config.stall_timeout_s,
        retry_after_s=config.retry_after_s,
        on_batch=None if recorder is None else recorder.batch,
        niceness=_STANDS_BACK if config.device == "cpu" else 0,
    )
    service = ChatService(
        config=config,
        compressor=compressor,
        store=open_store(config, compressor.identities[config.ratio]),
        memory=memory,
        engine=engine,
    )
    if recorder is not None:
        service.record = lambda: recorder.state(
            engine.stats(),
            memory_bytes={"slots": memory.used_bytes, "prefixes": contexts.prefixes.used_bytes},
            evictions={"slots": memory.evictions, "prefixes": contexts.prefixes.evictions},
            misses=service.integrity_failures(),
        )
    return service, engine
