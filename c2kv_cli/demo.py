"""``c2kv demo``: extract the example corpus, serve it, ask it, and show slots beside full prefill."""

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from c2kv_cli.demo_questions import Answer, DemoQuestion, ask_full, ask_slots, read_questions
from c2kv_cli.extract import Follow
from c2kv_cli.options import AsJson, print_json
from c2kv_cli.progress import progress_bar
from c2kv_core.errors import InputError
from pipelines.extract_config import ExtractConfig
from pipelines.ray_session import ray_session
from serve_app.config import ServeConfig

if TYPE_CHECKING:
    from serve_app.launch import Running

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SHOWN = 3
"""Questions asked by default."""
SEED = 7


def demo(
    questions: Annotated[int, typer.Option(min=1, help="How many of the ten questions to ask.")] = SHOWN,
    store: Annotated[
        Path | None, typer.Option(help="Keep the store in this directory; a temporary one by default.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Alias, Hugging Face directory or hub id.")
    ] = ServeConfig.model_fields["model"].default,
    sidecar: Annotated[
        str | None, typer.Option(help="Sidecar directory or s3:// URI; the shipped one by default.")
    ] = None,
    ratio: Annotated[int, typer.Option(min=1, help="Source tokens per slot.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Extract the example documents, serve them on Ray, ask questions; slots beside full prefill."""
    # Imported late: torch and transformers take seconds.
    from pipelines.extract import extract
    from serve_app.launch import free_port, start
    from serve_app.probe import probe

    # Bound now: while Ray runs, standard output is Ray's to fill.
    out = Console(file=sys.stderr if as_json else sys.stdout, highlight=False, soft_wrap=True)
    corpus = EXAMPLES / "corpus"
    chosen = read_questions(EXAMPLES / "questions.jsonl")
    if not corpus.is_dir():
        raise InputError(
            f"expected the example documents in {corpus}; run the demo from a clone of the project"
        )
    random.Random(SEED).shuffle(chosen)
    with _store_directory(store) as directory, ray_session() as started_ray:
        settings: dict[str, Any] = {"store": str(directory), "model": model, "sidecar": sidecar}
        out.print(
            f"1. Extracting the documents of {os.path.relpath(corpus)} at {ratio} source tokens per slot ..."
        )
        with progress_bar("   extracting") as bar:
            report = extract(
                ExtractConfig(corpus=str(corpus), ratios=(ratio,), **settings), progress=Follow(bar)
            )
        out.print(
            f"   {report.documents} documents: {report.extracted} extracted, {report.unchanged} unchanged; "
            f"{report.source_tokens:,} tokens became {report.slots:,} slots, {report.stored_bytes / 2**20:.1f} MiB"
        )
        config = ServeConfig(ratio=ratio, **settings)
        for remark in probe(config).remarks(config):
            out.print(f"   Note: {remark}")
        out.print("2. Serving them with Ray Serve ...")
        running = start(config, port=free_port())
        try:
            out.print(f"   {running.url}/v1/chat/completions")
            answers = _ask_all(running, config, corpus, chosen[:questions], out)
        finally:
            out.print("4. Stopping the server and Ray ...")
            running.stop(ray_stops_too=started_ray)
    if as_json:
        print_json({"extract": report.to_dict(), "answers": [a.to_dict() for a in answers]})


def _ask_all(
    running: "Running", config: ServeConfig, corpus: Path, questions: list[DemoQuestion], out: Console
) -> list[Answer]:
    from openai import OpenAI

    from pipelines.plan import corpus_documents

    texts = {d.doc_id: d for d in corpus_documents(corpus)}
    # The server has no keys on loopback; the client insists on one.
    with OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        out.print(
            "3. Asking, warm server. Slots: documents read from the store. Full: the same text prefilled.\n"
        )
        # The first request of a process pays for things that no later one does.
        ask_full(client, config.model_id, questions[0], [])
        answers = []
        for question in questions:
            slots = ask_slots(client, config.model_id, question)
            full = ask_full(client, config.model_id, question, [texts[i] for i in question.documents])
            answer = Answer(question=question, slots=slots, full=full)
            answers.append(answer)
            _show(answer, out)
    right = {name: sum(getattr(a, name).correct(a.question) for a in answers) for name in ("slots", "full")}
    out.print(
        f"   Correct: {right['slots']} of {len(answers)} from slots, {right['full']} with full prefill\n"
    )
    return answers


def _show(answer: Answer, out: Console) -> None:
    out.print(f"   Q: {answer.question.text}   (expected: {' or '.join(answer.question.answers)})")
    for name, reply in (("slots", answer.slots), ("full", answer.full)):
        verdict = "correct" if reply.correct(answer.question) else "wrong"
        out.print(f"      {name:>5}: {json.dumps(reply.text, ensure_ascii=False)}  [{verdict}]", markup=False)
    for used in answer.slots.documents:
        out.print(
            f"         {used['id']:<36} {used['tier']:<7} {used['source_tokens']:>5} tokens -> "
            f"{used['slots']:>4} slots {used['bytes'] / 1024:>7.0f} KiB"
        )
    speedup = answer.full.first_token_s / answer.slots.first_token_s
    out.print(
        f"      TTFT {answer.slots.first_token_s * 1000:.0f} ms from slots, "
        f"{answer.full.first_token_s * 1000:.0f} ms with full prefill of {answer.full.prompt_tokens:,} tokens "
        f"({speedup:.1f} times)\n"
    )


@contextmanager
def _store_directory(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="c2kv-demo-") as folder:
        yield Path(folder)
