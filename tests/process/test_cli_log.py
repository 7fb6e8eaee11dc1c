# SPDX-License-Identifier: Apache-2.0
"""Logs of a process: one line per event, no blocking, no leaked secrets."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from testkit.waiting import until
from testkit.warm import python_of

PRELUDE = """
import json, logging, os, sys, time
import structlog
from swansongd.observe import log
logger = structlog.get_logger("made-before-configure")
"""


def warm() -> str:
    return python_of(os.environ["SWANSONG_TEST_WARM"], "swansongd")


def run(body: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [warm(), "-c", PRELUDE + body],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def lines_of(body: str) -> list[dict[str, Any]]:
    done = run(body)
    assert done.stdout == ""
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_line_is_one_json_object_with_the_event_first() -> None:
    """Standard error gets event, level, UTC time and the fields; lower levels are dropped."""
    (line,) = lines_of(
        "log.configure('json', 'info')\n"
        "logger.debug('unseen')\n"
        "logger.info('flush_done', size_bytes=5, took_s=0.5, nested={'a': [1, None, True]})\n"
    )
    assert list(line) == ["event", "level", "timestamp", "size_bytes", "took_s", "nested"]
    assert (line["event"], line["level"], line["size_bytes"]) == ("flush_done", "info", 5)
    assert line["timestamp"].endswith("Z")
    assert line["nested"] == {"a": [1, None, True]}


@pytest.mark.fault("S14")
def test_strings_from_outside_are_shortened_and_cannot_forge_a_line() -> None:
    """Long strings are cut; line breaks and terminal codes are escaped at every depth, also on a console."""
    body = (
        'evil = \'x\\n{"event": "forged"}\\x1b[2J\'\n'
        "logger.warning('received', text=evil, deep={'k': [evil]}, long='y' * 9000, odd=object,"
        " wide=list(range(9999)), number=float('nan'))\n"
    )
    (line,) = lines_of("log.configure('json', 'info')\n" + body)
    assert line["event"] == "received"
    assert "\n" not in line["text"]
    assert "\x1b" not in line["deep"]["k"][0]
    assert len(line["long"]) < 600
    assert len(line["wide"]) <= 50
    assert line["number"] == "nan"
    done = run("log.configure('console', 'info')\n" + body)
    assert len(done.stderr.splitlines()) == 1
    assert "\x1b" not in done.stderr


@pytest.mark.fault("S22")
def test_libraries_log_the_same_way_and_sdks_only_warnings() -> None:
    """A message of a library is a field, not an event; SDKs log below warning may contain credentials."""
    lines = lines_of(
        "log.configure('json', 'debug')\n"
        "for name in ('boto3', 'botocore.auth', 'urllib3.connectionpool', 'google.auth', 'ours'):\n"
        "    logging.getLogger(name).debug('Signature: hunter2')\n"
        "    logging.getLogger(name).warning('trouble %s', 1)\n"
        "logging.getLogger('ours').error('broken %d', 'x')\n"
    )
    assert {line["event"] for line in lines} == {"library_log"}
    assert [line["logger"] for line in lines if "hunter2" in line["message"]] == ["ours"]
    assert sum(line["message"] == "trouble 1" for line in lines) == 5
    assert lines[-1]["level"] == "error"
    assert "cannot be formatted" in lines[-1]["message"]


def test_an_exception_keeps_its_traceback() -> None:
    """The traceback is a field of the same line."""
    (line,) = lines_of(
        "log.configure('json', 'info')\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    logger.exception('failed')\n"
    )
    assert line["level"] == "error"
    assert line["exception"].startswith("Traceback")
    assert "ZeroDivisionError" in line["exception"]


@pytest.mark.fault("H12")
def test_a_stalled_reader_does_not_block_and_lost_lines_are_counted() -> None:
    """With a full pipe logging does not block; later one line reports the number of lost lines."""
    read_fd, write_fd = os.pipe()
    body = (
        f"log.configure('json', 'info', fd={write_fd})\n"
        "slowest = 0.0\n"
        "for number in range(30_000):\n"
        "    began = time.monotonic(); logger.info('line', number=number)\n"
        "    slowest = max(slowest, time.monotonic() - began)\n"
        "flushed = log.flush(0.1)\n"
        "print(json.dumps([log.dropped(), slowest, flushed]), flush=True)\n"
        "sys.stdin.read()\n"
        "log.flush(30)\n"
    )
    process = subprocess.Popen(
        [warm(), "-c", PRELUDE + body],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[write_fd],
        text=True,
    )
    os.close(write_fd)
    assert process.stdout is not None
    assert process.stdin is not None
    dropped, slowest_s, flushed = json.loads(process.stdout.readline())
    assert dropped > 10_000
    assert slowest_s < 5
    assert flushed is False
    process.stdin.close()
    with os.fdopen(read_fd) as pipe:
        lines = [json.loads(line) for line in pipe]
    process.stdout.close()
    until(lambda: process.poll() == 0, what="the process to end")
    reported = [line["lines"] for line in lines if line["event"] == "log_dropped"]
    assert sum(reported) == dropped
    assert len(lines) == 30_000 - dropped + len(reported)


def test_a_closed_standard_error_is_survived() -> None:
    """The process keeps running after the journal closes the pipe."""
    done = run(
        "r, w = os.pipe(); os.close(r)\n"
        "log.configure('json', 'info', fd=w)\n"
        "logger.info('lost')\n"
        "assert log.flush(10)\n"
        "print(log.dropped())\n"
    )
    assert done.stdout == "1\n"
