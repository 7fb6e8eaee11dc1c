# SPDX-License-Identifier: Apache-2.0
"""Two daemons of one job, with scripted ranks: the reports of each VM about a checkpoint of both."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from swansong import protocol

from testkit.rig import Process, Vm
from testkit.scripted_rank import ScriptedRank
from testkit.waiting import until

SETTINGS = {"flush": {"background_bytes_per_s": 100_000}}


class Pair:
    """Two VMs in one start, with a whole checkpoint of step 5."""

    def __init__(self, directory: Path, new_vm: Callable[..., Vm], opened: ExitStack) -> None:
        store = {"url": f"file://{directory}/shelf"}
        (directory / "shelf").mkdir()
        self.vms = [new_vm(name, store, settings=SETTINGS) for name in ("a", "b")]
        for vm in self.vms:
            vm.start_daemon()
        self.ranks = [ScriptedRank(vm, node) for node, vm in enumerate(self.vms)]
        for rank in self.ranks:
            opened.enter_context(rank)
        self.begin("first", generation=1)
        for rank in self.ranks:
            rank.seal(5)
        for vm in self.vms:
            until(lambda vm=vm: committed(vm) == 5, timeout_s=40, what="step 5 as a whole")

    def begin(self, start_id: str, generation: int) -> None:
        for rank in self.ranks:
            rank.begin(start_id)
        for vm in self.vms:
            until(lambda vm=vm: vm.status()["generation"] == generation, timeout_s=30)

    def notify(self, in_s: str) -> Process:
        """Give the first VM a notice and let its rank save for it; returns ``notify --wait``."""
        waiting = self.vms[0].spawn(
            [str(Path(sys.executable).with_name("swansong")), "--config", str(self.vms[0].config),
             "notify", "--in", in_s, "--wait"],
            lines_on="stdout",
        )  # fmt: skip
        request = self.ranks[0].receive_a(protocol.Request).id
        self.ranks[0].send(protocol.Agreed(request, 9))
        self.ranks[0].seal(9, request)
        return waiting


def committed(vm: Vm) -> int | None:
    """Step of the newest commit that this daemon reports."""
    commit = vm.status()["last_commit"]
    return None if commit is None else int(commit["step"])


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pair(tmp_path: Path, new_vm: Callable[..., Vm], opened: ExitStack) -> Pair:
    return Pair(tmp_path, new_vm, opened)


@pytest.mark.fault("G17", "H01")
def test_a_vm_whose_peer_has_no_daemon_is_not_safe(pair: Pair, tmp_path: Path) -> None:
    """At the deadline the exit code is that of PARTIAL; command, log and farewell report both commits."""
    first, second = pair.vms
    assert first.daemon is not None
    assert second.daemon is not None
    second.daemon.kill()
    waiting = pair.notify("4s")
    assert waiting.wait() == 10
    part = "this VM's part of generation 1 step 9 is committed (1 of 2 VMs)"
    assert waiting.lines.raw == [f"PARTIAL: generation 1 step 5 is committed; {part}"]
    verdict = first.daemon.lines.wait(event="verdict")
    assert (verdict["verdict"], verdict["step"]) == ("PARTIAL", 5)
    assert part in verdict["reason"]
    farewells = [
        json.loads(path.read_text())
        for path in (tmp_path / "shelf" / "run" / "farewells").glob("*.json")
    ]
    for farewell in farewells:
        assert (farewell["verdict"], farewell["complete"]) == ("PARTIAL", False)
        assert (farewell["commit"]["step"], farewell["part"]["step"]) == (5, 9)


@pytest.mark.fault("N09", "G17")
def test_a_restarted_survivor_resumes_from_the_set_that_both_vms_sealed(
    pair: Pair, opened: ExitStack, tmp_path: Path
) -> None:
    """One VM commits its part and is terminated; the other is flushing its part when the job restarts."""
    first, second = pair.vms
    assert second.daemon is not None
    pair.ranks[0].seal(9)
    part = tmp_path / "shelf/run/commits/00000001/000000000009/00000-of-00002.json"
    until(part.exists, timeout_s=40, what="the first part")
    first.power_off()
    pair.ranks[1].seal(9, size_bytes=4_000_000)
    until(lambda: second.status()["pending_bytes"] > 0, timeout_s=40, what="a flush")
    pair.ranks[1].close()
    alone = opened.enter_context(ScriptedRank(second, 0, nodes=1, start_id="second"))
    alone.send(protocol.RestoreQuery("q", start_id="second"))
    restored = alone.receive_a(protocol.Restored)
    assert (restored.step, restored.error) == (9, "")
    assert second.status()["generation"] == 2
    assert committed(second) == 9


@pytest.mark.fault("G04")
def test_a_vm_that_the_job_has_left_behind_reports_it(pair: Pair, opened: ExitStack) -> None:
    """State, command and exit code report the generation of the VM that continues the run, immediately."""
    first, second = pair.vms
    pair.ranks[1].close()
    opened.enter_context(ScriptedRank(second, 0, nodes=1, start_id="second"))
    until(lambda: second.status()["generation"] == 2, timeout_s=40, what="a generation for one VM")
    pair.ranks[0].seal(7)
    until(lambda: first.status()["state"] == "FENCED", timeout_s=40)
    assert first.status()["newer_generation"] == 2
    done = first.swansong("notify", "--in", "50s", "--wait")
    assert done.returncode == 10
    assert done.stdout.endswith("; generation 2 has taken the run over\n")
    assert "generation 2 has taken the run over" in first.status_words()
