"""Starting: what is refused before anything runs, and the command from start to stop."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.serve import Application

from c2kv_cli.serve import run
from c2kv_core.errors import C2KVError, ConfigError, IdentityError, InputError, StoreFormatError
from serve_app import app
from serve_app.config import DRAIN_MARGIN_S, ServeConfig
from serve_app.keys import KEYS_VARIABLE
from serve_app.launch import PortInUseError, check_port_free
from serve_app.probe import probe
from tests.serve_support import DOCUMENTS, RATIO, World, ask_body, free_port, make_world, wait_until
from tests.tiny_models import save_tiny_model

pytest_plugins = ["tests.serve_support"]

COMMAND = "from c2kv_cli.main import main; main()"


def test_what_fits_is_told(world: World) -> None:
    found = probe(world.config())
    assert (found.documents, found.trained) == (len(DOCUMENTS), False)
    (remark,) = found.remarks(world.config())
    assert "untrained" in remark


def test_empty_namespace_is_told(world: World) -> None:
    config = world.config(namespace="empty")
    assert any("holds no documents" in remark for remark in probe(config).remarks(config))


def test_copies_of_a_local_store_are_remarked(world: World, tmp_path: Path) -> None:
    config = world.config(disk_cache_dir=str(tmp_path / "near"))
    found = probe(config)
    assert any("leave it out" in remark for remark in found.remarks(config))
    remote = config.model_copy(update={"store": "s3://bucket/store"})
    assert not any("leave it out" in remark for remark in found.remarks(remote))


def test_documents_of_all_namespaces_count_where_keys_say_who_reads_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make_world(tmp_path)
    compressor = own.compressor
    source = DOCUMENTS["oak"]
    ((parts),) = compressor.compress([compressor.part_ids(source.title, source.text)])[RATIO]
    own.open_store().put([compressor.stored("other", source, parts)])
    found = probe(own.config())
    assert (found.documents, found.namespaces) == (len(DOCUMENTS), 1)
    monkeypatch.setenv(KEYS_VARIABLE, "keys: []")
    found = probe(own.config(namespace="empty"))
    assert (found.documents, found.namespaces) == (len(DOCUMENTS) + 1, 2)
    assert not any("holds no documents" in remark for remark in found.remarks(own.config(namespace="empty")))


def refused_before_anything_runs(config: ServeConfig) -> C2KVError:
    with pytest.raises(InputError) as refused:
        run(config, host="127.0.0.1", port=free_port())
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    return refused.value


def test_store_of_another_model_is_refused_by_field(world: World, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=7)
    error = refused_before_anything_runs(dataclasses.replace(world, model=str(other)).config())
    assert isinstance(error, IdentityError) and "base_digest" in str(error)


def test_store_of_another_ratio_is_refused_by_field(world: World) -> None:
    error = refused_before_anything_runs(world.config(ratio=8))
    assert isinstance(error, IdentityError) and "ratio differs (stored 4, opened 8)" in str(error)


def test_missing_store_is_refused(world: World, tmp_path: Path) -> None:
    error = refused_before_anything_runs(world.config(store=str(tmp_path / "nothing")))
    assert isinstance(error, StoreFormatError)


def test_missing_model_is_refused(world: World, tmp_path: Path) -> None:
    refused_before_anything_runs(world.config(model=str(tmp_path / "nothing")))


def test_port_in_use_is_refused_first(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} is in use; choose another with --port"):
            run(ServeConfig(store=str(tmp_path)), host="127.0.0.1", port=port)
    check_port_free("127.0.0.1", port)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"store": "x", "ration": 4}, "did you mean 'ratio'"),
        ({}, "missing key 'store'"),
        ({"store": "x", "ratio": 0}, "ratio"),
        ({"store": "x", "max_running": 9, "max_ongoing_requests": 4}, "cannot run more than it holds"),
    ],
)
def test_builder_refuses_bad_arguments_in_one_line(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        app.build(args)
    assert "\n" not in str(refused.value)


def test_builder_takes_the_strings_of_serve_run() -> None:
    assert isinstance(app.build({"store": "x", "ratio": "8", "num_replicas": "2"}), Application)


def test_a_metrics_port_that_cannot_be_had_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    config = world.config()
    ports: Any = {"host": "127.0.0.1", "port": free_port()}
    with pytest.raises(InputError, match="outside 10002-19999, where Ray's workers listen, got 12000"):
        run(config, **ports, metrics_port=12_000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        with pytest.raises(PortInUseError, match="choose another with --metrics-port"):
            run(config, **ports, metrics_port=taken.getsockname()[1])
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(InputError, match="ray start --metrics-export-port"):
        run(config, **ports, metrics_port=free_port())


def test_bound_application_reads_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "serve.yaml").write_text("store: somewhere\n")
    monkeypatch.setenv(app.CONFIG_VARIABLE, str(tmp_path / "serve.yaml"))
    assert isinstance(app.app, Application)
    monkeypatch.delenv(app.CONFIG_VARIABLE)
    with pytest.raises(ConfigError, match=app.CONFIG_VARIABLE):
        _ = app.app


def test_replicas_outlive_the_longest_request() -> None:
    config = ServeConfig(store="x", max_request_s=100)
    assert config.drain_s == 100 + DRAIN_MARGIN_S


def wait_for_line(process: "subprocess.Popen[str]", start: str) -> str:
    """The first line on standard error that begins so."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith(start):
            return line
    raise AssertionError(f"the command ended without {start!r}:\n{''.join(seen)}")


@pytest.mark.ray_cli
@pytest.mark.slow
def test_command_serves_until_it_is_told_to_stop(world: World, tmp_path: Path) -> None:
    port, metrics_port = free_port(), free_port()
    (tmp_path / "serve.yaml").write_text(
        json.dumps({"model": world.model, "served_model_name": "tiny", "store": "overridden"})
    )
    flags = ["--config", str(tmp_path / "serve.yaml"), "--store", world.store, "--port", str(port)]
    flags += ["--metrics-port", str(metrics_port)]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", *flags, "default_max_new_tokens=4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Its own Ray, whatever this session has running.
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
        start_new_session=True,
    )
    try:
        assert f"http://127.0.0.1:{port}/v1" in wait_for_line(process, "ready: ")
        metrics = wait_for_line(process, "metrics: ").split()[1]
        assert metrics.endswith(f":{metrics_port}/metrics")
        wait_until(lambda: "ray_" in httpx.get(metrics, timeout=10).text, what="metrics")
        logs = Path(wait_for_line(process, "logs: ").split()[1])
        assert list(logs.glob("replica_*Generator*"))
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/chat/completions", json=ask_body(["oak"]), timeout=60
        )
        assert answer.json()["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        check_port_free("127.0.0.1", port)
    finally:
        process.kill()
        process.wait()
