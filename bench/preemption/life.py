# SPDX-License-Identifier: Apache-2.0
"""One preemption from the first step to the steps after the resume, with two emulated VMs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.preemption import contestants
from bench.preemption.contestants import BUCKET, Contestant, Start
from bench.preemption.loss import Loss, Measured, split
from bench.preemption.store import RATES
from testkit.emulators.process import EmulatorProcess
from testkit.rig import Vm, control

RESERVE_S = 3.0
"""The default of ``deadline.reserve_s``."""
STEP_S = 0.05
NEW_STEPS = 20
"""Steps that the second VM trains, which show that the run continues."""
_LIMIT_S = 240.0
_LOOK_S = 0.05
_RUNNING: set[_Machine] = set()


class Failed(Exception):
    """The run has no result; the text has the reason."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The times of a run."""

    size_bytes: int
    notice_s: float
    """From the notice to the power cut."""
    pause_s: float
    """From the power cut to the start of the processes on the next VM: the same for all contestants.

    With a handover, from the notice.
    """
    save_every_s: float
    """Interval of the saves of the scripts."""
    saved_before_cut_s: float
    """Time between the newest periodic save and the power cut."""
    warm_up_s: float = 5.0
    """Least time from the first step to the notice."""

    @property
    def noticed_after_s(self) -> float:
        """From the first step to the notice."""
        return max(self.warm_up_s, self.saved_before_cut_s + self.warm_up_s - self.notice_s)

    @property
    def first_save_s(self) -> float:
        return self.noticed_after_s + self.notice_s - self.saved_before_cut_s


@dataclass(frozen=True, kw_only=True)
class Outcome:
    loss: Loss
    is_intact: bool
    """All tensors held the step that the trainer resumed from."""
    measured: Measured | None
    """Only of Swansong."""
    imported_s: float
    """From the start of the second VM to the end of the trainer's imports."""
    restored_s: float
    """From the start of the second VM to the restored state."""


def live(
    contestant: Contestant, plan: Plan, place: Path, objects: Path, stack: ExitStack
) -> Outcome:
    """Run a preemption.

    Args:
        place: an empty directory for the disks of the VMs and the files of the witnesses.
        objects: an empty directory for the objects of the store.
        stack: ends the store and the emulators.

    Raises:
        Failed: a process ended, or the second VM did not train in time.
    """
    url = stack.enter_context(
        EmulatorProcess("bench.preemption.store", "--directory", str(objects))
    ).url
    first = _Machine(1, contestant, plan, place, url)
    first.begin(stack)
    first_step = first.until_steps(1)[0][1]
    _sleep_until(first_step + plan.noticed_after_s)
    noticed = time.monotonic()
    notice = control(first.metadata_url, "notice", action="terminate", in_s=plan.notice_s)
    left_s = datetime.fromisoformat(notice["time"]).timestamp() - time.time()
    cut_due = time.monotonic() + left_s
    started = (noticed if contestant.is_handover else cut_due) + plan.pause_s
    second = _Machine(2, contestant, plan, place, url)
    if contestant.is_handover:
        _sleep_until(started)
        second.begin(stack)
    _sleep_until(cut_due)
    cut = time.monotonic()
    first.power_off()
    sent_bytes_s, _ = control(url, RATES)  # what the first VM reads is no fetch
    if not contestant.is_handover:
        _sleep_until(started)
        second.begin(stack)
    second.until_steps(NEW_STEPS)
    _, fetch_bytes_s = control(url, RATES)
    second.power_off()
    resumed = second.line("restored")
    after = second.steps()
    loss = split(
        first.steps(),
        after,
        restored=resumed["restored"],
        noticed=noticed,
        cut=cut,
        pause_s=max(0.0, started - cut),
    )
    imported_s = second.line("imported")["mono_s"] - started
    measured = None
    if contestant.name == contestants.OURS:
        assert first.vm.daemon is not None
        measured = _measured(first.vm.daemon.lines.all(), sent_bytes_s, fetch_bytes_s)
    is_intact = bool(resumed["is_intact"]) and after[0][0] == resumed["restored"] + 1
    return Outcome(
        loss=loss,
        is_intact=is_intact,
        measured=measured,
        imported_s=imported_s,
        restored_s=resumed["mono_s"] - started,
    )


