# SPDX-License-Identifier: Apache-2.0
"""systemd's file descriptor store: the next start of the daemon gets back what the last one stored."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from swansong_bucket.model import CheckpointId, GpuFault, GpuHealth, GpuRecord, GpuStatus, Position
from swansongd.host import fdstore, gpu_record
from swansongd.host.fdstore import FdStore
from swansongd.host.sdnotify import SystemdNotifier
from swansongd.host.stored_document import as_slot

from testkit.story import a_notice

SOURCES = {"aws.spot", "logind"}


class Systemd:
    """The other end of NOTIFY_SOCKET, with a descriptor store like systemd's."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self.notifier = SystemdNotifier({"NOTIFY_SOCKET": str(path)})
        self.store: dict[str, int] = {}

    def listen(self) -> dict[str, int]:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 4096, 4)
            except BlockingIOError:
                return self.store
            facts = dict(line.split("=", 1) for line in data.decode().splitlines())
            if "FDSTORE" in facts:
                (self.store[facts["FDNAME"]],) = fds
            elif "FDSTOREREMOVE" in facts and facts["FDNAME"] in self.store:
                os.close(self.store.pop(facts["FDNAME"]))

    def close(self) -> None:
        for fd in self.listen().values():
            os.close(fd)
        self.notifier._socket.close()
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    made = Systemd(tmp_path / "notify")
    yield made
    made.close()


