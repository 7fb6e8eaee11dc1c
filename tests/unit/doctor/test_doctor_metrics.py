# SPDX-License-Identifier: Apache-2.0
"""The checks of ``[metrics]``: none of them is a failure, and none leaves a file behind."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily
from swansongd.config.values import ListenAddress
from swansongd.doctor.findings import Level
from swansongd.doctor.metrics import judge_address, judge_directory
from swansongd.observe.exposition import Exposition, registry_of

from testkit.waiting import until


class Build:
    """A collector with the build info of a daemon."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        found = GaugeMetricFamily("swansong_build_info", "Version", labels=["run"])
        found.add_metric(["llm"], 1.0)
        yield found


@pytest.fixture
def served(tmp_path: Path) -> Iterator[list[ListenAddress]]:
    """A daemon of the run ``llm`` at a port and at a Unix socket."""
    stop, found = threading.Event(), []
    for address in (
        ListenAddress(host="127.0.0.1", port=0),
        ListenAddress(path=tmp_path / "metrics.sock"),
    ):
        made = Exposition(address, registry_of(Build()), key="metrics.listen", stop=stop)
        made.start()
        at = until(lambda made=made: made.served_at, what="the metrics")  # type: ignore[misc]
        port = 0 if address.path else int(at.rpartition(":")[2])
        found.append(ListenAddress(host=address.host, port=port, path=address.path))
    yield found
    stop.set()


def test_a_daemon_that_answers_is_recognised(served: list[ListenAddress]) -> None:
    """By the name of its run."""
    for address in served:
        assert judge_address(address, "llm", "edit").level is Level.OK
        other = judge_address(address, "vision", "edit")
        assert (other.level, other.fix) == (Level.WARNING, "edit")
        assert "another run" in other.found


def test_an_address_of_another_program_is_a_warning(tmp_path: Path) -> None:
    """It answers with something else, or not at all."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = ListenAddress(host="127.0.0.1", port=other.getsockname()[1])

        def answer() -> None:
            client, _ = other.accept()
            client.recv(4096)
            client.sendall(b"SSH-2.0-OpenSSH\r\n")
            client.close()

        threading.Thread(target=answer, daemon=True).start()
        found = judge_address(address, "llm", "edit")
    assert (found.level, "another program" in found.found) == (Level.WARNING, True)
    assert judge_address(address, "llm", "edit").found.endswith("is free")


def test_a_free_socket_needs_its_directory(tmp_path: Path) -> None:
    """Nothing is created there."""
    assert judge_address(ListenAddress(path=tmp_path / "m.sock"), "llm", "e").level is Level.OK
    lost = judge_address(ListenAddress(path=tmp_path / "none" / "m.sock"), "llm", "edit")
    assert lost.level is Level.WARNING
    assert os.listdir(tmp_path) == []


def test_an_address_for_other_machines_is_a_warning() -> None:
    found = judge_address(ListenAddress(host="0.0.0.0", port=9469), "llm", "edit")
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
