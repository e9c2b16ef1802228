"""Truncation: each document's beginning, as many tokens as its slots would be, prefilled jointly."""

from c2kv_core import prefill
from c2kv_core.slots import slot_count
from c2kv_core.text import ChatRenderer, document_content
from pipelines.eval.case import Case
from pipelines.eval.methods.method import MethodContext, Setup


class Truncation:
    """The same number of cache entries as slots at each ratio, spent on the first tokens of each document.

    The turn around the text counts, as it does for slots; a document whose turn alone is over the budget is left out.
    """

    def __init__(self, setup: Setup) -> None:
        self._model = setup.compressor.model
        self._renderer = setup.compressor.renderer
        self._ratios = setup.ratios

    def contexts(self, case: Case) -> list[MethodContext]:
        """See ``Method``."""
        made = []
        for ratio in self._ratios:
            ids = self._beginnings(case, ratio)
            context = prefill(self._model, ids, case.prefix) if ids else case.prefix
            made.append(MethodContext(ratio=ratio, context=context, entries=len(ids)))
        return made

    def _beginnings(self, case: Case, ratio: int) -> list[int]:
        ids: list[int] = []
        for document, parts in zip(case.question.documents, case.documents, strict=True):
            budget = sum(slot_count(len(part), ratio) for part in parts)
            ids += beginning_ids(self._renderer, document_content(document.title, document.text), budget)
        return ids


def beginning_ids(renderer: ChatRenderer, content: str, budget_tokens: int) -> list[int]:
    """A whole document turn of at most the budget with the beginning of the content; empty where none fits."""
    ends = [end for _, end in renderer.offsets(content)]
    around = len(renderer.document_ids("", "x")) - 1
    keep = min(budget_tokens - around, len(ends))
    while keep > 0:
        ids = renderer.document_ids("", content[: ends[keep - 1]])
        if len(ids) <= budget_tokens:
            return ids
        # A cut can tokenise longer than its share of the whole.
        keep -= len(ids) - budget_tokens
    return []
