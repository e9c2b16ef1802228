"""The files in cluster/ agree with each other, with Ray's schema and with the code that they start."""

import ast
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from c2kv_core.config import load_config, parse_config
from pipelines.extract_config import ExtractConfig
from pipelines.ray_session import SERVE_VARIABLES
from pipelines.train.config import TrainConfig
from serve_app.config import DRAIN_MARGIN_S, ServeConfig

ROOT = Path(__file__).parent.parent
CLUSTER = ROOT / "cluster"
RECIPES = sorted((ROOT / "examples").glob("train-*.yaml"))
YAML_FILES = sorted(CLUSTER.glob("*.yaml"))
KUBERAY_FILES = [f for f in YAML_FILES if "ray.io/v1" in f.read_text()]


JOBS = {"rayjob-extract.yaml": "extract.yaml", "rayjob-train.yaml": "train.yaml"}
"""KubeRay jobs and their run configs."""
TRAINING = ["train.yaml", "train-llama-3.1-8b.yaml"]


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def of_kind(file: Path, kind: str) -> dict[str, Any]:
    return next(d for d in documents(file) if d.get("kind") == kind)


def ray_resource(file: Path) -> dict[str, Any]:
    return next(d for d in documents(file) if d["apiVersion"] == "ray.io/v1")


def cluster_spec(file: Path) -> dict[str, Any]:
    spec = ray_resource(file)["spec"]
    return spec["rayClusterSpec"] if "rayClusterSpec" in spec else spec["rayClusterConfig"]


def pods(file: Path) -> Iterator[dict[str, Any]]:
    cluster = cluster_spec(file)
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        yield group["template"]["spec"]


def serve_configs() -> dict[str, dict[str, Any]]:
    return {
        "serve-config.yaml": documents(CLUSTER / "serve-config.yaml")[0],
        "rayservice.yaml": yaml.safe_load(
            of_kind(CLUSTER / "rayservice.yaml", "RayService")["spec"]["serveConfigV2"]
        ),
    }


def served(name: str) -> ServeConfig:
    return parse_config(ServeConfig, serve_configs()[name]["applications"][0]["args"], source=name)


def pinned_ray() -> str:
    (version,) = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return str(version)


def by_name(file: Path) -> str:
    return file.name


@pytest.mark.parametrize("file", YAML_FILES, ids=by_name)
def test_yaml_parses_to_mappings(file: Path) -> None:
    assert documents(file)
    assert all(isinstance(d, dict) for d in documents(file))


def test_ray_version_is_the_same_everywhere() -> None:
    version = pinned_ray()
    (requirement,) = [
        d
        for d in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if d.startswith("ray[")
    ]
    assert requirement.endswith(f"=={version.rsplit('.', 1)[0]}.*")
    for name in ("Dockerfile", "README.md"):
        found = set(re.findall(r"\bray:?(2\.\d+\.\d+)", (CLUSTER / name).read_text()))
        assert found == {version}, name
    for file in KUBERAY_FILES:
        assert cluster_spec(file)["rayVersion"] == version, file.name
        for pod in pods(file):
            for container in pod["containers"]:
                assert f"ray{version}-py311" in container["image"], file.name


