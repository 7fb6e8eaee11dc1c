# SPDX-License-Identifier: Apache-2.0
"""``gpu``: the health of the NVIDIA GPUs, from NVML and the kernel log.

One thread reads two pipes: the output of the probe (:mod:`swansongd.sources.nvml`, a process of its own) and
the kernel log.  The kernel log is the second witness: it shows Xids while NVML hangs, and faults of NVSwitch.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from swansong import bounds
from swansong_bucket.model import DeadlineQuality, GpuHealth, GpuRecord, GpuStatus, Notice, Severity

from swansongd.core.events import GpusRead, NoticeRaised, NoticeWithdrawn
from swansongd.core.gpus import SOURCE, describe
from swansongd.observe.health import HealthTracker
from swansongd.sources.gpu_health import GpuRecords, parse_gpus, parse_line
from swansongd.sources.metadata import Backoff, shortened
from swansongd.sources.source import Clock, Post
from swansongd.sources.xids import (
    RECORD_MAX_BYTES,
    Fault,
    parse_record,
    pci_address,
    record_number,
    xid_fault,
)

KERNEL_LOG = Path("/dev/kmsg")
PROBE = (sys.executable, "-I", "-m", "swansongd.sources.nvml")
FAILED_S = 600.0
"""From the failure of a GPU to the deadline of its evacuation.  The VM lives on: this only bounds retries."""
DEGRADED_S = 3600.0
"""The same for the precaution that a degraded GPU causes."""
AGAIN_S = 3600.0
"""One GPU causes at most one precaution in this time."""
BLIND_AFTER_S = 60.0

_TURN_S = 0.5
_SLACK_S = 15.0
"""After its deadline and this time, a notice has no effect any more."""
_RETRY_FIRST_S = 1.0
_RETRY_MAX_S = 60.0
_BUFFER_MAX_BYTES = 256 * 1024
_RECORDS_MAX = 1000
_BACKLOG_MAX = 10**6
"""Records before the start that are skipped at once."""
_XIDS_MAX = 1000
_DRIVER = Path("/proc/driver/nvidia/version")
"""Exists while the driver is loaded."""
_DRIVER_PATHS = (_DRIVER, Path("/dev/nvidiactl"))
_DRIVER_LOOK_S = 10.0
"""Interval of looks at the driver's paths, on a VM with the library and without a driver."""
_FIX_DEVICES = "give the daemon the device files with swansongd.service.d/gpu.conf"


class GpuSource:
    """Watches all GPUs of this VM.

    Args:
        monotonic: the clock.
        probe: command of the probe.
        kernel_log: path of the kernel log.
        before: the record of the previous life of the daemon in this boot.  The kernel log is read from where
            that life ended; without a record, from the start of this source on.
        blind_after_s: time without a reading after which the source is blind, and the probe is replaced.
    """

    name = SOURCE

    def __init__(
        self,
        *,
        monotonic: Clock,
        probe: Sequence[str] = PROBE,
        kernel_log: Path = KERNEL_LOG,
        blind_after_s: float = BLIND_AFTER_S,
        before: GpuRecord | None = None,
    ) -> None:
        self._monotonic = monotonic
        self._probe = _Probe(probe, monotonic=monotonic, patience_s=blind_after_s)
        self._log = _KernelLog(kernel_log, after=None if before is None else before.log_number)
        self._blind_after_s = blind_after_s
        self._records = GpuRecords(() if before is None else before.gpus)
        self._posted: tuple[GpuStatus, ...] = ()
        self._problem = ""
        """Why the last reading failed."""
        self._absent_with: list[bool] | None = None
        """The driver's paths that exist although NVML finds no driver; None unless NVML finds none."""
        self._notices = GpuNotices()

    def run(self, post: Post, stop: threading.Event) -> None:
        """Watch until ``stop`` is set."""
        health = HealthTracker(
            SOURCE, blind_after_s=self._blind_after_s, monotonic=self._monotonic, post=post
        )
        self._log.open()
        try:
            while not stop.is_set():
                if self._absent_with is not None and _driver_paths() == self._absent_with:
                    stop.wait(_DRIVER_LOOK_S)
                    continue
                self._absent_with = None
                try:
                    self._turn(post, health)
                except Exception as error:
                    health.failed(f"internal error: {error!r:.200}")
                    stop.wait(_TURN_S)
        finally:
            self._probe.end()
            self._log.close()

    def _turn(self, post: Post, health: HealthTracker) -> None:
        self._probe.keep_running()
        fds = [fd for fd in (self._probe.fd, self._log.fd) if fd is not None]
        waiter = select.poll()
        for fd in fds:
            waiter.register(fd, select.POLLIN)
        waiter.poll(_TURN_S * 1000)
        now = self._monotonic()
        for fault in self._log.faults():
            self._records.record_fault(fault, "kernel log", now)
        for line in self._probe.lines():
            self._take(line, health, now)
        if self._probe.is_silent:
            self._problem = "NVML does not respond"
        elif self._probe.failure:
            self._problem = f"NVML cannot be read: {self._probe.failure}"
        if self._problem:
            health.failed(self._problem)
        statuses = self._records.statuses
        if statuses != self._posted:
            self._posted = statuses
            post(GpusRead(statuses, self._log.number))
        for event in self._notices.update(statuses, now):
            post(event)

    def _take(self, line: bytes, health: HealthTracker, now: float) -> None:
        """Use one line of the probe.  A line that is not valid is a failed reading."""
        try:
            facts = parse_line(line)
            if "error" in facts:
                self._take_error(facts, health)
                return
            for fault in _xids(facts):
                self._records.record_fault(fault, "NVML", now)
            if "gpus" in facts:
                self._records.record_readings(parse_gpus(facts["gpus"]), now)
                self._probe.record_reading()
                self._problem = ""
                self._report(health)
        except bounds.BoundsError as error:
            self._problem = f"NVML returned an invalid value: {shortened(str(error), 120)}"

    def _take_error(self, facts: dict[str, object], health: HealthTracker) -> None:
        reason = shortened(str(facts["error"]), 120)
        if facts.get("is_absent") is True and _DRIVER.exists():
            self._problem = f"NVML failed: {reason}; {_FIX_DEVICES}"
        elif facts.get("is_absent") is True and not self._records.statuses:
            self._problem = ""
            health.unsupported(f"no NVIDIA driver: {reason}")
            self._absent_with = _driver_paths()
            self._probe.end()
        else:
            self._problem = f"NVML failed: {reason}"

    def _report(self, health: HealthTracker) -> None:
        count = len(self._records.statuses)
        if not count:
            health.unsupported("the driver lists no GPU")
            return
        second = "" if self._log.fd is not None else "; the kernel log cannot be read"
        health.ok(f"{count} GPU{'s' * (count > 1)}{second}")


