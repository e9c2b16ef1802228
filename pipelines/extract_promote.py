"""After an extraction: the quality check of a held set, and only then the new fingerprint is what is served."""

import os
import shlex
import subprocess

from c2kv_core.errors import C2KVError
from c2kv_core.store import promote, served
from pipelines.extract_config import ExtractConfig
from pipelines.extract_report import ExtractReport

KEPT_CHARACTERS = 2000
"""Of what a check printed, for the report."""


class QualityError(C2KVError):
    """The quality check failed; what was served stays served."""


def check_and_promote(config: ExtractConfig, report: ExtractReport) -> str:
    """Run the quality check, then make the new fingerprint the served one of the namespace; what was said and done.

    Raises:
        QualityError: the check failed, took too long or cannot be started, or too many documents have failed.
        StoreError: storage failed, or somebody else changed what is served meanwhile.
    """
    fingerprints, run = report.fingerprints, report.run
    failed = report.failed_documents + report.failed_before
    # A run lets a few documents fail whatever their share is; served without them, a small corpus would be lost.
    if config.promote and failed > config.max_failed_fraction * report.documents:
        raise QualityError(
            f"{failed} of {report.documents} documents failed, more than max_failed_fraction "
            f"({config.max_failed_fraction:g}) allows: nothing is promoted, what was served stays served"
        )
    before = served(config.store, config.namespace)
    said = _check(config, fingerprints)
    if not config.promote:
        return said or "no quality check, nothing promoted"
    ratio = config.promote_ratio or config.ratios[0]
    promote(
        config.store,
        config.namespace,
        fingerprints[ratio],
        by=run,
        reason=f"{run}: {said}" if said else f"{run}: no quality check is configured",
        expected=before.fingerprint if before else None,
    )
    return f"{said or 'no quality check'}; {fingerprints[ratio][:12]} (ratio {ratio}) is served"


def _check(config: ExtractConfig, fingerprints: dict[int, str]) -> str:
    """What the check printed last; empty where none is configured."""
    if config.quality_check is None:
        return ""
    ratio = config.promote_ratio or config.ratios[0]
    told = {
        "C2KV_STORE": config.store,
        "C2KV_NAMESPACE": config.namespace,
        "C2KV_MODEL": config.model,
        "C2KV_SIDECAR": config.sidecar or "",
        "C2KV_RATIO": str(ratio),
        "C2KV_FINGERPRINT": fingerprints[ratio],
    }
    try:
        # Not by a shell: the variables hold paths and names of somebody else's making.
        finished = subprocess.run(
            shlex.split(config.quality_check),
            env={**os.environ, **told},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=config.quality_timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise QualityError(
            f"the quality check did not finish: {error}; what was served stays served"
        ) from error
    printed = " ".join((finished.stdout.strip() or finished.stderr.strip())[-KEPT_CHARACTERS:].split())
    if finished.returncode != 0:
        raise QualityError(
            f"the quality check failed with exit code {finished.returncode}: {printed or 'it printed nothing'}; the "
            "new slots are stored, what was served stays served"
        )
    return f"the quality check passed: {printed}" if printed else "the quality check passed"
