"""Question files and loaded compressors for tests of the evaluation."""

import json
from pathlib import Path
from typing import Any

from c2kv_core import Compressor, SourceDocument
from pipelines.eval.case import Case, CaseMaker
from pipelines.eval.config import EvalConfig
from pipelines.eval.methods import METHODS, MethodContext, Setup
from pipelines.eval.questions import Question
from tests.tiny_models import save_tiny_model

OAK = SourceDocument(
    "oak", "Oak", "The oak is 20 metres tall, and it grows slowly in the forest of the north."
)
BIRCH = SourceDocument(
    "birch", "Birch", "A birch has white bark. It grows in the north! Betula beta, said the user."
)
QUESTION = Question(
    question_id="q",
    text="How tall is the oak?",
    answers=("20 metres",),
    documents=(OAK, BIRCH),
    group=("oak",),
)


def one_document() -> Question:
    """The question over the document that it needs alone."""
    return Question(
        question_id="q", text="How tall is the oak?", answers=("20 metres",), documents=(OAK,), group=("oak",)
    )


def load(directory: Path, *, style: str = "smollm2", **settings: Any) -> Setup:
    """A tiny model with a tokenizer of a style, set up as an evaluation does it."""
    target = directory / style
    if not target.exists():
        save_tiny_model(target, style=style)
    config = EvalConfig(data="-", model=str(target), **settings)
    return Setup(config=config, compressor=Compressor.load(config.spec()))


def case(setup: Setup, question: Question = QUESTION) -> Case:
    """The question as that set-up renders it."""
    return CaseMaker(setup.compressor, system=setup.config.system).case(question)


def contexts(name: str, setup: Setup, given: Case) -> list[MethodContext]:
    """What a method makes of it."""
    return list(METHODS[name](setup).contexts(given))


def row(place: int, *, passage: int | None = None, **changes: Any) -> dict[str, Any]:
    """A single-passage row; ``passage`` shares one among rows."""
    text = f"Tree {place if passage is None else passage} is an oak. It is {place} metres tall in the forest."
    document = {"id": f"doc-{place if passage is None else passage}", "title": f"Tree {place}", "text": text}
    return {
        "id": f"q-{place}",
        "documents": [document],
        "question": f"How tall is tree {place}?",
        "answers": [f"{place} metres"],
        "supporting": [document["id"]],
        **changes,
    }


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    """A JSONL file of rows."""
    file.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return file
