"""``python -m pipelines.eval --config FILE.yaml key=value ...``: the report as JSON on stdout."""

from pipelines.eval.config import EvalConfig
from pipelines.eval.evaluate import evaluate
from pipelines.job import job_main


def main(arguments: list[str] | None = None) -> int:
    """Run an evaluation; see ``pipelines.job``."""
    return job_main(EvalConfig, lambda config: evaluate(config).to_dict(), arguments)


if __name__ == "__main__":
    raise SystemExit(main())
