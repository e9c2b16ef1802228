"""From a configuration to a service that answers: the parts and how they hang together."""

import logging
import os
import sys
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from c2kv_core.compressor import Compressor
from c2kv_core.decode_batch import step_together
from serve_app.answering import Answerer
from serve_app.batch_engine import BatchEngine
from serve_app.config import ServeConfig
from serve_app.edition import Editions
from serve_app.engine import Engine
from serve_app.jobs import Step, Work
from serve_app.metrics import Recorder
from serve_app.places import Limits
from serve_app.probe import probe
from serve_app.service import ChatService
from serve_app.shared import Shared

logger = logging.getLogger(__name__)

_STANDS_BACK = 10
"""Niceness of maths on the CPU, which otherwise delays what carries tokens to clients. Launching GPU work is quick."""
_SWITCH_S = 0.0005
"""Longest that one thread keeps the interpreter while another waits for it."""


def load_service(config: ServeConfig, recorder: Recorder | None = None) -> tuple[ChatService, Engine]:
    """Load weights, open the store, start the engine.

    Raises:
        InputError: a subclass that says what cannot be used.
        StoreError: the store cannot be read.
    """
    for remark in probe(config).remarks(config):
        logger.warning(remark)
    # The model's thread asks for the interpreter after each of thousands of operations a step; while tokens are being
    # carried to clients it would wait five milliseconds each time.
    sys.setswitchinterval(_SWITCH_S)
    _compute_alone(config)
    first, *others = config.compressor_specs()
    compressor = Compressor.load(first)
    shared = Shared.of(config, compressor)
    editions = Editions(
        [shared.edition(one) for one in (compressor, *map(compressor.beside, others))],
        uri=config.store,
        refresh_s=config.index_refresh_s,
        patience_s=config.fetch_timeout_s,
    )
    engine = _engine(config, compressor, editions, recorder)
    service = ChatService(config=config, editions=editions, engine=engine, shared=shared)
    if (warm := service.warm_up()) > 0:
        logger.info("%d documents that are wanted most are in memory", warm)
    if recorder is not None:
        service.record = lambda: recorder.state(
            engine.stats(),
            memory_bytes={"slots": shared.memory.used_bytes, "prefixes": shared.prefixes.used_bytes},
            disk_bytes=0 if shared.disk is None else shared.disk.used_bytes,
            evictions={
                "slots": shared.memory.evictions,
                "prefixes": shared.prefixes.evictions,
                "disk": 0 if shared.disk is None else shared.disk.evictions,
            },
            misses=service.integrity_failures(),
        )
    return service, engine


def _engine(
    config: ServeConfig, compressor: Compressor, editions: Editions, recorder: Recorder | None
) -> Engine:
    def answerer(work: Work) -> Answerer:
        return editions.named(work.fingerprint).answerer

    def step(steps: Sequence[Step]) -> Tensor:
        # Answers of all editions in one batch: from here on only the base computes.
        return step_together(compressor.model, [s.decoder for s in steps], [s.ids for s in steps])

    begun = threading.Event()

    def begin() -> None:
        try:
            _compute_for_all(config)
        finally:
            begun.set()

    engine = BatchEngine(
        lambda work: answerer(work).turns(work),
        step,
        lambda work: answerer(work).size_bytes(work),
        limits=Limits(
            max_running=config.max_running,
            max_running_bytes=config.max_running_bytes,
            max_waiting=config.max_waiting,
        ),
        stall_timeout_s=config.stall_timeout_s,
        retry_after_s=config.retry_after_s,
        on_batch=None if recorder is None else recorder.batch,
        begin=begin,
    )
    begun.wait()
    _compute_alone(config)
    return engine


def _compute_alone(config: ServeConfig) -> None:
    """Let this thread, and all that have computed nothing yet, do their maths on one core.

    A pool of OpenMP threads belongs to the thread that began it. When the pools of a process have more threads than
    there are cores, libgomp lets them sleep between operations where they would spin, and a decode step, hundreds of
    short operations, takes twice as long. So the model's thread has the only pool.
    """
    if config.device == "cpu":
        torch.set_num_threads(1)


def _compute_for_all(config: ServeConfig) -> None:
    """Give this thread, the model's, the replica's share of the cores."""
    if config.device == "cpu":
        # Of this thread alone on Linux; the threads that it starts inherit it.
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _STANDS_BACK)
    threads = config.threads()
    if threads is not None:
        torch.set_num_threads(threads)
        # A thread takes over what was set last, by whichever thread, when it first asks. This one has asked now.
        torch.get_num_threads()
