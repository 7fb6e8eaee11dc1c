# SPDX-License-Identifier: Apache-2.0
"""The source ``gpu`` with the real probe process, a fake NVML library and a kernel log of packets."""

from __future__ import annotations

import errno
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from swansong_bucket.model import GpuHealth, GpuRecord, GpuStatus, Health, Severity
from swansongd.config.config import DeadlineConfig, SourcesConfig
from swansongd.core.events import GpusRead
from swansongd.sources import detect, gpu
from swansongd.sources.gpu import GpuSource
from swansongd.sources.selection import open_sources

from testkit.fake_nvml import FakeNvml, has_compiler
from testkit.source_run import SourceRun
from testkit.waiting import until

BLIND_S = 3.0
QUICK = "from swansongd.sources import nvml; nvml.POLL_S = 0.2; nvml.main()"
PROBE = (sys.executable, "-I", "-c", QUICK)
"""The probe, which reads more often."""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """A library with one healthy GPU, which the probe loads.  A probe that ended is started again soon."""
    if not has_compiler():
        pytest.skip("no C compiler: apt-get install gcc libc6-dev")
    monkeypatch.setattr(gpu, "_RETRY_MAX_S", 0.2)
    fake = FakeNvml(tmp_path)
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    yield fake
    fake.set(hang=0)


class KernelLog:
    """A kernel log of packets: one read returns one record, as in /dev/kmsg."""

    def __init__(self) -> None:
        reads, writes = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
        self.reader, self.writer = os.fdopen(reads, "rb", 0), os.fdopen(writes, "wb", 0)
        self.path = Path(f"/proc/self/fd/{reads}")

    def write(self, record: str) -> None:
        self.writer.write(record.encode())

    def xid(self, number: int, gpu_index: int) -> None:
        """Xid 95 of this GPU, as the record with this number."""
        self.write(f"4,{number},3,-;NVRM: Xid (PCI:0000:0{gpu_index}:00): 95, pid=7, Uncontained\n")


@pytest.fixture
def kernel_log() -> Iterator[KernelLog]:
    made = KernelLog()
    with made.reader, made.writer:
        yield made


HANG = "4,3,3,-;NVRM: Xid (PCI:0000:00:00): 119, pid=7, name=python3, Timeout\n"


def recorded(log_number: int, *gpus: GpuStatus) -> GpuRecord:
    """The record of the last life of the daemon."""
    return GpuRecord(
        gpus=gpus,
        log_number=log_number,
        suspect_starts=(),
        known_starts=(),
        sound_sets=frozenset(),
    )


class Watched(SourceRun):
    """A running source and its newest statuses."""

    def __init__(self, **options: Any) -> None:
        settings: dict[str, Any] = {
            "kernel_log": Path("/nonexistent"),
            "blind_after_s": BLIND_S,
            "probe": PROBE,
        }
        super().__init__(GpuSource(monotonic=time.monotonic, **{**settings, **options}))

    @property
    def gpus(self) -> tuple[GpuStatus, ...]:
        read = [event.gpus for event in self.events if isinstance(event, GpusRead)]
        return read[-1] if read else ()

    def becomes(self, *healths: GpuHealth) -> None:
        until(lambda: tuple(g.health for g in self.gpus) == healths, what=str(healths))


def test_an_xid_event_of_nvml(nvml: FakeNvml) -> None:
    """It arrives without the kernel log, with the address of its GPU."""
    nvml.set(count=2)
    with Watched() as run:
        run.becomes(GpuHealth.OK, GpuHealth.OK)
        run.await_health(Health.OK, "2 GPUs; the kernel log cannot be read")
        nvml.xid(95, gpu=1)
        run.becomes(GpuHealth.OK, GpuHealth.DYING)
        notice = run.await_notice()
        assert (notice.severity, notice.kind) == (Severity.IMMINENT, "gpu-dying")
        assert "GPU 1 is dying: Xid 95" in notice.detail


def test_a_lost_gpu_keeps_its_identity(nvml: FakeNvml) -> None:
    """The driver reports nothing of it any more, and then does not list it."""
    nvml.set(count=2)
    with Watched() as run:
        run.becomes(GpuHealth.OK, GpuHealth.OK)
        nvml.set(gpu=1, lost=1)
        run.becomes(GpuHealth.OK, GpuHealth.LOST)
        assert run.gpus[1].uuid == "GPU-00000001"
        nvml.set(count=1)
        until(lambda: "not list" in run.gpus[1].reason)


