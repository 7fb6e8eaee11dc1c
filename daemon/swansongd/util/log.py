# SPDX-License-Identifier: Apache-2.0
"""Logging: one line per event to standard error, written by a separate thread.

A caller puts a finished line into a bounded queue and returns.  If standard error blocks, lines are dropped
and counted, so the decision loop never blocks on a log.  Strings are shortened and made printable first,
because many of them come from trainers and from the network.  Records of other libraries take the same path;
libraries that might log a credential are limited to warnings.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_LINES_MAX = 10_000
_TEXT_MAX = 500
_TRACEBACK_MAX = 8_000
_ITEMS_MAX = 50
_DEPTH_MAX = 4
_CAPPED = ("boto3", "botocore", "s3transfer", "urllib3", "requests", "google", "watchdog")


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


class Logger:
    """Logs events with fields.  ``exc_info`` is an exception, or True for the one that is being handled."""

    def debug(self, event: str, **fields: object) -> None:
        self.log("debug", event, **fields)

    def info(self, event: str, **fields: object) -> None:
        self.log("info", event, **fields)

    def warning(self, event: str, **fields: object) -> None:
        self.log("warning", event, **fields)

    def error(self, event: str, **fields: object) -> None:
        self.log("error", event, **fields)

    def exception(self, event: str, **fields: object) -> None:
        """Log an error with the traceback of the exception that is being handled."""
        self.log("error", event, exc_info=True, **fields)

    def log(self, level: str, event: str, **fields: object) -> None:
        """Log an event at a level of :data:`LEVELS`."""
        if LEVELS[level] >= _threshold:
            line = _line(level, event, fields)
            _put(json.dumps(line) if _is_json else _console_line(line))


logger = Logger()
"""The log of the process."""


class _Libraries(logging.Handler):
    """Logs records of other libraries, as ``message`` of the event ``library_log``."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception as error:  # a broken log call must not break its caller
            message = f"{record.msg!s} (cannot be formatted: {error})"
        level = next(
            (name for name, number in reversed(LEVELS.items()) if record.levelno >= number), "debug"
        )
        error_info = record.exc_info[1] if record.exc_info else None
        logger.log(level, "library_log", logger=record.name, message=message, exc_info=error_info)


_writer: _Writer | None = None
"""None before :func:`configure`: lines are then written by the caller's thread."""
_threshold = logging.DEBUG
_is_json = False


def configure(log_format: str, level: str, *, fd: int | None = None) -> None:
    """Set up logging for the process; may be called again.

    Args:
        log_format: ``json`` or ``console``.
        level: the lowest level to write, of :data:`LEVELS`.
        fd: the descriptor to write to; None for standard error.
    """
    global _writer, _threshold, _is_json  # noqa: PLW0603 - the process has one log
    flush(1.0)
    _writer = _Writer(sys.stderr.fileno() if fd is None else fd)
    _threshold, _is_json = LEVELS[level], log_format == "json"
    logging.basicConfig(handlers=[_Libraries()], level=_threshold, force=True)
    logging.captureWarnings(capture=True)
    for name in _CAPPED:
        logging.getLogger(name).setLevel(max(_threshold, logging.WARNING))


def flush(timeout_s: float) -> bool:
    """Wait until all lines are written; False after ``timeout_s``."""
    return _writer is None or _writer.flush(timeout_s)


def dropped() -> int:
    """Number of lines dropped since :func:`configure`, because standard error blocked or was closed."""
    return 0 if _writer is None else _writer.dropped


def _put(line: str) -> None:
    if _writer is not None:
        _writer.put(line)
    else:
        print(line, file=sys.stderr)


def _line(level: str, event: str, fields: dict[str, object]) -> dict[str, object]:
    now_s, now_us = divmod(time.time_ns() // 1000, 10**6)
    utc = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now_s))}.{now_us:06}Z"
    error = fields.pop("exc_info", None)
    if error is True:
        error = sys.exc_info()[1]
    line: dict[str, object] = {"event": event, "level": level, "timestamp": utc}
    line.update((name, printable(value)) for name, value in fields.items())
    if isinstance(error, BaseException):
        line["exception"] = "".join(traceback.format_exception(error)).rstrip()[-_TRACEBACK_MAX:]
    return line


def _console_line(line: dict[str, object]) -> str:
    fields = dict(line)
    head = f"{fields.pop('timestamp')} [{fields.pop('level')}] {fields.pop('event')}"
    trace = fields.pop("exception", None)
    words = (f"{name}={value}" for name, value in fields.items())
    return " ".join((head, *words)) + (f"\n{trace}" if trace else "")


def printable(value: object, depth: int = 0) -> object:
    """A copy for JSON: strings shortened and without control characters, large containers cut."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth < _DEPTH_MAX and isinstance(value, Mapping):
        items = list(value.items())[:_ITEMS_MAX]
        return {str(printable(str(key))): printable(item, depth + 1) for key, item in items}
    if depth < _DEPTH_MAX and isinstance(value, (list, tuple, set, frozenset)):
        return [printable(item, depth + 1) for item in list(value)[:_ITEMS_MAX]]
    text = str(value)
    if len(text) > _TEXT_MAX:
        text = f"{text[:_TEXT_MAX]}... ({len(text)} characters)"
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


atexit.register(flush, 1.0)
