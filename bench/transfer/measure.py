# SPDX-License-Identifier: Apache-2.0
"""Runs one process and measures its time, CPU and memory, and the CPU time of all other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Run:
    """Measurements of one run of one process."""

    wall_s: float
    """Duration of the transfer if the process reports it, else of the process."""
    cpu_s: float
    """User and system time of the transfer, with child processes."""
    rss_bytes: int
    """Peak resident memory of the process and its children, with mapped files."""
    busy_s: float
    """CPU seconds of the whole machine in that time."""
    own_cpu_s: float
    """CPU seconds of this process and of the contestant in that time."""
    elapsed_s: float
    exit_code: int
    output: str = field(repr=False)
    is_cut: bool = False
    """The process reached its time limit and was killed."""


def busy_s() -> float:
    """CPU seconds of all cores since boot."""
    line = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _wait, irq, softirq, steal = (int(value) for value in line[:8])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def wait_for_quiet(limit_s: float, share_max: float = 0.1) -> bool:
    """Wait until the machine is idle for half a second; False if ``limit_s`` passed first."""
    give_up_s = time.monotonic() + limit_s
    pause = threading.Event()
    while True:
        before = busy_s()
        pause.wait(0.5)
        if busy_s() - before < 0.5 * share_max:
            return True
        if time.monotonic() > give_up_s:
            return False


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    limit_s: float,
    directory: Path,
    at_s: Mapping[float, Callable[[], None]] | None = None,
) -> Run:
    """Run a process until its end, or at most ``limit_s``.

    Args:
        at_s: functions to call at these times after the start of the process.
    """
    own_before, busy_before = _own_cpu_s(), busy_s()
    with open(directory / "output", "w+") as output:
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        watcher = _Watcher(process.pid, began, at_s or {}, limit_s)
        _, status, used = os.wait4(process.pid, 0)
        ended = time.monotonic()
        process.returncode = os.waitstatus_to_exitcode(status)
        watcher.end()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        busy_after, own_after = busy_s(), _own_cpu_s()
        output.seek(0)
        text = output.read()
    cpu_s = used.ru_utime + used.ru_stime
    wall_s = ended - began
    reported = next(
        (line for line in text.splitlines() if line.startswith('{"began_mono_s"')), None
    )
    reported_cpu_s = cpu_s
    if reported is not None:
        facts = json.loads(reported)
        wall_s = facts["ended_mono_s"] - facts["began_mono_s"]
        reported_cpu_s = facts["cpu_s"]
    return Run(
        wall_s=wall_s,
        cpu_s=reported_cpu_s,
        rss_bytes=max(watcher.rss_bytes, used.ru_maxrss * 1024),
        busy_s=busy_after - busy_before,
        own_cpu_s=own_after - own_before + cpu_s,
        elapsed_s=ended - began,
        exit_code=process.returncode,
        output=text,
        is_cut=watcher.is_cut,
    )


def _own_cpu_s() -> float:
    times = os.times()
    return times.user + times.system


class _Watcher:
    """Samples the memory of a process and its children until :meth:`end`."""

    def __init__(
        self, pid: int, began: float, at_s: Mapping[float, Callable[[], None]], limit_s: float
    ) -> None:
        self.rss_bytes = 0
        self.is_cut = False
        self._pid = pid
        self._began = began
        self._due = sorted(at_s.items())
        self._limit_s = limit_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        for _, act in self._due:  # the process ended before these were due: its result is final
            act()

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_S):
            self.rss_bytes = max(self.rss_bytes, sum(map(_rss_bytes, _family(self._pid))))
            elapsed_s = time.monotonic() - self._began
            while self._due and elapsed_s >= self._due[0][0]:
                self._due.pop(0)[1]()
            if elapsed_s > self._limit_s and not self.is_cut:
                self.is_cut = True
                with suppress(ProcessLookupError):
                    os.killpg(self._pid, signal.SIGKILL)


def _family(pid: int) -> list[int]:
    found = [pid]
    for member in found:
        with suppress(OSError):
            for task in os.listdir(f"/proc/{member}/task"):
                children = Path(f"/proc/{member}/task/{task}/children").read_text()
                found += [int(child) for child in children.split()]
    return found


def _rss_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0
