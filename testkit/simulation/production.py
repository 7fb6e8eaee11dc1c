# SPDX-License-Identifier: Apache-2.0
"""The production daemon and the production hooks in a simulated world.  A seed determines everything.

A run has one VM after the other.  Each VM has a daemon, :class:`swansongd.service.service.Service` with all
its threads, and a trainer with a guard of :func:`swansong.attach`.  Daemons and trainers are killed, store
requests fail, replies are lost, disks return errors, notices arrive and VMs end.  A VM may also freeze and
continue while the next one runs.  The store, the cloud and the training are simulated.

A process that a disk error ends is started again, as by systemd and by the supervisor of the training.  A VM
may lose its power and boot again with its disk (:mod:`testkit.simulation.disk`), and has the metadata service
of a cloud (:mod:`testkit.simulation.metadata`), which fails and withdraws notices.

Some runs have a mirror, retention in the daemon, or a handover.  Kills, power cuts and freezes often come
right after an event, such as a seal or a manifest (:meth:`World.happens`).  Promises that always hold
are checked at the instant: a sealed set is durable, a committed step is inherited, a pruned store is whole.

:mod:`testkit.simulation.production_job` runs jobs of several VMs and ranks in the same world.  Not covered:
inotify, and what needs real processes.

``python -m testkit.simulation play production FIRST COUNT`` runs these seeds.  With
``SWANSONG_SIMULATION_LOG=1`` it prints the log of the daemons.
"""

from __future__ import annotations

import codecs
import errno
import gc
import hashlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import swansong
import swansong.guard
from swansong import RestoreError, openat
from swansong._checkpoint import saver, staging
from swansong_bucket.errors import SwansongError, Transient
from swansong_bucket.format import farewell as farewells
from swansong_bucket.format import wall
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CommitRef, DeadlineQuality, Notice, Severity
from swansong_bucket.runs import catalog, commit
from swansong_bucket.runs.history import newness
from swansong_bucket.stores import base, checksums
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.transfer import target
from swansongd.config.config import parse
from swansongd.core import staged_sets, starts
from swansongd.core.events import NoticeRaised
from swansongd.core.transition import EXIT_STOPPED
from swansongd.flush.pruner import Pruner
from swansongd.restore import predecessor
from swansongd.service import signal_reader, storage
from swansongd.service.service import Service
from swansongd.sources import host, metadata
from swansongd.staging import prepare
from swansongd.staging.observe import StagingObserver
from swansongd.trainers import peers
from swansongd.trainers.connection import PeerConnection
from swansongd.trainers.peers import Peer
from swansongd.util import boot

from testkit.emulators import aws_imds, gcp_metadata
from testkit.memory_store import MemoryStore
from testkit.simulation import disk, schedule
from testkit.simulation.disk import Disk
from testkit.simulation.metadata import EMULATORS, Cloud

checksums.load()
for _encoding in (
    "utf-16",
    "utf-16-be",
    "utf-16-le",
    "utf-32",
    "utf-32-be",
    "utf-32-le",
    "utf-8-sig",
):
    codecs.lookup(_encoding)  # of JSON
RUN = "run"
PID = 5_000_000
"""The process of a trainer and of the daemon.  A real one, which is smaller, differs from run to run."""
FILES = ("weights.bin", "optimizer.bin")
CONSTANT = "vocabulary.txt"
"""A file that is the same in all checkpoints."""
FILE_BYTES = 3000
WINDOW_BYTES = 1024
"""A file has several windows of a download."""
SHORT_SHARE = 0.05
"""Share of the calls that read or write fewer bytes than they could."""
CLOCK_STEPS_S = (-3600.0, -60.0, -2.0, 2.0, 60.0, 3600.0)
DISK_ERRORS = {
    errno.EIO: {
        *("open", "dup", "stat", "listdir", "scandir", "pread", "preadv"),
        *("write", "pwrite", "fsync", "ftruncate", "rename", "mkdir", "unlink", "rmdir"),
    },
    errno.ENOSPC: {"open", "write", "pwrite", "fsync", "ftruncate", "mkdir"},
    errno.EMFILE: {"open", "dup", "listdir", "scandir"},
}
"""The functions of :mod:`os` that fail with each error."""
MOMENTS = (
    *("sealed", "sealed", "sealed", "rename", "verdict", "notice", "resumed"),
    *("before commits", "after commits", "after data", "after data"),
)
"""Events right after which the world is disturbed."""
LAST = 9
"""Number of the last VM of each run."""
CLAIMS = ("before generations", "after generations")
MOMENT_S = 0.05
"""The thread of a moment waits for this time, so that no later call follows before the disturbance."""
SILENCE_S = 60.0
"""Longest time for which a VM waits for a silent one before it, in place of 15 minutes."""
TURN_S = 2.0
"""Longest turn of a decision loop: it waits for an event for at most a second."""
STOPPED_S = 5.5
"""Longest time from a stop request to the end of the daemon: the reserve, 2 s, and a turn of 0.5 s."""
TOLD_S = 1.5
"""Without faults, the next VM of a handover has read a farewell this long after it was written."""
AGEING = 200
"""With retention, one second of the clock ages objects by this number of seconds."""