def _driver_paths() -> list[bool]:
    """Which of the driver's paths exist.  A device file may be left over from a driver that was removed."""
    return [path.exists() for path in _DRIVER_PATHS]


def _xids(facts: dict[str, object]) -> Iterator[Fault]:
    for row in bounds.items(facts.get("xids", []), "xids", _XIDS_MAX):
        pair = bounds.items(row, "an Xid", 2)
        if len(pair) != 2:
            raise bounds.BoundsError("an Xid has no code")
        code = bounds.integer(pair[1], "an Xid", 0, 2**64 - 1)
        pci = pci_address(bounds.text(pair[0], "pci", 80))
        if pci is not None and code < 10**5:
            yield xid_fault(code, pci)


class GpuNotices:
    """The notices that follow from the health of the GPUs.  At most one is shown at a time."""

    def __init__(self) -> None:
        self._shown: Notice | None = None
        self._failed: set[str] = set()
        self._degraded: set[str] = set()
        self._raised_mono_s: dict[str, float] = {}
        self._may_have_earlier = True
        """Whether a notice of an earlier life of the daemon may still be in force."""

    def update(
        self, gpus: Sequence[GpuStatus], now_mono_s: float
    ) -> Iterator[NoticeRaised | NoticeWithdrawn]:
        """The notices that are new, or over."""
        failed = {gpu.pci: gpu for gpu in gpus if gpu.health.has_failed}
        degraded = {gpu.pci: gpu for gpu in gpus if gpu.health is GpuHealth.DEGRADED}
        newly_failed = [
            gpu
            for pci, gpu in failed.items()
            # An earlier life of the daemon has answered an older failure.
            if pci not in self._failed and now_mono_s < gpu.since_mono_s + FAILED_S
        ]
        self._failed |= failed.keys()
        newly_degraded = [gpu for pci, gpu in degraded.items() if pci not in self._degraded]
        self._degraded = set(degraded)
        shown = self._shown
        is_failing = (
            shown is not None
            and shown.severity is Severity.IMMINENT
            and now_mono_s < shown.deadline_mono_s + _SLACK_S
        )
        if newly_failed and not is_failing:
            yield self._raise(newly_failed[0], now_mono_s)
        elif is_failing:
            return  # the evacuation in progress flushes everything
        elif due := [gpu for gpu in newly_degraded if self._may_raise(gpu, now_mono_s)]:
            self._raised_mono_s[due[0].pci] = now_mono_s
            yield self._raise(due[0], now_mono_s)
        elif (
            not degraded
            and not failed
            and (shown is not None or self._ends_earlier(gpus, now_mono_s))
        ):
            self._shown, self._may_have_earlier = None, False
            yield NoticeWithdrawn(SOURCE, "no GPU is degraded any more")

    def _ends_earlier(self, gpus: Sequence[GpuStatus], now_mono_s: float) -> bool:
        """Whether all GPUs have been healthy for as long as the notice of a failure stays."""
        since_mono_s = max((gpu.since_mono_s for gpu in gpus), default=math.inf)
        return self._may_have_earlier and now_mono_s >= since_mono_s + FAILED_S + _SLACK_S

    def _may_raise(self, gpu: GpuStatus, now_mono_s: float) -> bool:
        last_mono_s = self._raised_mono_s.get(gpu.pci)
        return last_mono_s is None or now_mono_s - last_mono_s >= AGAIN_S

    def _raise(self, gpu: GpuStatus, now_mono_s: float) -> NoticeRaised:
        has_failed = gpu.health.has_failed
        self._shown = Notice(
            source=SOURCE,
            kind=f"gpu-{gpu.health.value}",
            # The same for each health: after a restart a milder notice does not replace a stored one.
            identity=f"{SOURCE}:{gpu.pci}",
            severity=Severity.IMMINENT if has_failed else Severity.ADVISORY,
            deadline_mono_s=gpu.since_mono_s + FAILED_S if has_failed else now_mono_s + DEGRADED_S,
            deadline_quality=DeadlineQuality.ASSUMED,
            detail=shortened(describe(gpu)),
        )
        return NoticeRaised(self._shown)


