"""C2KV: documents as slots, by the sidecar of the run or by an untrained one."""

from dataclasses import replace

from c2kv_core import Compressor, Extractor, Sidecar, compose
from c2kv_core.sidecar import is_fitted
from c2kv_core.store import as_stored
from pipelines.eval.case import Case
from pipelines.eval.methods.method import MethodContext, Setup


class Slots:
    """Every document compressed alone, all ratios in one pass, then composed after the prefix."""

    def __init__(self, setup: Setup) -> None:
        self._compressor = setup.compressor
        self._ratios = setup.ratios
        self._quantisation = setup.config.quantisation

    def contexts(self, case: Case) -> list[MethodContext]:
        """See ``Method``."""
        compressed = self._compressor.compress(case.documents, self._ratios)
        made = []
        for ratio in self._ratios:
            stored = [
                as_stored(part, self._quantisation) for document in compressed[ratio] for part in document
            ]
            parts = [part for part, _ in stored]
            made.append(
                MethodContext(
                    ratio=ratio,
                    context=compose(self._compressor.model, case.prefix, parts),
                    entries=sum(part.num_slots for part in parts),
                    stored_bytes=sum(size for _, size in stored),
                )
            )
        return made


class UntrainedSlots(Slots):
    """The same with the sidecar as training finds it: what the slots carry without any training."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._compressor = untrained(setup.compressor)


def untrained(compressor: Compressor) -> Compressor:
    """The same compressor with its sidecar as training found it."""
    if not compressor.sidecar.config.trained:
        return compressor
    settings = replace(compressor.sidecar.config, ratios=compressor.spec.ratios, rank=None, trained=False)
    sidecar = Sidecar.from_base(compressor.model, settings, eos_token_id=compressor.tokenizer.eos_token_id)
    # The map that selects tokens is fitted before training begins.
    fitted = {name: tensor for name, tensor in compressor.sidecar.state_dict().items() if is_fitted(name)}
    sidecar.load_state_dict(fitted, strict=False)
    return replace(compressor, sidecar=sidecar, extractor=Extractor(compressor.model, sidecar))
