# SPDX-License-Identifier: Apache-2.0
"""The checks of ``[metrics]``: none of them is a failure, and none leaves a file behind."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from swansong_bucket.config.values import ListenAddress
from swansong_bucket.errors import Unreachable
from swansong_tools.doctor.findings import Judgement, Level
from swansong_tools.doctor.metrics import judge_address, judge_directory
from swansongd.observe.status import DaemonStatus, MetricsStatus

from testkit.status_picture import status

LOOPBACK = ListenAddress(host="127.0.0.1", port=9469)


def answering(metrics: MetricsStatus | None) -> DaemonStatus:
    return replace(status(0.0), metrics=metrics)


def judged(address: ListenAddress, answer: DaemonStatus | None = None) -> Judgement:
    """By the answer of the daemon; None: it does not run."""

    def fetch() -> DaemonStatus:
        if answer is None:
            raise Unreachable("no daemon answers")
        return answer

    return judge_address(address, fetch, "edit")


def test_the_daemon_itself_reports_whether_it_serves_its_metrics() -> None:
    """A failure has the fix of the configuration."""
    served = MetricsStatus(address="127.0.0.1:9469")
    assert judged(LOOPBACK, answering(served)).level is Level.OK
    failed = replace(served, failure="Permission denied")
    found = judged(ListenAddress(host="127.0.0.1", port=1), answering(failed))
    assert (found.level, found.fix) == (Level.WARNING, "edit")
    assert "Permission denied" in found.found
    old = judged(LOOPBACK, answering(None))
    assert (old.level, "started without" in old.found) == (Level.WARNING, True)


@pytest.mark.parametrize("is_running", [True, False])
def test_a_process_that_has_taken_the_address_is_named(is_running: bool) -> None:
    """By its process id and user, whatever it answers to a scrape."""
    taken = MetricsStatus(address="", failure="taken")
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = ListenAddress(host="127.0.0.1", port=other.getsockname()[1])
        found = judged(address, answering(taken) if is_running else None)
    assert (found.level, found.fix) == (Level.WARNING, "edit")
    assert f"process {os.getpid()} (" in found.found
    assert judged(address).found.endswith("is free")


def test_a_free_socket_needs_its_directory(tmp_path: Path) -> None:
    """Nothing is created there."""
    assert judged(ListenAddress(path=tmp_path / "m.sock")).level is Level.OK
    lost = judged(ListenAddress(path=tmp_path / "none" / "m.sock"))
    assert lost.level is Level.WARNING
    assert os.listdir(tmp_path) == []


def test_an_address_for_other_machines_is_a_warning() -> None:
    served = MetricsStatus(address="0.0.0.0:9469")
    found = judged(ListenAddress(host="0.0.0.0", port=9469), answering(served))
    assert (found.level, "without a password" in found.found) == (Level.WARNING, True)


def test_the_directory_of_the_textfile_is_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fix is a drop-in; the probe is removed."""
    assert judge_directory(tmp_path).level is Level.OK
    assert os.listdir(tmp_path) == []
    assert judge_directory(tmp_path / "none").level is Level.WARNING

    def refuse(*_arguments: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    found = judge_directory(tmp_path)
    assert found.level is Level.WARNING
    assert "Read-only file system" in found.found
    assert f"ReadWritePaths={tmp_path}" in found.fix
