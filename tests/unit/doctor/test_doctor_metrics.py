# SPDX-License-Identifier: Apache-2.0
"""The checks of ``[metrics]``: none of them is a failure, and none leaves a file behind."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from swansong_tools.doctor import reporting
from swansong_tools.doctor.findings import Judgement, Level
from swansongd.observe.status import DaemonStatus, MetricsStatus

from testkit.status_picture import status
from tests.unit.doctor.test_doctor import installation

LOOPBACK = "127.0.0.1:9469"
EDIT = "sudoedit /etc/swansong/swansong.toml"


def answering(metrics: MetricsStatus | None) -> DaemonStatus:
    return replace(status(0.0), metrics=metrics)


def judged(address: str, answer: DaemonStatus | None = None) -> Judgement:
    return reporting.metrics_address(installation(answer, metrics={"listen": address}))


def judge_directory(directory: Path) -> Judgement:
    return reporting.textfile(installation(metrics={"textfile": str(directory / "swansong.prom")}))


def test_the_daemon_itself_reports_whether_it_serves_its_metrics() -> None:
    """A failure has the fix of the configuration."""
    served = MetricsStatus(address="127.0.0.1:9469")
    assert judged(LOOPBACK, answering(served)).level is Level.OK
    failed = replace(served, failure="Permission denied")
    found = judged("127.0.0.1:1", answering(failed))
    assert (found.level, found.fix) == (Level.WARNING, EDIT)
    assert "Permission denied" in found.found
    old = judged(LOOPBACK, answering(None))
    assert (old.level, "started without" in old.found) == (Level.WARNING, True)


@pytest.mark.parametrize("is_running", [True, False])
def test_a_process_that_has_taken_the_address_is_named(is_running: bool) -> None:
    """By its process id and user, whatever it answers to a scrape."""
    taken = MetricsStatus(address="", failure="taken")
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        found = judged(address, answering(taken) if is_running else None)
    assert (found.level, found.fix) == (Level.WARNING, EDIT)
    assert f"process {os.getpid()} (" in found.found
    assert judged(address).found.endswith("is free")


def test_a_free_socket_needs_its_directory(tmp_path: Path) -> None:
    """Nothing is created there."""
    assert judged(f"unix:{tmp_path}/m.sock").level is Level.OK
    lost = judged(f"unix:{tmp_path}/none/m.sock")
    assert lost.level is Level.WARNING
    assert os.listdir(tmp_path) == []


def test_an_address_for_other_machines_is_a_warning() -> None:
    served = MetricsStatus(address="0.0.0.0:9469")
    found = judged("0.0.0.0:9469", answering(served))
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