@pytest.mark.fault("X04")
def test_the_state_of_the_library_is_read(nvml: FakeNvml) -> None:
    """Pending rows and memory errors; without row remapping an error means that the GPU dies."""
    nvml.set(count=2)
    nvml.set(gpu=1, remaps=0)
    with Watched() as run:
        run.becomes(GpuHealth.OK, GpuHealth.OK)
        nvml.set(gpu=0, pending=1)
        nvml.set(gpu=1, uncorrected=1)
        run.becomes(GpuHealth.DEGRADED, GpuHealth.DYING)


@pytest.mark.fault("X03")
def test_a_library_that_hangs_makes_the_source_blind(nvml: FakeNvml) -> None:
    """The thread of the source continues: it ends in time, and sees the library recover."""
    with Watched() as run:
        run.becomes(GpuHealth.OK)
        nvml.set(hang=1)
        run.await_health(Health.BLIND, "NVML does not respond")
        nvml.set(hang=0)
        run.await_health(Health.OK)


@pytest.mark.fault("X04")
def test_a_library_that_crashes_or_returns_garbage(nvml: FakeNvml) -> None:
    """The probe is started again; the health of the GPUs stays as it was last seen."""
    with Watched() as run:
        run.becomes(GpuHealth.OK)
        nvml.set(crash=1)
        run.await_health(Health.DEGRADED, "crashes")
        nvml.set(crash=0)
        run.await_health(Health.OK)
        endless: dict[str, Any] = {"count": 4_000_000_000}  # which ends the probe
        for garbage, words in (
            (endless, "4000000000 GPUs"),
            ({"0.pci": "somewhere"}, "somewhere"),
            (endless | {"init": 999}, "Unknown Error"),
        ):
            nvml.set(**garbage)
            run.await_health(Health.DEGRADED, words)
            nvml.set(**{"count": 1, "0.pci": "00000000:00:00.0", "init": 0})
            run.await_health(Health.OK)
        assert [g.health for g in run.gpus] == [GpuHealth.OK]
        assert run.notices == []


class Looked:
    """A path of the driver that counts how often it is looked at."""

    def __init__(self) -> None:
        self.looks = 0
        self.is_there = False

    def exists(self) -> bool:
        self.looks += 1
        return self.is_there


