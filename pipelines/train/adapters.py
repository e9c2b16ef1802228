"""Rows of public layouts to ``TrainRow``: a function a layout, and a guess by the row's keys."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from pipelines.train.config import Layout
from pipelines.train.row import Passage, RowError, TrainRow

UNREADABLE = "unreadable"
NO_ANSWER = "no answer"
NO_DOCUMENT = "no document with text"
NO_QUESTION = "no question"


def to_row(record: Any, layout: Layout) -> TrainRow:
    """One record of a data file, or why it could not be read.

    Raises:
        RowError: it is not of the layout, or lacks a question, an answer or a document.
    """
    if isinstance(record, Exception):
        raise RowError(UNREADABLE, f"{record}")
    if not isinstance(record, dict):
        raise RowError(UNREADABLE, f"expected an object, got {type(record).__name__}")
    kind = _guess(record) if layout == "auto" else layout
    try:
        return _ADAPTERS[kind](record)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, RowError):
            raise
        raise RowError(
            UNREADABLE, f"not a {kind} row: {type(error).__name__}: {error}; set the file's layout"
        ) from error


def _guess(record: dict[str, Any]) -> str:
    if "documents" in record:
        return "c2kv"
    if "paragraphs" in record:
        return "musique"
    if "supporting_facts" in record:
        return "2wikimultihopqa" if "evidences" in record else "hotpotqa"
    if {"input", "context", "answers"} <= record.keys():
        return "longbench"
    raise RowError(UNREADABLE, f"no known layout has the keys {', '.join(sorted(record))}")


def _c2kv(record: dict[str, Any]) -> TrainRow:
    documents = [Passage(_id(d), d.get("title") or "", d["text"]) for d in record["documents"]]
    supporting = map(str, _several(record.get("supporting") or ()))
    return _row(_id(record), documents, supporting, record["question"], record["answers"])


def _hotpotqa(record: dict[str, Any]) -> TrainRow:
    """HotpotQA and 2WikiMultiHopQA: context is [[title, [sentence, ...]], ...], or the same in columns (Parquet)."""
    context, facts = record["context"], record["supporting_facts"]
    if isinstance(context, dict):
        sentences = context.get("sentences") or context["content"]
        context = list(zip(context["title"], sentences, strict=True))
    titles = set(facts["title"]) if isinstance(facts, dict) else {fact[0] for fact in facts}
    documents = [_passage(title, "".join(_spaced(sentences))) for title, sentences in context]
    supporting = [d.doc_id for d in documents if d.title in titles]
    row_id = record.get("_id") or record["id"]
    return _row(row_id, documents, supporting, record["question"], [record["answer"]])


def _musique(record: dict[str, Any]) -> TrainRow:
    documents, supporting = [], []
    for paragraph in record["paragraphs"]:
        passage = _passage(paragraph.get("title") or "", paragraph["paragraph_text"])
        documents.append(passage)
        if paragraph.get("is_supporting"):
            supporting.append(passage.doc_id)
    answers = [record["answer"], *(record.get("answer_aliases") or ())]
    return _row(record["id"], documents, supporting, record["question"], answers)


def _longbench(record: dict[str, Any]) -> TrainRow:
    """One long context; where it is a run of "Passage N:" blocks, each is a document."""
    blocks = record["context"].split("Passage ")
    numbered = [b.partition(":")[2] for b in blocks[1:] if b.partition(":")[0].isdigit()]
    texts = numbered if len(numbered) == len(blocks) - 1 and numbered else [record["context"]]
    documents = [_passage("", text) for text in texts]
    row_id = record.get("_id") or record.get("id") or documents[0].doc_id
    return _row(row_id, documents, (), record["input"], record["answers"])


_ADAPTERS: dict[str, Callable[[dict[str, Any]], TrainRow]] = {
    "c2kv": _c2kv,
    "hotpotqa": _hotpotqa,
    "2wikimultihopqa": _hotpotqa,
    "musique": _musique,
    "longbench": _longbench,
}


def _row(
    row_id: str,
    documents: Iterable[Passage],
    supporting: Iterable[str],
    question: str,
    answers: Iterable[str],
) -> TrainRow:
    with_text = tuple(d for d in documents if d.text.strip())
    if not with_text:
        raise RowError(NO_DOCUMENT, str(row_id))
    if not question.strip():
        raise RowError(NO_QUESTION, str(row_id))
    answer = next((a.strip() for a in _several(answers) if a.strip()), None)
    if answer is None:
        raise RowError(NO_ANSWER, str(row_id))
    try:
        "".join([str(row_id), question, answer, *(part for d in with_text for part in d)]).encode()
    except UnicodeEncodeError as error:
        # Half of a surrogate pair, or bytes of the file that were no UTF-8.
        raise RowError(UNREADABLE, f"{row_id!a}: not UTF-8 text: {error.reason}") from error
    known = {d.doc_id for d in with_text}
    return TrainRow(
        row_id=str(row_id),
        documents=with_text,
        supporting=frozenset(supporting) & known or frozenset(known),
        question=question.strip(),
        answer=answer,
    )


def _id(record: dict[str, Any]) -> str:
    """A null in its place would be the same id for all that have one."""
    if record["id"] is None:
        raise RowError(UNREADABLE, "expected an id, got null")
    return str(record["id"])


def _several(texts: Iterable[Any]) -> Iterable[Any]:
    """A list as it is; of a text in its place each letter would be one, of an object each key."""
    if isinstance(texts, str | dict):
        raise RowError(UNREADABLE, f"expected a list of texts, got {texts!r}")
    return texts


def _passage(title: str, text: str) -> Passage:
    digest = hashlib.sha1(f"{title}\n{text}".encode("utf-8", "surrogatepass"), usedforsecurity=False)
    return Passage(f"doc-{digest.hexdigest()[:12]}", title, text.strip())


def _spaced(sentences: Iterable[str]) -> list[str]:
    """Sentences that join without running into each other: some copies keep the blank between them, some do not."""
    return [s if s[:1].isspace() or not place else f" {s}" for place, s in enumerate(sentences)]