@pytest.fixture
def restart(systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> Callable[[], FdStore]:
    """Starts the daemon again: it inherits the stored descriptors, from the first free number."""

    def start() -> FdStore:
        store = systemd.listen()
        # systemd begins at 3, which is in use in this process: begin behind all open descriptors.
        first = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 1
        monkeypatch.setattr(fdstore, "_FIRST_FD", first)
        for fd, held in enumerate(store.values(), first):
            os.dup2(held, fd)
        return FdStore(
            systemd.notifier,
            {
                "LISTEN_PID": str(os.getpid()),
                "LISTEN_FDS": str(len(store)),
                "LISTEN_FDNAMES": ":".join(store),
            },
        )

    return start


def test_a_start_takes_the_lock_out_of_the_store(
    systemd: Systemd, restart: Callable[[], FdStore]
) -> None:
    """The next daemon gets the newest lock, and from then on only that process holds it."""
    (read_old, old), (read_new, new) = os.pipe(), os.pipe()
    first = FdStore(systemd.notifier, {})
    assert first.lock_fd() is None
    first.store_lock(old)
    first.store_lock(new)
    systemd.listen()
    os.close(old)
    os.close(new)
    assert os.read(read_old, 1) == b""  # no copy of the old lock is open

    second = restart()
    assert fdstore.LOCK not in systemd.listen()  # before the new daemon called lock_fd()
    taken = second.lock_fd()
    assert taken is not None
    assert os.fstat(taken).st_ino == os.fstat(read_new).st_ino
    assert not os.get_inheritable(taken)
    os.close(taken)
    assert os.read(read_new, 1) == b""
    os.close(read_old)
    os.close(read_new)


def test_live_notices_come_back_with_their_deadlines(
    systemd: Systemd, restart: Callable[[], FdStore]
) -> None:
    """The deadlines are the same instants; expired notices and notices of a removed source are dropped."""
    early, late = a_notice(deadline_mono_s=50.0), a_notice("logind", deadline_mono_s=90.0)
    first = FdStore(systemd.notifier, {})
    first.store_notices([early, late])
    second = restart()
    assert second.notices(10.0, SOURCES) == [early, late]
    assert second.notices(60.0, SOURCES) == [late]
    assert second.notices(10.0, {"logind"}) == [late]
    second.store_notices([late])
    third = restart()
    assert third.notices(10.0, SOURCES) == [late]
    third.store_notices([late])
    third.store_notices([])
    assert restart().notices(10.0, SOURCES) == []


def test_a_notice_comes_back_with_the_position_that_is_safe(
    systemd: Systemd, restart: Callable[[], FdStore]
) -> None:
    """SAFE is proved again for that start and step alone."""
    answered = replace(
        a_notice(deadline_mono_s=50.0),
        evacuation_id="e1",
        safe_at=Position("a~1", -1),
    )
    FdStore(systemd.notifier, {}).store_notices([answered])
    assert restart().notices(10.0, SOURCES) == [answered]


def inherit(systemd: Systemd, name: str, content: bytes) -> None:
    """The next start gets this memory."""
    fd = os.memfd_create("x")
    os.write(fd, content)
    systemd.notifier.store(name, fd)
    os.close(fd)


def as_stored(**changes: object) -> bytes:
    facts = {**asdict(a_notice(deadline_mono_s=50.0)), **changes}
    return json.dumps({"boot_id": "", "notices": [facts]}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[{",
        b'[{"source": 1}]',
        b"7",
        b'{"boot_id": "", "notices": [7]}',
        as_stored().replace(b'"boot_id": ""', b'"boot_id": "of another boot"'),
        as_stored(evacuation_id="../x y"),
        as_stored(safe_at=7),
        as_stored(safe_at={"start_id": "../x y", "step": 1}),
        as_stored(safe_at={"start_id": "a", "step": 1.5}),
        as_stored(is_overdue=1),
        as_stored(later_mono_s="soon"),
        as_stored(repeats=["x"] * 1000),
        b"[" * 60_000,
        as_stored(deadline_mono_s=float("nan")),
        as_stored(deadline_mono_s=10**400),
        as_stored(deadline_mono_s="soon"),
        as_stored(severity=17),
        as_stored(source=["aws.spot"]),
        as_stored(detail="x" * 5000),
        as_stored()[:-2] + (b", " + as_stored()[28:-2]) * 64 + b"]}",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_unreadable_notices_are_dropped(
    systemd: Systemd, restart: Callable[[], FdStore], content: bytes
) -> None:
    """Truncated, or of another version: the sources raise their notices again."""
    for data in (content, as_slot(1, content)):
        inherit(systemd, fdstore.NOTICES, data)
        assert restart().notices(0.0, SOURCES) == []


def a_gpu_record() -> GpuRecord:
    fault = GpuFault("xid", GpuHealth.DYING, "Xid 95", 7.0)
    gpu = GpuStatus(
        pci="0000:3b:00",
        index=0,
        uuid="GPU-0",
        name="H100",
        health=GpuHealth.DYING,
        reason="Xid 95",
        since_mono_s=7.0,
        faults=(fault,),
    )
    return GpuRecord(
        gpus=(gpu,),
        log_number=17,
        suspect_starts=("c", "a"),
        known_starts=("b", "a"),
        sound_sets=frozenset({CheckpointId(4, "abc")}),
    )


def test_the_record_of_the_gpus_comes_back(
    systemd: Systemd, restart: Callable[[], FdStore]
) -> None:
    """Over any number of restarts, until it is forgotten."""
    FdStore(systemd.notifier, {}).store_gpus(a_gpu_record())
    for _ in range(2):
        store = restart()
        assert store.gpus() == a_gpu_record()
        store.store_gpus(None)
        store.record_stop()  # systemd itself decides whether the service is stopped
    store.forget_gpus()
    assert restart().gpus() is None


def test_without_systemd_a_stop_ends_the_suspicion(tmp_path: Path) -> None:
    """The file is for a restart after a crash, in the same boot."""

    def start(boot_id: str = "b") -> FdStore:
        store = FdStore(notifier, {}, boot_id=boot_id)
        store.use_directory(own_fd)
        return store

    notifier = SystemdNotifier({})
    own_fd = os.open(tmp_path, os.O_RDONLY)
    start().store_gpus(a_gpu_record())
    assert start("of another boot").gpus() is None
    crashed = start()
    assert crashed.gpus() == a_gpu_record()
    crashed.record_stop()
    assert start().gpus() is None
    os.close(own_fd)
    notifier._socket.close()


@pytest.mark.parametrize("cut_at", [0, 1, 5, 20, 60, 200])
def test_a_write_that_is_cut_short_leaves_the_earlier_value(
    systemd: Systemd,
    restart: Callable[[], FdStore],
    monkeypatch: pytest.MonkeyPatch,
    cut_at: int,
) -> None:
    """The daemon is killed in the middle of a write.  The next one writes to the same place again."""
    write = os.pwrite
    store = FdStore(systemd.notifier, {})
    for number in (1, 2, 3):
        store.store_gpus(replace(a_gpu_record(), log_number=number))

    def is_killed(fd: int, data: bytes, offset: int) -> int:
        write(fd, data[:cut_at], offset)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", is_killed)
    with pytest.raises(KeyboardInterrupt):
        store.store_gpus(replace(a_gpu_record(), log_number=4))
    monkeypatch.setattr(os, "pwrite", write)
    again = restart()
    assert again.gpus() == replace(a_gpu_record(), log_number=3)
    again.store_gpus(replace(a_gpu_record(), log_number=5))
    assert restart().gpus() == replace(a_gpu_record(), log_number=5)


@pytest.mark.fault("D02")
def test_a_write_that_failed_is_repeated(
    systemd: Systemd, restart: Callable[[], FdStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was no memory for it.  The log has one line, however often it fails."""
    store = FdStore(systemd.notifier, {})
    store.store_gpus(a_gpu_record())
    newer = replace(a_gpu_record(), log_number=18)

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no memory")

    with monkeypatch.context() as patched, capture_logs() as lines:
        patched.setattr(os, "pwrite", fail)
        store.store_gpus(newer)
        store.store_gpus(newer)
    assert [line["event"] for line in lines] == ["state_not_stored"]
    assert restart().gpus() == a_gpu_record()
    store.store_gpus(newer)
    assert restart().gpus() == newer


def with_gpu(**changes: object) -> dict[str, object]:
    facts = gpu_record.RECORD.write(a_gpu_record())
    return {**facts, "gpus": [{**facts["gpus"][0], **changes}]}


@pytest.mark.parametrize(
    "changes",
    [
        {"gpus": 7},
        {"gpus": [7]},
        {"gpus": [{}]},
        with_gpu(health="tired"),
        with_gpu(health=[]),
        with_gpu(index="0"),
        with_gpu(name="x" * 5000),
        with_gpu(since_mono_s=1e300),
        with_gpu(faults=[{}]),
        with_gpu(faults=[[]] * 100),
        {"log_number": -1},
        {"log_number": "last"},
        {"suspect_starts": ["../ x"]},
        {"known_starts": ["x"] * 1000},
        {"sound_sets": [[3]]},
        {"sound_sets": [[3, 4]]},
    ],
    ids=lambda changes: repr(changes)[:40],
)
def test_a_damaged_record_of_the_gpus_is_ignored(
    systemd: Systemd, restart: Callable[[], FdStore], changes: dict[str, object]
) -> None:
    """The daemon starts as on a new boot, and logs the reason."""
    facts = {"boot_id": "", **gpu_record.RECORD.write(a_gpu_record()), **changes}
    inherit(systemd, fdstore.GPUS, as_slot(1, json.dumps(facts).encode()))
    with capture_logs() as lines:
        assert restart().gpus() is None
    assert [(line["event"], line["what"]) for line in lines] == [("stored_state_ignored", "gpus")]


@pytest.mark.parametrize("count", ["", "-1", "many", "99"])
def test_a_wrong_number_of_descriptors_does_not_prevent_the_start(
    systemd: Systemd, count: str
) -> None:
    """No descriptor is used then."""
    facts = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": count, "LISTEN_FDNAMES": "a:b"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fdstore, "_FIRST_FD", 1_000_000)  # not open
        assert FdStore(systemd.notifier, facts).lock_fd() is None


def test_the_listener_is_used_only_at_its_path(
    systemd: Systemd, restart: Callable[[], FdStore], tmp_path: Path
) -> None:
    """A connection made between two daemons waits in the backlog; a listener of another path is closed."""
    path = tmp_path / "trainer.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        FdStore(systemd.notifier, {}).store_listener(listener.fileno())
        systemd.listen()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(path))
        fd = restart().listener_fd(path)
        assert fd is not None
        with socket.socket(fileno=fd) as adopted:
            adopted.accept()[0].close()

    assert restart().listener_fd(tmp_path / "other.sock") is None
    assert fdstore.LISTENER not in systemd.listen()


def test_descriptors_of_another_process_are_ignored(systemd: Systemd) -> None:
    """LISTEN_PID names the process that they were passed to."""
    others = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": fdstore.LOCK}
    assert FdStore(systemd.notifier, others).lock_fd() is None