def content(line: str, step: int, name: str, rank: int = 0) -> bytes:
    """The bytes of a file of a checkpoint.  Each block depends on the arguments, or is constant.

    Args:
        line: one start of the training, with its VM.
    """
    if name == CONSTANT:
        line, step, rank = "", 0, 0
    word = hashlib.sha256(f"{line}:{step}:{rank}:{name}".encode()).digest()
    return (f"{line}:{step}:".encode() + word * (FILE_BYTES // len(word)))[:FILE_BYTES]


@dataclass
class Training:
    """A training whose only state is its line and its step."""

    world: World
    line: str = ""
    step: int = 0
    rank: int = 0

    def save(self, directory: Path) -> None:
        for name in (*FILES, CONSTANT):
            self.world.schedule.sleep(self.world.random.random() * 0.2)
            with openat.held(os.open(directory / name, os.O_WRONLY | os.O_CREAT, 0o640)) as fd:
                openat.write_all(fd, content(self.line, self.step, name, self.rank))

    def load(self, directory: Path) -> None:
        for name in (*FILES, CONSTANT):
            with openat.held(os.open(directory / name, os.O_RDONLY)) as fd:
                data = os.pread(fd, 2 * FILE_BYTES, 0)
            if name in FILES:
                line, step, _ = data.split(b":", 2)
                self.line, self.step = line.decode(), int(step)
            if data != content(self.line, self.step, name, self.rank):
                self.world.problems.append(f"a torn checkpoint was loaded: {name} of {directory}")


class Vm:
    """A VM with its staging directory, its daemon and its trainer."""

    clouds: tuple[str, ...] = (*EMULATORS, "none", "none", "none")

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.name = f"vm{number}"
        self.directory = world.directory / self.name
        self.directory.mkdir()
        self.boot_id = f"{number:08}-0000-0000-0000-000000000000"
        clouds = self.clouds[: len(EMULATORS)] if number == LAST else self.clouds
        kind = world.random.choice(clouds)
        self.cloud = None if kind == "none" else Cloud(self, kind)
        self.config = parse(
            {
                **world.options,
                "run": {"name": RUN, "handover": "handover" in world.features},
                "staging": {"path": str(self.directory / "staging")},
                "store": {"url": "s3://bucket"},
                "sources": {"cloud": kind, "gpu": "off", "system_bus": "unix:path=/nonexistent"},
                "trainer": {"socket": str(self.directory / "s"), "users": list(world.users)},
                "flush": {"connections": 2},
                "metrics": {},
            }
        )
        (self.directory / "staging").mkdir()
        self.disk = Disk(self.directory / "staging")
        self.booted_wall_s = world.schedule.wall_s
        self.sealed: tuple[str, int] | None = None
        """Line and step of the newest set that was sealed and synced since the last resume."""
        self.unsynced = 0
        """Number of newer sets that are not synced."""
        self.daemons = self.trainers = 0
        self.is_on, self.is_frozen = True, False
        self.daemon_runs = self.trainer_runs = False
        self.service: Service | None = None
        self.guard: Any = None
        self.training: Training | None = None
        self.predecessor: Vm | None = None
        """The VM from which this one takes over in a handover."""
        self.has_trained = False
        """Whether a start of this boot has trained.  Until then, its claim takes the run over."""
        self.lines = f"{self.name}-"
        """Beginning of the names of the lines that this VM trains."""
        self.safes = 0
        """Number of verdicts SAFE of this VM."""
        self.floor: int | None = None
        """Step that the training had completed at the notice.  SAFE needs this step or a later one."""
        self.is_ending = False
        """Whether training ends after this step."""
        self.stop_asked_s = 0.0
        """Time of the last stop request to the daemon."""
        self.evacuation_id = ""
        """The evacuation that the floor is of; a restarted daemon continues it."""
        self.lifeline = -1
        """Writing end of a pipe that takes the place of the trainer's pidfd."""
        self.lifeline_read = -1
        self.disk_error = 0
        self.disk_error_share = 0.0
        """Share of the calls that fail with ``disk_error`` ..."""
        self.disk_good_at_s = 0.0
        """... until this time."""

    def spoil_disk(self, seconds: float) -> None:
        random = self.world.random
        self.disk_error = random.choice(sorted(DISK_ERRORS))
        self.disk_error_share = random.choice([0.02, 0.3, 1.0])
        self.disk_good_at_s = self.world.schedule.now_s + seconds

    def fails(self, call: str, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether this call on a file in staging fails now."""
        if self.world.schedule.now_s >= self.disk_good_at_s:
            return False
        if call not in DISK_ERRORS[self.disk_error]:
            return False
        if self.disk_error == errno.ENOSPC and call == "open" and not args[1] & os.O_CREAT:
            return False
        if self.world.random.random() >= self.disk_error_share:
            return False
        place = options.get("dir_fd") or options.get("src_dir_fd") or args[0]
        path = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else os.fspath(place)
        return path.startswith(str(self.directory / "staging"))

    # ------------------------------------------------------------ the daemon

    def start_daemon(self) -> None:
        if self.daemon_runs:
            return
        self.daemon_runs = True
        self.daemons += 1
        self.world.schedule.start(
            self._serve, group=f"{self.name}-daemon-{self.daemons}", name="loop"
        )

    def _serve(self) -> None:
        try:
            self.service = Service(self.config)
            if self.service.run() == EXIT_STOPPED:  # by the operator, who starts it again
                self.world.stopped(self)
                self._restart("daemon", None, self.kill_daemon, self.start_daemon)
        except (OSError, SwansongError) as error:
            self._restart("daemon", error, self.kill_daemon, self.start_daemon)

    def _restart(
        self,
        what: str,
        error: Exception | None,
        kill: Callable[[], None],
        start: Callable[[], None],
    ) -> None:
        """The current process ends, perhaps with an error, and starts again."""
        if error is not None and not self.disk_good_at_s and not self.world.may_end(what):
            raise error
        self.world.count(f"{what} ended" + (" by an error" if error else ""))

        def restart() -> None:
            kill()
            self.world.schedule.sleep(self.world.restart_s)
            if self.is_on:
                start()

        self.world.schedule.start(restart, group=f"{self.name}-supervisor", name=what)

    def kill_daemon(self) -> None:
        self.daemon_runs = False
        self.world.schedule.kill(f"{self.name}-daemon-{self.daemons}")
        service, self.service = self.service, None
        if service is None:
            return
        if self.cloud is not None:
            self.cloud.disconnect()
        os.close(service._staging.own_fd)
        channel = service._channel
        for connection in channel._connections.values():
            if connection.socket is not None:
                connection.socket.close()
        if hasattr(channel, "_listener"):
            channel._listener.close()

    # ------------------------------------------------------------ the trainer

    def start_trainer(self) -> None:
        if self.trainer_runs:
            return
        self.trainer_runs = True
        self.trainers += 1
        self.lifeline_read, self.lifeline = os.pipe()
        self.world.schedule.start(
            self._train, group=f"{self.name}-trainer-{self.trainers}", name="training"
        )

    def _train(self) -> None:
        try:
            self._train_on()
            self._restart("trainer", None, self.kill_trainer, self.start_trainer)
        except (OSError, RestoreError) as error:
            self._restart("trainer", error, self.kill_trainer, self.start_trainer)

    def _train_on(self) -> None:
        world = self.world
        path = self.directory / "s"
        world.schedule.wait(lambda: os.path.lexists(path), None)  # as swansong-ready@.service
        training = self.training = world.new_training()
        with_every = world.random.choice([None, 5])
        guard = self.guard = swansong.attach(
            save=training.save,
            load=training.load,
            socket=str(path),
            every_steps=with_every,
        )
        with world.schedule.outside():
            before = world.read_back()
        restored = guard.restore()
        world.resumed(self, f"{self.lines}{self.trainers:03}", training.line, restored, before)
        world.happens("resumed")
        training.line = f"{self.lines}{self.trainers:03}"
        training.step = restored
        self.is_ending = False
        while not self.is_ending:
            world.schedule.sleep(world.random.uniform(0.05, 0.4))
            training.step += 1
            world.trained(training)
            guard.step(training.step)
        if guard.finish(20):
            with world.schedule.outside():
                world.check_kept("finished", training.line, training.step, *world.read_back())

    def kill_trainer(self) -> None:
        self.trainer_runs = False
        self.world.schedule.kill(f"{self.name}-trainer-{self.trainers}")
        self.training = self.floor = None
        guard, self.guard = self.guard, None
        forget(guard)
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1

    def cut_power(self) -> None:
        """Lose the power; the VM can boot again with the disk of staging."""
        world = self.world
        world.schedule.kill(f"{self.name}-supervisor")
        self.kill_trainer()
        self.kill_daemon()
        (self.directory / "s").unlink(missing_ok=True)
        with world.schedule.outside():
            self.disk.cut(world.random, world.schedule.wall_s)
            if world.random.random() < 0.2:
                self.sealed = None
                disk.spoil_own_files(self.disk.root, world.random)
        self.has_trained = False
        self.boot_id = f"{int(self.boot_id[:8]) + 100:08}{self.boot_id[8:]}"
        # The clock of a new boot may be wrong while the daemon starts.
        self.booted_wall_s = world.schedule.wall_s + world.random.choice([0.0, 0.0, -60.0, 60.0])

    def power_off(self) -> None:
        self.is_on = False
        self.world.schedule.kill(f"{self.name}-metadata")
        self.kill_trainer()
        self.kill_daemon()
        shutil.rmtree(self.directory)


def forget(guard: Any) -> None:
    """The process of a guard, if there is one, was killed."""
    if guard is not None:
        swansong.guard._guards.discard(guard)
        if guard._session.channel._socket is not None:
            guard._session.channel._socket.close()


def _short(data: Any) -> Any:
    """The first half of some bytes, or of the only buffer in a list."""
    if isinstance(data, list):
        return [_short(memoryview(data[0]))]
    return data[: max(1, len(data) // 2)]


class _Entries(list[Any]):
    """The result of ``os.scandir``."""

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class World:
    """The store, the VMs, and what really happened.

    Args:
        seed: determines all decisions.
        directory: empty directory for the VMs.
    """

    users: tuple[int, ...] = (os.geteuid(),)
    """``trainer.users`` of the daemons."""
    restart_s = 1.0
    """Time until a process that has ended is started again."""
    all_features: tuple[str, ...] = ("handover", "mirror", "retention")
    """Features that a run may have configured."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.schedule = schedule.Schedule(seed)
        self.random = self.schedule.random
        self.directory = directory
        self.features = {each for each in self.all_features if self.random.random() < 0.35}
        self.awaited = ""
        """The moment for which the main thread waits, to disturb the world then."""
        self.store = self._new_store("s3://bucket")
        self.mirror = self._new_store("s3://mirror") if "mirror" in self.features else None
        self.fault_share = 0.0
        self.mirror_fault_share = self.random.choice([0.0, 0.2, 1.0])
        self.vms: dict[str, Vm] = {}
        self.promised = 0
        """The newest step that a verdict SAFE was about."""
        self.steps: dict[str, int] = {}
        """The newest step of each line."""
        self.ranks: dict[str, int] = {}
        """The number of ranks of each line that has several."""
        self.parents: dict[str, tuple[str, int]] = {}
        """The line and the step that each line has resumed from."""
        self.claimed = 0
        """The newest generation that a daemon has claimed."""
        self.problems: list[str] = []
        self.counts: dict[str, int] = {}

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def new_training(self) -> Training:
        return Training(self)

    def may_end(self, what: str) -> bool:
        """Whether a daemon or a trainer may end with an error although its disk is sound."""
        del what
        return False

    @property
    def options(self) -> dict[str, Any]:
        """Sections of the configuration."""
        found: dict[str, Any] = {}
        if self.mirror is not None:
            found["mirror"] = {"url": self.mirror.url}
        if "retention" in self.features:
            periods = {f"keep_{name}": 0 for name in ("hourly", "daily", "weekly", "best")}
            ages = {"keep_last": 1, "keep_within_s": 3600, "keep_starts_s": 3600}
            found["retention"] = {"in_daemon": True, **periods, **ages}
        return found

    # ------------------------------------------------------------ moments

    def happens(self, moment: str) -> None:
        """Stand still for a short time, if the main thread waits for this moment."""
        if moment == self.awaited and self.schedule.current.group != "world":
            self.awaited = ""
            self.count("moment")
            self.schedule.sleep(MOMENT_S)

    def await_moment(self, moments: tuple[str, ...] = MOMENTS, limit_s: float = 6.0) -> bool:
        """Wait until one of these moments comes; False if it does not come in time."""
        self.awaited = self.random.choice(moments)
        has_come = self.schedule.wait(lambda: not self.awaited, limit_s)
        self.awaited = ""
        return has_come

    # ------------------------------------------------------------ the store

    def _new_store(self, url: str) -> MemoryStore:
        store = MemoryStore()
        store.url = url
        store.before = lambda what, key: self._before(store, what, key)
        store.after = lambda what, key: self._after(store, what, key)
        ageing = AGEING if "retention" in self.features else 1
        store.clock = lambda: self.schedule.wall_s * ageing
        return store

    def _share(self, store: MemoryStore) -> float:
        """Share of the requests to a store that fail now."""
        if self.schedule.current.group == "world":
            return 0.0
        return self.mirror_fault_share if store is self.mirror else self.fault_share

    def stores(self) -> tuple[ObjectStore, ObjectStore, ObjectStore | None]:
        """The results of ``storage.open_stores``."""
        return self.store, self.store, self.mirror

    def _before(self, store: MemoryStore, what: str, key: str) -> None:
        self.schedule.sleep(self.random.uniform(0.005, 0.1))
        if self.random.random() < self._share(store):
            self.count("store failed")
            raise Transient(f"{what}: 503")
        if what in {"create", "put"}:
            self.happens(f"before {key.split('/')[1]}")

    def _after(self, store: MemoryStore, what: str, key: str) -> None:
        generation = RunKeys(RUN).parse_generation(key) if store is self.store else None
        if generation is not None and what != "get":
            self._check_claim(what, generation)
        if what in {"create", "put"}:
            if store is self.mirror and "/commits/" in key:
                with self.schedule.outside():
                    self.read_back(store)  # a commit of the mirror is whole at once
            self.happens(f"after {key.split('/')[1]}")
        self.schedule.sleep(self.random.uniform(0.0, 0.05))
        if self.random.random() < self._share(store) / 2:
            self.count("reply lost")
            raise Transient(f"{what}: the reply is lost")

    # ------------------------------------------------------------ the disk

    def on_disk(self, call: str) -> Callable[..., Any]:
        """A function of :mod:`os` that may fail, and before which the thread may change."""
        real = getattr(os, call)

        def replaced(*args: Any, **options: Any) -> Any:
            current = self.schedule.current
            if schedule.active() is None or current.group == "world":
                return real(*args, **options)
            if call != "mkdir":  # the umask may be changed here
                self.schedule.switch_at_lock()
            vm = self.vm
            if vm.fails(call, args, options):
                self.count(f"disk: {errno.errorcode[vm.disk_error]}")
                raise OSError(vm.disk_error, os.strerror(vm.disk_error))
            if call in {"write", "pwrite", "preadv"} and self.random.random() < SHORT_SHARE:
                args = (args[0], _short(args[1]), *args[2:])
            with self.schedule.outside():
                result = vm.disk.carry_out(call, real, args, options)
                if call in {"write", "pwrite"}:
                    with suppress(OSError):  # not a file
                        os.utime(args[0], (self.schedule.wall_s,) * 2)
            if call == "rename":
                self.happens(call)
            if call == "scandir":
                result = _Entries(result)
            if call in {"listdir", "scandir"}:
                result.sort(key=lambda entry: getattr(entry, "name", entry))
                self.random.shuffle(result)
            return result

        return replaced

    def connect(self, _url: str, _end_mono_s: float) -> Any:
        assert self.vm.cloud is not None
        return self.vm.cloud.connect()

    def sync_disk(self, _: int) -> None:
        if schedule.active() is None:  # a tool outside of the VMs
            return
        with self.schedule.outside():
            self.vm.disk.sync_all()

    # ------------------------------------------------------------ what must hold

    def identify(self, connected: Any) -> Peer:
        """The process at the other end of a socket that the daemon of the current thread has accepted."""
        del connected
        return Peer(PID, os.geteuid(), os.getegid(), os.dup(self.vm.lifeline_read))

    @property
    def vm(self) -> Vm:
        """The VM of the current thread."""
        return self.vms[self.schedule.current.group.partition("-")[0]]

    def sealing(self, directory: str, nonce: str, manifest: Any, save: Any) -> staging.Written:
        """Write a checkpoint, and note whether it must survive a power cut."""
        vm, training = self.vm, self.vm.training
        written = staging.write_checkpoint(directory, nonce, manifest, save)
        if written.is_sealed and training is not None:
            vm.unsynced += 1
            if manifest.kind != "emergency":
                vm.sealed, vm.unsynced = (training.line, manifest.step), 0
                self.expect_durable(vm, Path(directory, written.directory))
            elif vm.unsynced == staged_sets.NEWEST:
                vm.sealed = None  # the daemon may drop a set that these supersede
            self.happens("sealed")
        return written

    def expect_durable(self, vm: Vm, directory: Path) -> None:
        """No power cut loses or tears this sealed set."""
        with self.schedule.outside():
            at_risk = vm.disk.at_risk(directory)
        if at_risk:
            self.problems.append(f"a power cut may lose or tear {at_risk}")

    def _check_claim(self, what: str, generation: int) -> None:
        """I3: generations only grow, and no claim is deleted."""
        if what not in {"create", "put"} or generation <= self.claimed:
            self.problems.append(f"{what} of the claim {generation} after {self.claimed}")
        self.claimed = generation
        self._check_handover(self.vms.get(self.schedule.current.group.partition("-")[0]))

    def _check_handover(self, vm: Vm | None) -> None:
        """Without faults, no VM claims before its predecessor has ended, or the deadline in its farewell."""
        before = None if vm is None else vm.predecessor
        if before is None or self.fault_share or any(self.schedule.skews_s.values()):
            return
        stored = (data for key, data in self.store.objects.items() if "/farewells/" in key)
        found = map(farewells.decode, stored)
        own = (each for each in found if each.evacuation_id == before.evacuation_id)
        last = max(own, key=newness, default=None)
        if last is None or last.is_ended or last.deadline_s is None:
            return
        end_wall_s = last.opened_wall_s + last.deadline_s
        if last.written_wall_s + TOLD_S < self.schedule.wall_s < end_wall_s:
            self.problems.append(f"{self.vm.name} claims while {before.name} may still commit")

    def turned(self, service: Service, turn: Callable[[Service], None]) -> None:
        """V2: a turn of the decision loop waits for an event, and never blocks longer than a second."""
        vm, begun_s = self.vm, self.schedule.now_s
        turn(service)
        took_s = self.schedule.now_s - begun_s
        if took_s > TURN_S and self.schedule.frozen_s < begun_s:
            self.problems.append(f"a turn of the decision loop of {vm.name} took {took_s:.1f} s")

    def stopped(self, vm: Vm) -> None:
        """V5: a daemon ends soon after a stop request, whatever the store and the trainer do."""
        took_s = self.schedule.now_s - vm.stop_asked_s
        if took_s > STOPPED_S and self.schedule.frozen_s < vm.stop_asked_s:
            self.problems.append(f"the daemon of {vm.name} took {took_s:.1f} s to stop")

    def process_start(self, peer: Peer) -> int:
        return 0 if select.select([peer.pidfd], [], [], 0)[0] else self.began_ticks

    @property
    def began_ticks(self) -> int:
        """When the process of the trainer began; see :func:`swansong._ranks.position.own_process`."""
        return 1000 + self.vm.trainers

    def trained(self, training: Training) -> None:
        self.steps[training.line] = max(training.step, self.steps.get(training.line, 0))

    def resumed(self, vm: Vm, own: str, line: str, step: int, before: tuple[str, int]) -> None:
        """Check a resume: its state is not older than the newest commit ``before`` the trainer asked.

        Args:
            own: the line that begins.
            line: the line that it continues from this step.
        """
        self.count("resumed" if step else "began")
        vm.has_trained = True
        self.parents[own] = (line, step)
        if step and self.steps.get(line, -1) < step:
            self.problems.append(f"{own} resumed from step {step} of {line}, which never existed")
        if not self._is_overtaken(line, *before):
            self.check_kept("committed", *before, line, step)
        if vm.sealed and vm is list(self.vms.values())[-1] and not vm.disk_good_at_s:
            self.check_kept("sealed", *vm.sealed, line, step)
        vm.sealed = None
        if step < self.promised:
            self.problems.append(f"{own} resumed from step {step}, but {self.promised} was SAFE")

    def check_kept(self, what: str, earlier: str, earlier_step: int, line: str, step: int) -> None:
        """Check that a state continues an earlier one, which was committed, sealed or finished."""
        if earlier_step and not self._continues(line, step, earlier, earlier_step):
            self.problems.append(
                f"step {step} of {line} is the newest, but step {earlier_step} of {earlier} was {what}"
            )

    def log(self, event: dict[str, Any]) -> None:
        if os.environ.get("SWANSONG_SIMULATION_LOG"):
            place = {"at": round(self.schedule.now_s, 3), "of": self.schedule.current.group}
            print(json.dumps(place | event, default=str), file=sys.stderr)
        if event["event"] == "verdict":
            self.count(str(event.get("verdict")))
            if event.get("verdict") == "LOST":
                with self.schedule.outside():
                    newest = self.newest()
                if newest is not None:
                    self.problems.append(f"LOST, but the store has {newest}: {event}")
            if event.get("verdict") == "SAFE":
                self.vm.safes += 1
                self._judge(event)
            self.happens("verdict")
        if event.get("phase") == "notice" and event["id"] != self.vm.evacuation_id:
            self._note_floor(self.vm, event["id"])
            self.happens("notice")
        # The tools log, too, on no VM.
        if self.schedule.current.group != "world" and self.vm.cloud is not None:
            self.vm.cloud.check_log(event)
        if event["event"] == "committed":
            said = f"{event['generation']} step {event['step']} is committed"
            self._expect_inherited(said, event["generation"], event["step"])
        if event["event"] == "bucket_pruned":
            with self.schedule.outside():
                self._expect_stored()
        if event["event"].endswith("_fault"):
            self.problems.append(f"{event}\n{traceback.format_exc()}")

    def _judge(self, event: dict[str, Any]) -> None:
        """Check a verdict SAFE: a new reader must find that state, which is not older than the notice."""
        with self.schedule.outside():
            line, step = self.read_back()
            newest = self.newest()
        said_generation, said_step = event["generation"], event["step"]
        said = f"SAFE for generation {said_generation} step {said_step}"
        # The next commit of the same start may have come an instant before the verdict.
        is_kept = newest is not None and newest.generation == said_generation
        is_kept = is_kept and said_step <= step
        is_overtaken = newest is not None and newest.generation > said_generation
        own = self.vm.lines
        self._expect_inherited(said, said_generation, said_step)
        if not is_kept and not (is_overtaken and self._continues(line, step, own, said_step)):
            self.problems.append(f"{said}, but the newest is {newest} with step {step} of {line}")
        if self.steps.get(line, -1) < step:
            self.problems.append(f"{said}, but step {step} of {line} never existed")
        floor = self.vm.floor
        if floor is not None and said_step < floor:
            self.problems.append(f"{said}, but training was at step {floor} at the notice")
        self.promised = max(self.promised, said_step)

    def _expect_inherited(self, said: str, generation: int, step: int) -> None:
        """A VM that has resumed by now continues from this step, which this VM has committed.

        Unless this VM has the newest claim: then the other one was overtaken before it had resumed.
        """
        with self.schedule.outside():
            keys = RunKeys(RUN)  # a foreign object below the claims is not one of them
            listed = catalog.listing(
                self._calm(self.store), keys.generations, keys.parse_generation
            )
        if generation == max(number for _, number in listed.newest):
            return
        own, last = self.vm.lines, next(reversed(self.parents), "")
        is_known = self.vm.has_trained and any(line.startswith(own) for line in self.parents)
        is_of_other = is_known and not last.startswith(own)
        if is_of_other and not self._continues(last, 0, own, step):
            self.problems.append(f"{said}, but {last} has resumed from {self.parents[last]}")

    def _expect_stored(self) -> None:
        """After a prune, each commit of the newest generation has its data."""
        store, keys = self._calm(self.store), RunKeys(RUN)
        for found in catalog.list_commits(store, keys):
            if found.ref.generation < max(catalog.claimed(store, keys)):
                return
            for made in catalog.load(store, keys, found):
                lost = [chunk.key for chunk in made.chunks if chunk.key not in self.store.objects]
                if lost:
                    self.problems.append(f"a prune has deleted {lost} of {found.ref}")

    def _continues(self, line: str, step: int, earlier: str, earlier_step: int) -> bool:
        """Whether a line has resumed from this step of an earlier one, or of a VM, or from a later step."""
        while not line.startswith(earlier):
            if line not in self.parents:
                return False
            line, step = self.parents[line]
        return step >= earlier_step

    def _is_overtaken(self, line: str, earlier: str, earlier_step: int) -> bool:
        """Whether the commit of this step came after another VM had resumed an earlier step of that line.

        Its VM was frozen in the request.  The resume was checked against the commits of its time.
        """
        while line in self.parents:
            line, step = self.parents[line]
            if line.startswith(earlier) and step < earlier_step:
                return bool(earlier)
        return False

    def newest(self) -> CommitRef | None:
        found = commit.newest_whole(self._calm(self.store), RunKeys(RUN))
        return None if found is None else found.ref

    def _calm(self, store: MemoryStore) -> ObjectStore:
        calm = MemoryStore()
        calm.url = store.url
        calm.objects = store.objects
        calm.written_unix_s = store.written_unix_s
        calm.clock = store.clock
        return calm

    def read_back(self, store: MemoryStore | None = None) -> tuple[str, int]:
        """The line and the step of the bytes in the newest whole commit."""
        source = store or self.store
        calm, keys = self._calm(source), RunKeys(RUN)
        newest = commit.newest_whole(calm, keys)
        if newest is None:
            return "", 0
        manifests = catalog.load(calm, keys, newest)
        stored = {shard.path: shard for made in manifests for shard in made.shards}
        lines, files = set(), set()
        for path, shard in stored.items():
            directory, _, name = path.rpartition("/")
            if name not in (*FILES, CONSTANT):
                continue
            data = b"".join(
                source.objects[e.chunk.key][e.offset_bytes : e.offset_bytes + e.size_bytes]
                for e in shard.extents
            )
            line, step, _ = data.split(b":", 2)
            rank = int(directory[-5:])
            files.add((rank, name))
            if name in FILES:
                lines.add((line.decode(), int(step)))
            if data != content(line.decode(), int(step), name, rank):
                self.problems.append(f"torn bytes of {path} in {newest}")
        if len(lines) != 1:
            self.problems.append(f"a mixed checkpoint: {lines}")
        found = lines.pop()
        if len(files) != 3 * self.ranks.get(found[0], 1):
            self.problems.append(f"files are missing in {newest}: it has {sorted(files)}")
        return found

    # ------------------------------------------------------------ what happens

    def run(self) -> None:
        vms = self.random.choice([1, 2, 3])
        for number in range(vms):
            vm = self.vms.get(f"vm{number}") or self._boot(number)
            self._live(vm, None if number == vms - 1 else number + 1)
        self._calm_end()
        for store in [self.store] if self.mirror is None else [self.store, self.mirror]:
            if store.overwritten:
                self.problems.append(f"written again with other bytes: {store.overwritten}")

    def _boot(self, number: int) -> Vm:
        vm = self.vms[f"vm{number}"] = Vm(self, number)
        return vm

    def _live(self, vm: Vm, heir: int | None) -> None:
        """The life of a VM.

        Args:
            vm: the VM.
            heir: number of the VM after it; None for the last one, which may stay.
        """
        self.fault_share = self.random.choice([0.0, 0.0, 0.03, 0.2])
        if self.random.random() < 0.15:
            vm.spoil_disk(self.random.uniform(0, 10))
        self._start(vm)
        self._thaw(vm)
        for _ in range(self.random.randrange(4)):
            self.schedule.sleep(self.random.expovariate(1 / 4))
            self._disturb(vm)
        self.schedule.sleep(self.random.uniform(0, 10))
        if heir is None and self.random.random() < 0.3:
            return
        deadline_s = self.random.choice([4.0, 12.0, 12.0, 25.0, 25.0, 60.0])
        if self.random.random() < 0.8 and self._notice(vm, deadline_s):
            if heir is not None and "handover" in self.features:
                self.count("handover")
                self._boot(heir).predecessor = vm
                self._start(self.vms[f"vm{heir}"])
            for _ in range(self.random.choice([0, 0, 1, 2])):
                self.schedule.sleep(self.random.uniform(0, min(8.0, deadline_s / 3)))
                self._disturb(vm)
            is_early = self.random.random() < 0.3
            self.schedule.sleep(
                self.random.uniform(*(0, 3) if is_early else (deadline_s / 2, deadline_s))
            )
        if vm.has_trained and vm.training is not None and self.random.random() < 0.3:
            self._freeze(vm)
            return
        if self.random.random() < 0.4:
            self._reboot(vm)
            self.schedule.sleep(self.random.uniform(2, 8))
        self.count("power off")
        vm.power_off()

    def _start(self, vm: Vm) -> None:
        vm.start_daemon()
        self.schedule.sleep(self.random.uniform(0, 3))
        vm.start_trainer()

    def _freeze(self, vm: Vm) -> None:
        """Freeze a VM that has trained: the first start on a VM would take the run over later."""
        if self.random.random() < 0.3:
            vm.kill_trainer()
            vm.start_trainer()
            self.await_moment(CLAIMS, 20)
        elif self.random.random() < 0.7:
            self.await_moment(("before commits", "after commits", "sealed"))
        self.count("VM frozen")
        vm.is_frozen = True
        self.schedule.freeze(vm.name + "-")

    def _reboot(self, vm: Vm) -> None:
        if any(each.predecessor is vm for each in self.vms.values()):
            return  # the first start of a boot would take the run back
        if self.random.random() < 0.7:
            self.await_moment()
        self.count("power cut")
        vm.cut_power()
        self.schedule.sleep(self.random.uniform(0, 2))
        vm.start_daemon()
        vm.start_trainer()

    def _thaw(self, newer: Vm) -> None:
        for vm in self.vms.values():
            if vm is not newer and vm.is_on:
                if self.random.random() < 0.5 or not self.await_moment((*CLAIMS, "resumed")):
                    self.schedule.sleep(self.random.uniform(0, 20))
                self.schedule.freeze(vm.name + "-", is_frozen=False)
                if self.random.random() < 0.5:
                    self.count("overtaken VM starts its trainer again")
                    vm.kill_trainer()
                    vm.start_trainer()
                self.schedule.sleep(self.random.uniform(0, 20))
                vm.power_off()

    def _calm_end(self) -> None:
        """Without faults, a notice ends SAFE on the VM that had them, and on a last one that resumes."""
        self.fault_share = self.mirror_fault_share = 0.0
        for vm in [vm for vm in self.vms.values() if vm.is_on]:
            vm.disk_good_at_s = min(vm.disk_good_at_s, self.schedule.now_s)
            if not vm.is_frozen:
                self.schedule.sleep(30)
                self._expect_safe(vm)
                vm.power_off()
        vm = self._boot(LAST)
        vm.start_daemon()
        self.schedule.sleep(1)
        vm.start_trainer()
        self._thaw(vm)
        self.schedule.sleep(10)
        self._expect_safe(vm)

    def _expect_safe(self, vm: Vm) -> None:
        self.schedule.wait(lambda: vm.has_trained, 2 * SILENCE_S)
        before = vm.safes
        self._notice(vm, 110.0)
        if not self.schedule.wait(lambda: vm.safes > before, 60):
            self.problems.append(f"without faults, a notice on {vm.name} did not end SAFE")
        vm.kill_trainer()  # to save time
        if self.mirror is not None:
            self._expect_mirrored(self.mirror)
        if vm.cloud is not None:
            vm.cloud.rehearse()

    def _expect_mirrored(self, mirror: MemoryStore) -> None:
        """Without faults, the mirror soon has the newest commit and the farewell of each verdict."""
        for _ in range(15):
            self.schedule.sleep(2)
            with self.schedule.outside():
                found, copied = self.read_back(), self.read_back(mirror)
            farewells = {key for key in self.store.objects if "/farewells/" in key}
            lacks = farewells.difference(mirror.objects)
            if found == copied and not lacks:
                return
        self.problems.append(f"the mirror has {copied} of {found}, and lacks {lacks}")

    def _notice(self, vm: Vm, seconds: float) -> bool:
        if vm.service is None:
            return False
        self.count("notice")
        if vm.cloud is not None:
            vm.cloud.show(seconds)
            return True
        vm.service._post(
            NoticeRaised(
                Notice(
                    source="aws.spot",
                    kind="reclaim",
                    identity=f"notice-{vm.name}",
                    severity=Severity.IMMINENT,
                    deadline_mono_s=self.schedule.now_s + seconds,
                    deadline_quality=DeadlineQuality.STATED,
                    detail="",
                )
            )
        )
        return True

    def _note_floor(self, vm: Vm, evacuation_id: str) -> None:
        vm.evacuation_id = evacuation_id
        if vm.training is not None and vm.training.line:
            vm.floor = vm.training.step - 1  # the call of guard.step with the newest may be ahead

    def _disturb(self, vm: Vm) -> None:
        what = self.random.choice(
            ["daemon", "trainer", "both", "power", "end", "cloud", "clock", "outage", "disk"]
        )
        if what != "power" and self.random.random() < 0.5:
            self.await_moment()
        if what == "outage":
            self.count("store outage")
            before, self.fault_share = self.fault_share, 1.0
            self.schedule.sleep(self.random.uniform(0, 15))
            self.fault_share = before
        if what == "cloud" and vm.cloud is not None:
            vm.cloud.disturb()
        if what == "clock":
            self.count("clock step")
            self.schedule.skews_s[vm.name] = self.random.choice([0.0, *CLOCK_STEPS_S])
        if what == "disk":
            vm.spoil_disk(self.random.uniform(0, 15))
        if what == "end" and vm.service is not None:
            daemon = f"{vm.name}-daemon-{vm.daemons}"
            stop = vm.service._on_signal
            self.schedule.start(stop, (signal.SIGTERM,), group=daemon, name="signal")
            vm.stop_asked_s = self.schedule.now_s
            vm.is_ending = self.random.random() < 0.5
        if what == "power":
            self._reboot(vm)
        if what in {"daemon", "both"}:
            self.count("daemon killed")
            vm.kill_daemon()
        if what in {"trainer", "both"}:
            self.count("trainer killed")
            vm.kill_trainer()
        self.schedule.sleep(self.random.uniform(0, 2))
        if what in {"daemon", "both"}:
            vm.start_daemon()
        if what in {"trainer", "both"}:
            vm.start_trainer()


class _Datetime(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.fromtimestamp(time.time(), tz)


_receive = PeerConnection.receive


def _received(connection: PeerConnection) -> tuple[bytes, int, bool]:
    """A message, with the simulated process as its sender."""
    data, pid, is_cut = _receive(connection)
    return data, connection.peer.pid if pid else 0, is_cut


def _patch(world: World) -> None:
    """Replace the store, the properties of processes, inotify and the log."""

    for call in set().union(*DISK_ERRORS.values()):
        setattr(os, call, world.on_disk(call))
    prepare._lock = lambda *_: None  # a killed daemon may leave its descriptor open
    # The paths differ from run to run, and with an id of them the ids of all requests.
    prepare.RunDirectory.vm = lambda _, boot_id: boot_id  # type: ignore[method-assign]
    os.getpid = lambda: PID
    PeerConnection.receive = _received  # type: ignore[method-assign]
    peers.identify = world.identify
    peers.process_start = world.process_start
    signal_reader.handle = lambda *_: None
    storage.open_stores = lambda *_: world.stores()
    turn = Service._turn
    Service._turn = lambda service: world.turned(service, turn)  # type: ignore[method-assign]
    StagingObserver._watch = lambda _: None  # type: ignore[method-assign, assignment]
    boot.boot_id = lambda: world.vm.boot_id
    boot.booted_wall_ns = lambda: int(
        (world.vm.booted_wall_s + world.schedule.skew_s(world.vm.name)) * 1e9
    )
    saver.write_checkpoint = world.sealing
    swansong.guard.own_process = lambda: {  # type: ignore[attr-defined]
        "boot_id": world.vm.boot_id,
        "began_ticks": world.began_ticks,
    }
    target.sync_file_system = world.sync_disk
    for module in (wall, aws_imds, gcp_metadata):
        module.datetime = _Datetime  # type: ignore[attr-defined]
    metadata._connect = world.connect
    starts.PREDECESSOR_SILENCE_S = predecessor.PREDECESSOR_SILENCE_S = SILENCE_S
    storage.Pruner = partial(Pruner, first_s=4.0, interval_s=6.0, retry_s=3.0)  # type: ignore[misc, assignment]
    base.WINDOW_BYTES = WINDOW_BYTES
    host.is_host_stopping = lambda _: False

    def take(_logger: object, _level: str, event: Any) -> Any:
        world.log(event)
        raise structlog.DropEvent

    structlog.configure(processors=[take], cache_logger_on_first_use=False)


def simulate(seed: int, kind: type[World] = World) -> dict[str, Any]:
    """Run one seed in this process, which has to end afterwards because threads remain."""
    gc.disable()  # it would close sockets at other times in each run
    imported = set(sys.modules)
    with tempfile.TemporaryDirectory(prefix="sim-", ignore_cleanup_errors=True) as name:
        world = kind(seed, Path(name))
        _patch(world)
        try:
            world.run()
        except BaseException:
            world.problems.append(traceback.format_exc())
        finally:
            world.schedule.stop()
        world.problems += ["".join(traceback.format_exception(e)) for e in world.schedule.failures]
    if late := sorted(set(sys.modules) - imported):  # its turns depend on the files of this machine
        world.problems.append(f"imported during the run, and not before it: {late}")
    return {
        "seed": seed,
        "problems": world.problems,
        "counts": world.counts,
        "switches": world.schedule.switches,
        "seconds": round(world.schedule.now_s - 10_000, 1),
    }
