"""Options and fixtures shared by all tests."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipelines.ray_session import ray_session
from tests.s3_server import S3Server

GOLDEN_DIR = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        action="append",
        type=Path,
        default=[],
        help="further folder of golden vectors (tests/golden always runs); fails when it holds none",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden_file" not in metafunc.fixturenames:
        return
    folders = [GOLDEN_DIR, *metafunc.config.getoption("--golden-dir")]
    cases = []
    for folder in folders:
        files = sorted(folder.glob("*.safetensors"))
        # An empty folder must fail, not pass by running nothing.
        cases += [pytest.param(f, id=f"{f.parent.name}-{f.stem}") for f in files] or [
            pytest.param(folder, id=f"{folder.name}-empty")
        ]
    metafunc.parametrize("golden_file", cases)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """For matrices this small, threads that wait for each other cost far more than they save."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server for all tests that need it."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty prefix of a bucket, with the settings to reach it in the environment."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://c2kv-tests/{uuid.uuid4().hex}"


@pytest.fixture(params=["local", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for a store, on each back end."""
    if request.param == "local":
        return str(tmp_path / "store")
    return str(request.getfixturevalue("bucket"))


@pytest.fixture(scope="session")
def ray_cluster(s3_server: S3Server) -> Iterator[None]:
    """One Ray for all tests that need it; jobs join it as they join a cluster. Its workers may use the S3 server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment.items():
            patch.setenv(name, value)
        with ray_session(num_cpus=8):
            yield
