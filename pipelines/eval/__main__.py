"""``python -m pipelines.eval --config FILE.yaml key=value ...``: the report as JSON on stdout, progress on stderr."""

from pipelines.eval.config import EvalConfig
from pipelines.eval.evaluate import evaluate
from pipelines.eval.progress import EvalLines
from pipelines.job import job_main


def main(arguments: list[str] | None = None) -> int:
    """Run an evaluation; see ``pipelines.job``."""
    return job_main(EvalConfig, lambda config: evaluate(config, progress=EvalLines()).to_dict(), arguments)


if __name__ == "__main__":
    raise SystemExit(main())