class _Probe:
    """The process that reads NVML.  It is replaced when it ends, or blocks for too long."""

    def __init__(self, command: Sequence[str], *, monotonic: Clock, patience_s: float) -> None:
        self._command = command
        self._monotonic = monotonic
        self._patience_s = patience_s
        self._backoff = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._heard_mono_s = monotonic()
        self._retry_mono_s = monotonic()
        self._has_printed = False
        self.failure = ""
        """Why the process could not be started, or has ended before it printed a line."""

    @property
    def fd(self) -> int | None:
        """The output of the process; None without one."""
        process = self._process
        return None if process is None or process.stdout is None else process.stdout.fileno()

    @property
    def is_silent(self) -> bool:
        """Whether the process has printed nothing for half of the patience."""
        silent_s = self._monotonic() - self._heard_mono_s
        return self._process is not None and silent_s > self._patience_s / 2

    def keep_running(self) -> None:
        """Start the process when it is due, and kill one that blocks."""
        now = self._monotonic()
        if self._process is not None and now - self._heard_mono_s > self._patience_s:
            self._process.kill()
        if self._process is None and now >= self._retry_mono_s:
            self._start(now)

    def _start(self, now_mono_s: float) -> None:
        self._heard_mono_s, self._has_printed = now_mono_s, False
        try:
            self._process = subprocess.Popen(  # noqa: S603
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
            )
        except OSError as error:  # no memory, process number or file descriptor is free
            self.failure = f"no process: {error.strerror or type(error).__name__}"
            self._retry_mono_s = now_mono_s + self._backoff.next_s()
            return
        self.failure = ""
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def lines(self) -> list[bytes]:
        """Whole lines that the process has printed since the last call."""
        if self.fd is None:
            return []
        try:
            data = os.read(self.fd, 64 * 1024)
        except BlockingIOError:
            return []
        if not data:
            if not self._has_printed and not self.is_silent:
                self.failure = "its process crashes"
            self.end()  # it has closed its output, as it does when it ends
            return []
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        self._buffer = self._buffer[-_BUFFER_MAX_BYTES:]
        if lines:
            self._heard_mono_s, self._has_printed = self._monotonic(), True
        return lines

    def record_reading(self) -> None:
        """A reading was valid: begin with short delays after the next failure."""
        self._backoff.reset()

    def end(self) -> None:
        """Kill the process, and start the next one after a delay.  A call in the kernel may survive that."""
        if self._process is None:
            return
        assert self._process.stdout is not None
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_TURN_S)
        self._process.stdout.close()
        self._process, self._buffer = None, b""
        self._retry_mono_s = self._monotonic() + self._backoff.next_s()


class _KernelLog:
    """The records of the kernel; each read returns one.

    Args:
        path: of the log.
        after: records up to this number are skipped; None, or a number that the log has not reached: all that
            exist at the start.
    """

    def __init__(self, path: Path, *, after: int | None) -> None:
        self._path = path
        self.fd: int | None = None
        self.number = after
        """The number of the last record that was read or skipped."""
        self._missed: list[Fault] = []
        """Faults in the records between ``after`` and the start."""

    def open(self) -> None:
        """Open the log, if this process may read it, and read what it contains."""
        with contextlib.suppress(OSError):
            self.fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        after, newest = self.number, None
        for number, record in self._records(_BACKLOG_MAX):
            newest = number if newest is None else max(newest, number)
            fault = parse_record(record) if after is not None and number > after else None
            if fault is not None and len(self._missed) < _RECORDS_MAX:
                self._missed.append(fault)
        if newest is not None:
            self.number = newest

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def faults(self) -> Iterator[Fault]:
        """The faults in the records since the last call."""
        missed, self._missed = self._missed, []
        yield from missed
        for number, record in self._records(_RECORDS_MAX):
            if self.number is None or number > self.number:
                self.number = number
                fault = parse_record(record)
                if fault is not None:
                    yield fault

    def _records(self, limit: int) -> Iterator[tuple[int, bytes]]:
        """The next records that have a number, and their numbers."""
        for _ in range(limit):
            if self.fd is None:
                return
            try:
                record = os.read(self.fd, RECORD_MAX_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # records were overwritten before they were read
                    continue
                self.close()
                return
            if not record:
                self.close()
                return
            number = record_number(record)
            if number is not None:
                yield number, record
