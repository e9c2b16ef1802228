"""What the project's loggers say goes into the log file of the replica, with Serve's own lines and in their form."""

import logging

from serve_app.access_log import LOGGER_NAME

_OWN = ("serve_app", "c2kv_core", LOGGER_NAME)
"""Names of the loggers; those below them are meant too."""


class _ToServe(logging.Handler):
    """Hands records to Serve's logger, whatever its handlers are by then: a change of logging_config replaces them."""

    def emit(self, record: logging.LogRecord) -> None:
        serves = logging.getLogger("ray.serve")
        if serves.isEnabledFor(record.levelno):  # its log_level counts for these lines too
            serves.handle(record)


def log_with_serve(*, access: bool = True) -> None:
    """Write what this process has to say, from INFO on, where operators of Serve look for it.

    Args:
        access: the lines of the access log too.
    """
    for name in _OWN:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers = [_ToServe()]
    logging.getLogger(LOGGER_NAME).disabled = not access
