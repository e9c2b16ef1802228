"""No documents: what the model knows, and how well it guesses the form of an answer."""

from pipelines.eval.case import Case
from pipelines.eval.methods.method import MethodContext, Setup


class NoDocuments:
    """The question right after the prefix."""

    def __init__(self, setup: Setup) -> None:
        """Nothing to prepare."""

    def contexts(self, case: Case) -> list[MethodContext]:
        """See ``Method``."""
        return [MethodContext(ratio=None, context=case.prefix, entries=0)]
