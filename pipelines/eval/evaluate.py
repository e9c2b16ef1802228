"""The evaluation: every question through every method, one question at a time."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from c2kv_core import Compressor, hf_adapter
from c2kv_core.alias import ALIASES
from c2kv_core.errors import ConfigError, InputError
from c2kv_core.models import parse_dtype
from pipelines.eval.answering import answer
from pipelines.eval.bootstrap import Bootstrap
from pipelines.eval.case import Case, CaseMaker
from pipelines.eval.config import EvalConfig
from pipelines.eval.methods import METHODS, Method, MethodContext, Setup, check_methods
from pipelines.eval.metrics import score
from pipelines.eval.progress import ASKING, LOADING, OnProgress, Progress
from pipelines.eval.questions import QuestionMaker
from pipelines.eval.report import EvalReport, Outcome, method_rows
from pipelines.eval.rows import read_rows

OnOutcome = Callable[[Outcome], None]


def evaluate(config: EvalConfig, *, progress: OnProgress | None = None) -> EvalReport:
    """Ask every question over every method's context.

    The file and the names of methods are checked before a model is loaded.

    Raises:
        InputError: a subclass that says what is wrong with methods, data, model, sidecar or ratio.
    """
    check_methods(config.methods)
    rows = read_rows(config.data)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    tell = progress or (lambda told: None)
    tell(Progress(phase=LOADING))
    compressor = Compressor.load(config.spec())
    run = _Run(config, compressor)
    started = time.perf_counter()
    maker = QuestionMaker(rows, config, lambda d: sum(map(len, compressor.part_ids(d.title, d.text))))
    questions = maker.questions()
    tell(Progress(phase=ASKING, total=len(questions)))
    with _predictions(config.predictions) as keep:
        for done, question in enumerate(questions, start=1):
            run.ask(run.cases.case(question), keep)
            tell(Progress(phase=ASKING, done=done, total=len(questions)))
    return run.report(time.perf_counter() - started)


class _Run:
    """Methods, and what they have answered so far."""

    def __init__(self, config: EvalConfig, compressor: Compressor) -> None:
        self.config = config
        self.compressor = compressor
        self.cases = CaseMaker(compressor, system=config.system)
        setup = Setup(config=config, compressor=compressor)
        self._methods: dict[str, Method] = {name: METHODS[name](setup) for name in config.methods}
        self._outcomes: dict[tuple[str, int | None], list[Outcome]] = {}
        self._groups: list[tuple[str, ...]] = []
        self._source_tokens: list[int] = []
        self._skipped: list[dict[str, str]] = []
        shape = hf_adapter.geometry(compressor.model.config)
        item = parse_dtype(config.slot_dtype).itemsize
        self._entry_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * item

    def ask(self, case: Case, keep: OnOutcome) -> None:
        """Ask one question over every method's contexts, or none where full compute would not fit."""
        needed = case.positions(self.config.max_new_tokens)
        limit = hf_adapter.max_positions(self.compressor.model)
        if needed > limit:
            reason = f"full compute needs {needed} positions, the model has {limit}"
            self._skipped.append({"id": case.question.question_id, "reason": reason})
            return
        self._groups.append(case.question.group)
        self._source_tokens.append(case.source_tokens)
        for name, method in self._methods.items():
            started = time.perf_counter()
            contexts = method.contexts(case)
            shared_s = (time.perf_counter() - started) / len(contexts)
            for made in contexts:
                outcome = self._outcome(name, case, made, shared_s)
                self._outcomes.setdefault((name, made.ratio), []).append(outcome)
                keep(outcome)

    def _outcome(self, name: str, case: Case, made: MethodContext, shared_s: float) -> Outcome:
        started = time.perf_counter()
        said = answer(
            made.model or self.compressor.model,
            made.context,
            case.question_ids,
            case.answer_ids,
            max_new_tokens=self.config.max_new_tokens,
        )
        text = str(self.compressor.tokenizer.decode(list(said.token_ids), skip_special_tokens=True)).strip()
        return Outcome(
            question_id=case.question.question_id,
            method=name,
            ratio=made.ratio,
            prediction=text,
            answers=case.question.answers,
            score=score(text, case.question.answers),
            nll=said.nll,
            source_tokens=case.source_tokens,
            cache_bytes=made.entries * self._entry_bytes if made.stored_bytes is None else made.stored_bytes,
            elapsed_s=shared_s + time.perf_counter() - started,
        )

    def report(self, elapsed_s: float) -> EvalReport:
        """The table of everything asked.

        Raises:
            InputError: no question fitted the model.
        """
        if not self._groups:
            raise InputError(
                f"no question fits the model: {self._skipped[0]['reason']}; use fewer distractors or context_tokens"
            )
        config = self.config
        bootstrap = Bootstrap(self._groups, seed=config.seed, resamples=config.resamples)
        directory = self.compressor.spec.sidecar_directory()
        known = ALIASES.get(config.model)
        return EvalReport(
            methods=method_rows(self._outcomes, bootstrap),
            data=config.data,
            model=known.weights if known else config.model,
            sidecar="trained" if self.compressor.sidecar.config.trained else "untrained",
            sidecar_directory=str(directory) if directory else None,
            seed=config.seed,
            source_tokens=sum(self._source_tokens) / len(self._source_tokens),
            skipped=tuple(self._skipped),
            elapsed_s=elapsed_s,
            config=config.model_dump(mode="json"),
        )


@contextmanager
def _predictions(path: str | None) -> Iterator[OnOutcome]:
    """Where single answers go: nowhere, or a JSONL file that an interrupted run leaves with whole lines."""
    if path is None:
        yield lambda outcome: None
        return
    try:
        file = Path(path).expanduser().open("w", encoding="utf-8", buffering=1)
    except OSError as error:
        raise ConfigError(f"cannot write the predictions to {path}: {error.strerror}") from error
    with file:

        def write(outcome: Outcome) -> None:
            file.write(json.dumps(outcome.to_dict(), ensure_ascii=False) + "\n")

        yield write
