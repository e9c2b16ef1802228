"""Questions of the demo: asking them from slots and with full prefill, and judging the answers."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from c2kv_core import SourceDocument
from c2kv_core.errors import InputError
from c2kv_core.text import SYSTEM, document_content
from pipelines.eval.metrics import words

if TYPE_CHECKING:
    from openai import OpenAI

MAX_NEW_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class DemoQuestion:
    """A question over some documents, with every accepted answer."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    """Ids in the order they are placed."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the server answered, and how soon."""

    text: str
    first_token_s: float
    """From sending the request to the first text, at the client."""
    prompt_tokens: int
    documents: tuple[dict[str, Any], ...]
    """The answer's report of each document; empty with full prefill."""

    def correct(self, question: DemoQuestion) -> bool:
        """Whether a normalised accepted answer is contained in the normalised reply."""
        said = " ".join(words(self.text))
        return any(" ".join(words(answer)) in said for answer in question.answers)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One question answered both ways."""

    question: DemoQuestion
    slots: Reply
    full: Reply

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "question": self.question.text,
            "expected": list(self.question.answers),
            **{
                name: {
                    "answer": reply.text,
                    "correct": reply.correct(self.question),
                    "ttft_s": reply.first_token_s,
                    "prompt_tokens": reply.prompt_tokens,
                    "documents": list(reply.documents),
                }
                for name, reply in (("slots", self.slots), ("full", self.full))
            },
        }


def read_questions(file: Path) -> list[DemoQuestion]:
    """Questions of the example corpus.

    Raises:
        InputError: the file is missing.
    """
    if not file.is_file():
        raise InputError(
            f"expected the example questions in {file}; run the demo from a clone of the project"
        )
    return [
        DemoQuestion(text=row["question"], answers=tuple(row["answers"]), documents=tuple(row["documents"]))
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())
    ]


def ask_slots(client: "OpenAI", model: str, question: DemoQuestion) -> Reply:
    """Answer from stored documents."""
    body = {"documents": [{"id": doc_id} for doc_id in question.documents]}
    return _ask(client, model, [question.text], body)


def ask_full(
    client: "OpenAI", model: str, question: DemoQuestion, documents: Sequence[SourceDocument]
) -> Reply:
    """Answer with the same text as ordinary user turns, all prefilled."""
    return _ask(client, model, [*(document_content(d.title, d.text) for d in documents), question.text], {})


def _ask(client: "OpenAI", model: str, turns: list[str], body: dict[str, Any]) -> Reply:
    messages: Any = [{"role": "system", "content": SYSTEM}, *({"role": "user", "content": t} for t in turns)]
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=MAX_NEW_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=body,
    )
    pieces: list[str] = []
    report: dict[str, Any] = {}
    first_s, tokens = 0.0, 0
    for chunk in stream:
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text and not pieces:
            first_s = time.perf_counter() - started
        pieces.append(text or "")
        tokens = chunk.usage.prompt_tokens if chunk.usage else tokens
        report = (chunk.model_extra or {}).get("c2kv") or report
    # An answer that ends at once has no text; its time is that of the whole answer.
    first_s = first_s or time.perf_counter() - started
    return Reply(
        text="".join(pieces).strip(),
        first_token_s=first_s,
        prompt_tokens=tokens,
        documents=tuple(report.get("documents", ())),
    )
