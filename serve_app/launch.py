"""Starting and stopping the application on a Ray that runs already; used by ``c2kv serve`` and ``c2kv demo``."""

import errno
import logging
import socket
from contextlib import ExitStack
from dataclasses import dataclass

from c2kv_core.errors import C2KVError, InputError
from serve_app.config import ServeConfig

APP_NAME = "c2kv"


class PortInUseError(InputError):
    """The address cannot be listened on."""


class ServeRunsAlreadyError(InputError):
    """The cluster has a Serve of somebody's, with an address and applications of its own."""


class ServeError(C2KVError):
    """Ray Serve could not bring the application up."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """An application that answers."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """Base URL for clients."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"

    def stop(self, *, ray_stops_too: bool = False) -> None:
        """Drain and stop the application and the Serve that was started for it.

        Args:
            ray_stops_too: Ray is about to be stopped, which ends Serve's own processes without a second farewell.
        """
        from ray import serve

        if ray_stops_too:
            serve.delete(APP_NAME)
        else:
            serve.shutdown()  # type: ignore[no-untyped-call]


def check_port_free(host: str, port: int, *, option: str = "--port") -> None:
    """Find out before anything is started.

    Args:
        host: address to listen on.
        port: of the address.
        option: by which another one can be chosen.

    Raises:
        PortInUseError: something listens there, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(f"port {port} is in use; choose another with {option}") from error
            raise PortInUseError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        except OverflowError as error:
            raise PortInUseError(f"expected a port of 0 to 65535, got {port}") from error


def start(config: ServeConfig, *, host: str = "127.0.0.1", port: int = 8000) -> Running:
    """Deploy the application and wait until it answers. Ray must be initialised.

    Raises:
        PortInUseError: the port is taken.
        ServeRunsAlreadyError: the cluster has a Serve already.
        ServeError: a replica cannot start.
    """
    # Imported late: Ray reads its environment at import, and callers set that first.
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.exceptions import RayServeException

    from serve_app.app import bind

    # Its chatter is for operators of a cluster; what goes wrong is raised.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    status = serve.status()
    if status.proxies or status.applications:
        # Serve would take the application and ignore the address.
        raise ServeRunsAlreadyError(
            "Serve runs on this cluster already, with an address of its own; add the application to it with "
            "`serve deploy`, or stop it with `serve shutdown`"
        )
    check_port_free(host, port)
    running = Running(host=host, port=port)
    with ExitStack() as undo:
        # Also when the operator interrupts: on a cluster that goes on, nothing may be left behind.
        undo.callback(running.stop)
        try:
            serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=host, port=port))
            serve.run(bind(config), name=APP_NAME, route_prefix="/")
        except (RuntimeError, TimeoutError, RayServeException) as error:
            raise ServeError(f"the application did not start: {_one_line(error)}") from error
        undo.pop_all()
    return running


def free_port() -> int:
    """A port that is free now, outside the range of Ray's workers.

    Raises:
        InputError: none of the thousand that are tried.
    """
    for port in range(8000, 9000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise InputError("expected a free port from 8000 to 8999, found none")


def _one_line(error: Exception) -> str:
    """The last line, which in Ray's reports of remote failures is the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
