# SPDX-License-Identifier: Apache-2.0
"""A program for another cloud, connected as systemd connects it, with the daemon as a process."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testkit.clouds import Bucket
from testkit.waiting import until


@contextmanager
def program(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program whose output is the socket; it prints each line that it gets."""
    with socket.socket(socket.AF_UNIX) as output:
        output.connect(str(path))
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=output, text=True) as running:
            yield running
            running.kill()


def say(running: subprocess.Popen[str], line: object) -> None:
    assert running.stdin is not None
    running.stdin.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
    running.stdin.flush()


def health(vm: Any) -> tuple[str, str]:
    """Health and reason of the source; empty before its first report."""
    found = [each for each in vm.status()["sources"] if each["name"] == "command"]
    return (found[0]["health"], found[0]["reason"]) if found else ("", "")


def test_a_program_of_the_operator_reports_a_notice(
    bucket: Bucket, new_vm: Any, witness: str, tmp_path: Path
) -> None:
    """Its notice leads to SAFE, survives its death and the daemon's, and ends when it is withdrawn.

    The socket is closed to others, and a line that is not valid costs that line.
    """
    path = tmp_path / "notices.sock"
    vm = new_vm("vm", bucket.store, settings={"sources": {"command_socket": str(path)}})
    daemon = vm.start_daemon()
    trainer = vm.start_trainer(script=witness)
    trainer.lines.wait(step=5)
    assert path.stat().st_mode & 0o777 == 0o600
    until(lambda: health(vm) == ("degraded", "no program is connected"), what="its first report")

    with program(path) as running:
        until(lambda: health(vm)[0] == "ok", what="the program")
        say(running, {"error": "HTTP 503"})
        until(lambda: "HTTP 503" in health(vm)[1], what="the error")
        say(running, "{}")
        until(lambda: health(vm)[0] == "ok", what="the end of the error")
        say(running, {"id": "a", "in_s": "soon"})
        until(lambda: "in_s of the line is " in health(vm)[1], what="the invalid field")
        assert daemon.lines.all(event="notice") == []
        say(running, {"id": "later", "in_s": 5000})
        say(running, {"id": "evict-17", "in_s": 100, "reason": "capacity"})
        assert daemon.lines.wait(event="verdict")["verdict"] == "SAFE"
        until(lambda: health(vm)[0] == "ok", what="the end of the invalid field")

    daemon.kill()
    daemon = vm.start_daemon()
    (notice,) = until(lambda: vm.status()["notices"], what="the notice of the earlier daemon")
    assert (notice["source"], notice["identities"]) == ("command", ["command:evict-17"])
    with program(path) as running:
        say(running, {"id": "evict-17", "withdrawn": True})
        daemon.lines.wait(event="notice_withdrawn")
        until(lambda: not vm.status()["notices"], what="the end of the notice")
