"""C2KV: documents as slots, by the sidecar of the run or by an untrained one."""

from dataclasses import replace

from c2kv_core import Compressor, Extractor, Sidecar, compose
from pipelines.eval.case import Case
from pipelines.eval.methods.method import MethodContext, Setup


class Slots:
    """Every document compressed alone, all ratios in one pass, then composed after the prefix."""

    def __init__(self, setup: Setup) -> None:
        self._compressor = setup.compressor
        self._ratios = setup.ratios

    def contexts(self, case: Case) -> list[MethodContext]:
        """See ``Method``."""
        compressed = self._compressor.compress(case.documents, self._ratios)
        made = []
        for ratio in self._ratios:
            parts = [part for document in compressed[ratio] for part in document]
            made.append(
                MethodContext(
                    ratio=ratio,
                    context=compose(self._compressor.model, case.prefix, parts),
                    entries=sum(part.num_slots for part in parts),
                )
            )
        return made


class UntrainedSlots(Slots):
    """The same with the sidecar as training finds it: what the slots carry without any training."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._compressor = untrained(setup.compressor)


def untrained(compressor: Compressor) -> Compressor:
    """The same compressor with an untrained sidecar of the same settings."""
    if not compressor.sidecar.config.trained:
        return compressor
    settings = replace(compressor.sidecar.config, ratios=compressor.spec.ratios, rank=None, trained=False)
    sidecar = Sidecar.from_base(compressor.model, settings, eos_token_id=compressor.tokenizer.eos_token_id)
    return replace(compressor, sidecar=sidecar, extractor=Extractor(compressor.model, sidecar))