def test_a_machine_without_the_driver_starts_the_probe_once(
    nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library of an image for GPUs, on a VM without one, with a device file of an old driver.

    A driver that is loaded later is noticed.
    """
    path, stale, starts = Looked(), Looked(), tmp_path / "starts"
    stale.is_there = True
    monkeypatch.setattr(gpu, "_DRIVER_PATHS", (path, stale))
    monkeypatch.setattr(gpu, "_DRIVER_LOOK_S", 0.01)
    probe = ("/bin/sh", "-c", f"echo started >>{starts}; exec {shlex.join(PROBE)}")
    nvml.set(init=9)
    with Watched(probe=probe) as run:
        run.await_health(Health.UNSUPPORTED, "no NVIDIA driver")
        until(lambda: path.looks > 120, what="more looks than a retry takes")
        assert starts.read_text() == "started\n"
        assert len(run.statuses) == 1
        assert run.gpus == ()
        nvml.set(init=0)
        path.is_there = True
        run.becomes(GpuHealth.OK)


@pytest.mark.fault("X04")
def test_a_probe_that_cannot_be_started_ends_nothing_else(kernel_log: KernelLog) -> None:
    """Without memory for a process the kernel log is read, and the source is not healthy."""
    with Watched(kernel_log=kernel_log.path, probe=("/nonexistent",)) as run:
        run.await_health(Health.DEGRADED, "no process")
        kernel_log.write(HANG)
        run.becomes(GpuHealth.DYING)


@pytest.mark.fault("X04")
def test_attempts_to_start_the_probe_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without memory gets no two attempts a second."""
    now, attempts = [0.0], []

    def refuse(*_: Any, **__: Any) -> None:
        attempts.append(now[0])
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(gpu.subprocess, "Popen", refuse)
    probe = gpu._Probe(PROBE, monotonic=lambda: now[0], patience_s=60.0)
    while now[0] < 600:
        probe.keep_running()
        now[0] += 0.5
    assert 10 < len(attempts) < 35
    assert probe.failure == "no process: Resource temporarily unavailable"


def test_a_driver_whose_device_files_are_hidden(
    nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox of a unit without the drop-in: the source is not healthy, and names the fix."""
    monkeypatch.setattr(gpu, "_DRIVER", tmp_path)
    nvml.set(init=9)
    with Watched() as run:
        run.await_health(Health.DEGRADED, "gpu.conf")


@pytest.mark.fault("X03", "X08")
def test_the_kernel_log_is_read_while_nvml_hangs(nvml: FakeNvml, kernel_log: KernelLog) -> None:
    """Records of the kernel count from the start of the source on."""
    with Watched(kernel_log=kernel_log.path) as run:
        run.becomes(GpuHealth.OK)
        run.await_health(Health.OK, "1 GPU")
        nvml.set(hang=1)
        kernel_log.write("6,1,1,-;eth0: link up\n SUBSYSTEM=net\n")
        kernel_log.write(
            "12,2,2,-;NVRM: Xid (PCI:0000:00:00): 79, pid=1, name=a program wrote it\n"
        )
        kernel_log.write(HANG)
        run.becomes(GpuHealth.DYING)
        assert run.gpus[0].xids == {"dying": 1}
        kernel_log.writer.close()  # the log ends: NVML alone is left
        nvml.set(hang=0)
        run.await_health(Health.OK, "the kernel log cannot be read")


@pytest.mark.fault("X09")
def test_the_kernel_log_is_read_from_where_the_last_life_ended(
    nvml: FakeNvml, kernel_log: KernelLog
) -> None:
    """An Xid of the time without a daemon counts, and an older one is not read again.

    A fault that NVML does not show any more is over.
    """
    nvml.set(count=4)
    kernel_log.xid(7, 0)
    with Watched(kernel_log=kernel_log.path) as run:
        run.becomes(*[GpuHealth.OK] * 4)
        kernel_log.xid(8, 1)
        nvml.set(gpu=2, pending=1)
        run.becomes(GpuHealth.OK, GpuHealth.DYING, GpuHealth.DEGRADED, GpuHealth.OK)
        last = [event for event in run.events if isinstance(event, GpusRead)][-1]
    assert last.log_number == 8
    nvml.set(gpu=2, pending=0)
    for number, gpu_index in ((7, 0), (8, 1), (9, 3)):
        kernel_log.xid(number, gpu_index)
    before = recorded(last.log_number, *last.gpus)
    with Watched(kernel_log=kernel_log.path, before=before) as run:
        run.becomes(GpuHealth.OK, GpuHealth.DYING, GpuHealth.OK, GpuHealth.DYING)


def test_a_record_of_a_number_that_the_log_has_not_reached_silences_nothing(
    nvml: FakeNvml, kernel_log: KernelLog
) -> None:
    """It is damaged: the log is read from the start of the source on, as without a record."""
    nvml.set(count=2)
    kernel_log.xid(7, 0)
    with Watched(kernel_log=kernel_log.path, before=recorded(10**18)) as run:
        run.becomes(GpuHealth.OK, GpuHealth.OK)
        kernel_log.xid(8, 1)
        run.becomes(GpuHealth.OK, GpuHealth.DYING)


def test_without_the_library_there_is_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is loaded, and nothing is started."""
    names = lambda **keys: [  # noqa: E731
        s.name
        for s in open_sources(SourcesConfig(cloud="none", **keys), DeadlineConfig(), boot_id="b")
    ]
    monkeypatch.setattr(detect, "_LIBRARY_DIRECTORIES", ())
    monkeypatch.setattr(detect, "_LOADER_CACHE", tmp_path / "cache")
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}")
    assert names() == []
    (tmp_path / "cache").write_bytes(
        b"glibc-ld.so.cache1.1\0libnvidia-ml.so.1\0/lib/libnvidia-ml.so.1\0"
    )
    assert names() == ["gpu"]
    assert names(gpu="off") == []
    (tmp_path / "cache").unlink()
    (tmp_path / detect.NVML_LIBRARY).touch()
    assert names() == ["gpu"]
