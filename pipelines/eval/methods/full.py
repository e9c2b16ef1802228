"""Full compute: all documents prefilled jointly. What slots are measured against."""

from c2kv_core import prefill
from pipelines.eval.case import Case
from pipelines.eval.methods.method import MethodContext, Setup


class FullCompute:
    """The base model's own prefill of prefix and documents."""

    def __init__(self, setup: Setup) -> None:
        self._model = setup.compressor.model

    def contexts(self, case: Case) -> list[MethodContext]:
        """See ``Method``."""
        context = prefill(self._model, case.source_ids, case.prefix)
        return [MethodContext(ratio=None, context=context, entries=case.source_tokens)]
