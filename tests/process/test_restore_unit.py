# SPDX-License-Identifier: Apache-2.0
"""``swansong restore --local``, as the restore unit runs it, gets the download of the daemon."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from swansong import protocol

from testkit.clouds import Bucket
from testkit.committed import commit, file_store
from testkit.rig import Vm
from testkit.staged import seal_files
from tests.process.conftest import NewVm

CONTENT = os.urandom(3_000_000)


def restore(vm: Vm, there: Path) -> dict[str, Any]:
    there.unlink(missing_ok=True)
    done = vm.swansong("restore", "--local", "--fresh-ok", "--to", str(there), "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def content(there: Path) -> bytes:
    (file,) = there.rglob("x")
    return file.read_bytes()


def test_the_daemon_downloads_once_for_the_unit_and_the_trainer(
    bucket: Bucket, new_vm: NewVm, tmp_path: Path
) -> None:
    """The unit gets a link to the daemon's download.  A restart of the daemon leaves the directory, and a
    later start of the trainer gets it again."""
    before = new_vm("a", bucket.store)
    seal_files(before.run_directory, 120, {"x": CONTENT})
    before.start_daemon().lines.wait(event="committed", step=120)
    before.power_off()
    vm = new_vm("b", bucket.store)
    daemon = vm.start_daemon()
    there = tmp_path / "there"

    answer = restore(vm, there)
    assert (answer["generation"], answer["step"], answer["path"]) == (1, 120, str(there))
    assert answer["size_bytes"] >= len(CONTENT)
    assert there.is_symlink()
    assert there.resolve().parent == (vm.run_directory / "restored").resolve()
    assert daemon.lines.wait(event="resume")["step"] == 120
    first = there.resolve()

    daemon.kill(signal.SIGINT)
    assert daemon.wait() == 0
    assert content(there) == CONTENT
    vm.start_daemon()
    assert content(there) == CONTENT
    assert restore(vm, there)["step"] == 120
    assert content(there) == CONTENT
    assert len([each for each in first.parent.iterdir() if each.is_dir()]) == 1


def test_a_set_in_staging_and_a_fresh_run_are_answered(
    bucket: Bucket, new_vm: NewVm, tmp_path: Path
) -> None:
    """The daemon chooses for the unit as for a trainer."""
    vm = new_vm("a", bucket.store)
    daemon = vm.start_daemon()
    there = tmp_path / "there"
    assert restore(vm, there)["step"] is None
    assert not there.exists()
    bucket.order("outage", seconds=600)
    seal_files(vm.run_directory, 7, {"x": CONTENT})
    daemon.lines.wait(event="sealed_set_found", step=7)
    bucket.order("clear")
    answer = restore(vm, there)
    assert (answer["generation"], answer["step"]) == (None, 7)
    assert there.resolve().parent == vm.run_directory.resolve()


def test_without_a_good_answer_the_unit_fetches(new_vm: NewVm, tmp_path: Path) -> None:
    """The daemon closes the connection, refuses, has an error, or names a directory outside of staging."""
    store = file_store(tmp_path / "store")
    commit(store, {"x": CONTENT}, run="run", step=120, chunk_bytes=len(CONTENT))
    vm = new_vm("b", {"url": store.url})
    there = tmp_path / "there"
    answers: list[protocol.Message | None] = [
        None,
        protocol.Refused("not now"),
        protocol.Restored("", error="the disk is full"),
        protocol.Restored("", path="/etc", step=1),
        protocol.Restored("", path="/staging/run/../../etc", step=1),
    ]

    def serve(listener: socket.socket, answer: protocol.Message | None) -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(65536)
            if answer is not None:
                peer.send(protocol.encode(answer))

    for answer in answers:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(vm.socket))
            listener.listen()
            threading.Thread(target=serve, args=(listener, answer), daemon=True).start()
            done = vm.swansong("restore", "--local", "--to", str(there), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["step"] == 120
        assert "the daemon gave no checkpoint" in done.stderr
        assert not there.is_symlink()
        assert content(there) == CONTENT
        vm.socket.unlink()
        shutil.rmtree(there)