def end_all() -> None:
    """Cut the power of all VMs, when the benchmark is interrupted."""
    for machine in list(_RUNNING):
        machine.power_off()


def _sleep_until(mono_s: float) -> None:
    threading.Event().wait(max(0.0, mono_s - time.monotonic()))


class _Machine:
    """An emulated VM, with its metadata service and its witness."""

    def __init__(
        self, number: int, contestant: Contestant, plan: Plan, place: Path, store_url: str
    ) -> None:
        self._contestant = contestant
        self._plan = plan
        self._store_url = store_url
        self._witness = place / f"witness-{number}.jsonl"
        self._disk = place / f"vm-{number}"
        self._disk.mkdir()
        self.metadata_url = ""

    def begin(self, stack: ExitStack) -> None:
        """Start the metadata service, which is the cloud's, and then all processes of the VM."""
        metadata = stack.enter_context(EmulatorProcess("testkit.emulators.aws_imds"))
        self.metadata_url = metadata.url
        table = {"url": f"s3://{BUCKET}/runs", "endpoint": self._store_url, "region": "us-east-1"}
        defaults = {
            "sources": {"poll_interval_s": 1.0},
            "trainer": {"settle_s": 2.0},
            "deadline": {"reserve_s": RESERVE_S},
            "run": {"handover": self._contestant.is_handover},
        }
        self.vm = stack.enter_context(
            Vm(self._disk, table, metadata=("aws", metadata.url), settings=defaults)
        )
        stack.callback(self.power_off)
        _RUNNING.add(self)
        trainer = ["--size-bytes", str(self._plan.size_bytes), "--step-s", str(STEP_S)]
        trainer += ["--witness", str(self._witness)]
        trainer += ["--first-save-s", str(self._plan.first_save_s)]
        trainer += ["--save-every-s", str(self._plan.save_every_s)]
        contestants.begin(
            self._contestant,
            Start(
                vm=self.vm,
                metadata_url=metadata.url,
                store_url=self._store_url,
                trainer=trainer,
            ),
        )

    def lines(self) -> list[dict[str, Any]]:
        try:
            text = self._witness.read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def line(self, key: str) -> dict[str, Any]:
        return next(line for line in self.lines() if key in line)

    def steps(self) -> list[tuple[int, float]]:
        return [(line["step"], line["mono_s"]) for line in self.lines() if "step" in line]

    def until_steps(self, count: int) -> list[tuple[int, float]]:
        """Wait until the trainer has completed this number of steps on this VM."""
        give_up = time.monotonic() + _LIMIT_S
        assert self.vm.trainer is not None
        while len(steps := self.steps()) < count:
            code = self.vm.trainer.popen.poll()
            if code is not None or time.monotonic() > give_up:
                last = self.vm.trainer.lines.raw[-8:]
                raise Failed(f"no steps, exit code {code}: {' | '.join(last)}")
            time.sleep(_LOOK_S)
        return steps

    def power_off(self) -> None:
        """Kill every process of the VM at the same time, and delete its disk."""
        _RUNNING.discard(self)
        for process in self.vm.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.vm.processes:
            process.popen.wait(30)
        if self._contestant.is_mount:
            out = str(self._disk / "out")
            subprocess.run(["fusermount3", "-uzq", out], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self._disk, ignore_errors=True)


def _measured(lines: list[dict[str, Any]], sent_bytes_s: float, fetch_bytes_s: float) -> Measured:
    """The values of the bound, from the log of the first daemon and the counters of the store."""
    sets: list[dict[str, dict[str, Any]]] = []
    for line in lines:
        if line["event"] == "evacuation":
            if line["phase"] in ("request", "follow_up"):
                sets.append({})
            if sets:
                sets[-1][line["phase"]] = line
    whole = [phases for phases in sets if {"accepted", "sealed", "flushed"} <= phases.keys()]
    if not whole:
        raise Failed("the daemon flushed no checkpoint after the notice")
    phases = whole[-1]
    return Measured(
        save_s=phases["sealed"]["at_s"] - phases["accepted"]["at_s"],
        size_bytes=int(phases["sealed"]["size_bytes"]),
        send_bytes_s=sent_bytes_s,
        fetch_bytes_s=fetch_bytes_s,
        reserve_s=RESERVE_S,
    )
