"""The benches run and say what they measured; how fast is not a test's business."""

from pathlib import Path

import pytest

from c2kv_core.errors import InputError
from c2kv_core.store import open_storage
from pipelines.bench.extract import BenchExtractConfig, bench_extract
from pipelines.bench.store import BenchStoreConfig, bench_store
from tests.tiny_models import save_tiny_model

SMALL = {
    "documents": 2,
    "source_tokens": 50,
    "layers": 2,
    "kv_heads": 2,
    "head_dim": 8,
    "repeats": 1,
    "index_rows": (20, 300),
    "lookups": 2,
}


def test_the_store_is_measured_locally_and_on_s3(tmp_path: Path, bucket: str) -> None:
    config = BenchStoreConfig.model_validate({**SMALL, "directory": str(tmp_path / "bench"), "s3": bucket})
    report = bench_store(config).to_dict()
    assert set(report["ratios"]) == {
        "verified_over_plain_local",
        "verified_over_plain_s3",
        "lookup_ms_of_bar",
    }
    assert all(ratio["value"] > 0 for ratio in report["ratios"].values())
    assert set(report["figures"]["lookup_of_8_ms_by_index_rows"]) == {20, 300}
    assert not (tmp_path / "bench").exists()
    assert list(open_storage(bucket).list_files("")) == [], "what was written is removed"


def test_the_store_bench_leaves_what_is_there_alone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist yet"):
        bench_store(BenchStoreConfig.model_validate({**SMALL, "directory": str(tmp_path)}))


@pytest.mark.ray
def test_extraction_is_measured(ray_cluster: None, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny", max_position_embeddings=4096)
    config = BenchExtractConfig(
        model=str(model),
        tokens=64,
        repeats=1,
        memory_tokens=(32, 64),
        job_documents=6,
        job_words=20,
        shard_tokens=50,
        driver_documents=(10, 50),
    )
    report = bench_extract(config).to_dict()
    names = ("extract_over_prefill", "job_over_loop", "time_per_token_growth", "driver_memory_growth")
    assert all(report["ratios"][name]["value"] > 0 for name in names)
    assert report["figures"]["job_padding_waste"] < 0.1
    assert set(report["figures"]["peak_bytes_above_model"]) == {32, 64}
