"""The benches run and say what they measured; how fast is not a test's business."""

import json
import sys
from pathlib import Path

import pytest

from c2kv_cli.main import main
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


@pytest.mark.ray
@pytest.mark.faults
def test_serving_is_measured_in_closed_and_open_loop(
    ray_cluster: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = save_tiny_model(tmp_path / "tiny", max_position_embeddings=4096)
    small = ["documents=2", "document_tokens=40", "long_documents=3", "new_tokens=24", "concurrency=[1,3]"]
    few = ["repeats=2", "requests_per_place=1", "arrivals_per_s=[20]", "arrivals=5"]
    monkeypatch.setattr(sys, "argv", ["c2kv", "bench", "serve", "--json", f"model={model}", *small, *few])
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    assert code in (0, 1) and out, err
    report = json.loads(out)
    assert set(report["ratios"]) == {
        "warm_ttft_speedup",
        "throughput_3_over_1",
        "decode_slots_over_full",
        "overhead_ms_of_bar",
    }
    # So small a load says little: the exit code is that of the bars, whichever hold.
    assert code == int(not all(ratio["holds"] for ratio in report["ratios"].values())), err
    figures = report["figures"]
    places = ("memory", "full_prefill", "full_prefix_cached", "disk")
    levels = [figures[f"{place}_at_{n}"] for place in places for n in (1, 3)]
    for level in [*levels, figures["memory_open_loop_at_20_per_s"]]:
        assert 0 < level["ttft_ms_p50"] <= level["ttft_ms_p95"]
