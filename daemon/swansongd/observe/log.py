# SPDX-License-Identifier: Apache-2.0
"""Logging: one line per event to standard error, written by a separate thread.

A caller puts a finished line into a bounded queue and returns.  If standard error blocks, lines are dropped
and counted, so the decision loop never blocks on a log.  Strings are shortened and made printable first,
because many of them come from trainers and from the network.  Records of other libraries take the same path;
libraries that might log a credential are limited to warnings.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import MutableMapping
from typing import Any

import structlog
from swansong_bucket.util.printable import printable

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_LINES_MAX = 10_000
_TRACEBACK_MAX = 8_000
CAPPED = (
    "boto3",
    "botocore",
    "s3transfer",
    "urllib3",
    "requests",
    "google",
    "azure",
    "msal",
    "watchdog",
)
"""Libraries that might log a credential: at most warnings of them are written."""


class _Writer:
    """The queue of lines, and the thread that writes them to a file descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: queue.Queue[str] = queue.Queue(_LINES_MAX)
        self._lock = threading.Lock()
        self._dropped = 0
        self._dropped_unreported = 0
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    @property
    def dropped(self) -> int:
        return self._dropped

    def put(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            with self._lock:
                self._dropped += 1
                self._dropped_unreported += 1

    def flush(self, timeout_s: float) -> bool:
        give_up_mono_s = time.monotonic() + timeout_s
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks:
                left_s = give_up_mono_s - time.monotonic()
                if left_s <= 0 or not self._lines.all_tasks_done.wait(left_s):
                    return not self._lines.unfinished_tasks
        return True

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            try:
                self._write(line)
                with self._lock:
                    unreported, self._dropped_unreported = self._dropped_unreported, 0
                if unreported:
                    self._write(
                        f'{{"event": "log_dropped", "level": "warning", "lines": {unreported}}}'
                    )
            except OSError:
                with self._lock:
                    self._dropped += 1  # standard error is closed: there is no place to report it
            finally:
                self._lines.task_done()

    def _write(self, line: str) -> None:
        data = memoryview(f"{line}\n".encode(errors="backslashreplace"))
        while data:
            data = data[os.write(self._fd, data) :]


class _Lines:
    """A logger as structlog needs one: takes finished lines."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer

    def msg(self, line: str) -> None:
        self._writer.put(line)

    debug = info = warning = warn = error = critical = exception = fatal = log = msg


class _Libraries(logging.Handler):
    """Passes records of other libraries to structlog, as ``message`` of the event ``library_log``."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception as error:  # a broken log call must not break its caller
            message = f"{record.msg!s} (cannot be formatted: {error})"
        structlog.get_logger().log(
            max(record.levelno, logging.DEBUG),
            "library_log",
            logger=record.name,
            message=message,
            exc_info=record.exc_info,
        )


_writer: _Writer | None = None


def configure(log_format: str, level: str, *, fd: int | None = None) -> None:
    """Set up logging for the process; may be called again.

    Args:
        log_format: ``json`` or ``console``.
        level: the lowest level to write: ``debug``, ``info``, ``warning`` or ``error``.
        fd: the descriptor to write to; None for standard error.
    """
    global _writer  # noqa: PLW0603 - the process has one log
    flush(1.0)
    _writer = _Writer(sys.stderr.fileno() if fd is None else fd)
    number = LEVELS[level]
    renderer: Any = structlog.processors.JSONRenderer()
    if log_format == "console":
        renderer = structlog.dev.ConsoleRenderer(colors=fd is None and sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _event_first,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: _Lines(_writer),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(handlers=[_Libraries()], level=number, force=True)
    logging.captureWarnings(capture=True)
    for name in CAPPED:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))


def flush(timeout_s: float) -> bool:
    """Wait until all lines are written; False after ``timeout_s``."""
    return _writer is None or _writer.flush(timeout_s)


def dropped() -> int:
    """Number of lines dropped since :func:`configure`, because standard error blocked or was closed."""
    return 0 if _writer is None else _writer.dropped


def _event_first(
    _logger: Any, _method: str, line: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    head = {name: line.pop(name) for name in ("event", "level", "timestamp")}
    exception = line.pop("exception", None)
    facts = {**head, **{str(name): printable(value) for name, value in line.items()}}
    if exception is not None:
        facts["exception"] = str(exception)[-_TRACEBACK_MAX:]
    return facts


atexit.register(flush, 1.0)