def test_torch_version_is_the_same_everywhere() -> None:
    (version,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for file in (ROOT / "Makefile", CLUSTER / "Dockerfile"):
        assert {v.split("+")[0] for v in re.findall(r"torch==([\w.+]+)", file.read_text())} == {version}, (
            file.name
        )


@pytest.mark.parametrize("name", ["serve-config.yaml", "rayservice.yaml"])
def test_serve_config_meets_rays_schema(name: str) -> None:
    config = ServeDeploySchema.model_validate(serve_configs()[name])
    assert [a.name for a in config.applications] == ["c2kv"]


def test_both_serve_configs_start_the_same_application() -> None:
    first, second = (c["applications"] for c in serve_configs().values())
    # Only on Kubernetes is there a Secret to read keys from.
    assert {app["args"].pop("keys_file") for app in (*first, *second)} == {None, "/keys/keys.yaml"}
    assert first == second


def test_what_is_served_is_what_was_extracted() -> None:
    # By the typed configs, too: a slot dtype that differs by default would make every document a stranger.
    extraction = load_config(ExtractConfig, CLUSTER / "extract.yaml")
    assert served("serve-config.yaml").slot_dtype == extraction.slot_dtype
    extracted = documents(CLUSTER / "extract.yaml")[0]
    arguments = serve_configs()["serve-config.yaml"]["applications"][0]["args"]
    for key in ("store", "namespace", "model", "sidecar"):
        assert arguments[key] == extracted[key], key
    assert arguments["ratio"] in extracted["ratios"]


@pytest.mark.parametrize("name", ["serve-config.yaml", "rayservice.yaml"])
def test_import_path_names_a_builder(name: str) -> None:
    module, _, function = serve_configs()[name]["applications"][0]["import_path"].partition(":")
    # The source is read, not imported: importing it loads torch and transformers.
    defined = ast.parse(module_source(module).read_text()).body
    assert function in [node.name for node in defined if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("job", JOBS)
def test_job_entrypoint_names_a_module(job: str) -> None:
    words = shlex.split(of_kind(CLUSTER / job, "RayJob")["spec"]["entrypoint"])
    assert words[:2] == ["python", "-m"]
    source = module_source(words[2])
    if source.name == "__init__.py":
        source = source.with_name("__main__.py")
    assert "__main__" in source.read_text(), f"{words[2]} does nothing when run with python -m"


@pytest.mark.parametrize("job", JOBS)
def test_job_config_is_mounted_where_the_entrypoint_reads_it(job: str) -> None:
    file = CLUSTER / job
    config_map = of_kind(file, "ConfigMap")
    head = cluster_spec(file)["headGroupSpec"]["template"]["spec"]
    (volume,) = [
        v["name"]
        for v in head["volumes"]
        if v.get("configMap", {}).get("name") == config_map["metadata"]["name"]
    ]
    (mount,) = [m["mountPath"] for m in head["containers"][0]["volumeMounts"] if m["name"] == volume]
    (key,) = config_map["data"]
    assert f"--config {mount}/{key}" in of_kind(file, "RayJob")["spec"]["entrypoint"]


@pytest.mark.parametrize(("job", "config"), JOBS.items())
def test_config_map_equals_the_run_config(job: str, config: str) -> None:
    text = of_kind(CLUSTER / job, "ConfigMap")["data"][config]
    assert yaml.safe_load(text) == documents(CLUSTER / config)[0]


def test_run_config_is_valid() -> None:
    assert load_config(ExtractConfig, CLUSTER / "extract.yaml").namespace == "default"


@pytest.mark.parametrize("file", [*(CLUSTER / name for name in TRAINING), *RECIPES], ids=by_name)
def test_training_config_is_valid(file: Path) -> None:
    assert load_config(TrainConfig, file).steps > 0


@pytest.mark.parametrize("name", TRAINING)
def test_training_workers_fit_into_the_pods(name: str) -> None:
    config = load_config(TrainConfig, CLUSTER / name)
    (group,) = cluster_spec(CLUSTER / "rayjob-train.yaml")["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert config.num_workers * config.num_gpus_per_worker == group["replicas"] * int(
        limits["nvidia.com/gpu"]
    )
    assert config.num_workers * config.num_cpus_per_worker < group["replicas"] * int(limits["cpu"])


@pytest.mark.parametrize("name", ["serve-config.yaml", "rayservice.yaml"])
def test_application_arguments_are_valid(name: str) -> None:
    assert served(name).namespace == "default"


def test_extraction_actors_fit_into_the_workers() -> None:
    # Actors that take every CPU leave none for reading, and Ray Data then waits without a word.
    config = documents(CLUSTER / "extract.yaml")[0]
    cpus_total = 0
    for group in cluster_spec(CLUSTER / "rayjob-extract.yaml")["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        cpus_total += group["minReplicas"] * int(container["resources"]["limits"]["cpu"])
    assert config["actors"] * config["num_cpus_per_actor"] < cpus_total


@pytest.mark.parametrize("file", KUBERAY_FILES, ids=by_name)
def test_pods_are_safe_to_run(file: Path) -> None:
    assert cluster_spec(file)["authOptions"] == {"mode": "token"}
    assert cluster_spec(file)["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for pod in pods(file):
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            resources = container["resources"]
            assert resources["requests"]["memory"] == resources["limits"]["memory"]
            environment = {e["name"]: e["value"] for e in container["env"]}
            serve = SERVE_VARIABLES if file.name == "rayservice.yaml" else {}
            assert environment == {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", **serve}


def test_a_roll_over_waits_for_the_longest_request() -> None:
    file = CLUSTER / "rayservice.yaml"
    delay_s = ray_resource(file)["spec"]["rayClusterDeletionDelaySeconds"]
    ingress_drain_s = served(file.name).drain_s + DRAIN_MARGIN_S
    assert ingress_drain_s < delay_s
    assert all(delay_s < pod["terminationGracePeriodSeconds"] for pod in pods(file))


@pytest.mark.parametrize("file", KUBERAY_FILES, ids=by_name)
def test_nothing_holds_a_secret(file: Path) -> None:
    assert not [d for d in documents(file) if d.get("kind") == "Secret"]


def module_source(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no module {module}"
    assert spec.origin is not None, f"{module} has no source file"
    return Path(spec.origin)
