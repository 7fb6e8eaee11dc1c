# SPDX-License-Identifier: Apache-2.0
"""The connection writes each kind of line to the trainer's log at most once a minute."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
import swansong
from swansong import protocol
from swansong._daemon import daemon_channel as channels
from swansong._daemon.daemon_channel import Channel

from testkit.waiting import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(channels, "time", clock)
    return clock


@pytest.fixture
def channel() -> Channel:
    def nothing(*_: object) -> None:
        return None

    return Channel(
        "/nonexistent/socket",
        expected=True,
        hello=lambda: protocol.Hello(""),
        connected=nothing,
        handle=nothing,
        tick=nothing,
    )


def test_after_any_number_of_lines_the_next_minute_has_one_again(
    channel: Channel, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Malformed answers of many kinds do not flood the log, and never silence it."""
    for minute in range(1, 4):
        for number in range(1000):
            channel._received(b'{"type": "%d"}' % (1000 * minute + number), -1)
        assert len(caplog.records) == minute
        clock.now += 61
    assert len(channel._logged) == 1


def test_the_same_line_is_written_once(
    channel: Channel, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """An hour without a daemon is one line."""
    for _ in range(60):
        channel._connect()
        clock.now += 61
    assert len(caplog.records) == 1
    assert "no swansongd" in caplog.text


def test_an_error_that_repeats_has_one_trace(
    channel: Channel, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The background thread survives an error in each iteration, and reports it once."""

    def fails() -> None:
        raise RuntimeError("broken")

    for _ in range(1000):
        channel._guarded(fails)
        clock.now += 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert "broken" in record.getMessage()


@pytest.mark.parametrize(
    ("leaves", "level"),
    [("nothing", logging.INFO), ("directory", logging.WARNING), ("socket", logging.WARNING)],
)
def test_a_restore_that_no_daemon_answers_names_step_0(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    leaves: str,
    level: int,
) -> None:
    """A warning where a daemon has stopped, or was killed; a machine without one gets none."""
    path = tmp_path / "daemon" / "trainer.sock"
    monkeypatch.setattr(protocol, "DEFAULT_SOCKET", str(path))
    monkeypatch.setattr(channels, "RESTART_PATIENCE_S", 0.0)
    if leaves != "nothing":
        path.parent.mkdir()
    if leaves == "socket":
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(path))
    caplog.set_level(logging.INFO)
    with swansong.attach({"counts": {}}) as guard:
        assert guard.restore() == 0
    (record,) = [each for each in caplog.records if "starts from step 0" in each.getMessage()]
    assert record.levelno == level
