"""``python -m pipelines.train``: the report as JSON on stdout, progress on stderr."""

from pipelines.job import job_main
from pipelines.train.config import TrainConfig
from pipelines.train.progress import TrainingLines
from pipelines.train.run import train


def main(arguments: list[str] | None = None) -> int:
    """Parse, train, report."""
    return job_main(TrainConfig, lambda config: train(config, progress=TrainingLines()), arguments)


if __name__ == "__main__":
    raise SystemExit(main())
