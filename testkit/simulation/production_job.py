# SPDX-License-Identifier: Apache-2.0
"""Jobs of several VMs and ranks, in the world of :mod:`testkit.simulation.production`.

Each VM has its own production daemon, and each rank has a guard of :func:`swansong.attach` with the real
agreement.  The ranks complete each step together, as with a collective.  They meet in a store in memory that
is slow, loses replies, and ends with rank 0 or with its VM.  Ranks, daemons and VMs are killed, and VMs
freeze while the job starts again, perhaps with another number of VMs.  Requests of one VM reach the bucket
late.  A launcher kills all ranks after the death of one, and starts the job again on the VMs that are left,
perhaps with one rank more or less.  A new VM may take the place of a VM with a notice that still runs.

Not covered: saves without lost ranks, which need torch, and rollbacks.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import swansong
import swansong.guard
from swansong import RestoreError
from swansong._checkpoint.saver import Saver
from swansong._daemon import session
from swansong._ranks import rendezvous
from swansong._ranks.agreement import Ranks
from swansong._ranks.position import _NEVER
from swansong._ranks.rendezvous import Rendezvous, meet_ranks
from swansong.layout import RankManifest
from swansong.rank_files import Snapshots
from swansongd.trainers.peers import Peer

from testkit.job_store import MemoryJobStore
from testkit.memory_store import MemoryStore
from testkit.simulation.production import PID, Training, Vm, World, forget
from testkit.simulation.schedule import Schedule

LATE_S = 20.0
"""A late request reaches the bucket at most this much later."""
START_S = 300.0
"""Without faults, each rank trains within this time: a start waits for the daemons of other VMs."""


class Connection(MemoryJobStore):
    """One connection of a rank to the job's store.  After an error it is broken."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._values = job.values
        self._changed: Any = Turns(job.world.schedule)

    def _pause(self) -> None:
        job, world = self._job, self._job.world
        if job.delay_s:
            world.schedule.sleep(world.random.uniform(0, job.delay_s))
        if job.vms[0].is_frozen and not world.schedule.wait(lambda: not job.vms[0].is_frozen, None):
            raise AssertionError
        self._fail_perhaps("store of the job failed")

    def _put(self, key: str, value: bytes) -> None:
        super()._put(key, value)
        self._fail_perhaps("reply of the job's store lost")

    def _fail_perhaps(self, what: str) -> None:
        job, world = self._job, self._job.world
        if not job.has_store or world.random.random() < job.fault_share:
            world.count(what)
            self.is_broken = True
        if self.is_broken:
            raise ConnectionError(what)


class Turns:
    """Takes the place of a lock that killed ranks would keep: an operation of the store is one turn."""

    def __init__(self, turns: Schedule) -> None:
        self.wait_for = turns.wait

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None: ...


class State(Snapshots):
    """The state of a rank; a resume reads the parts of all ranks, of any number."""

    reads_whole_set = True

    def __init__(self, training: Training, *, in_background: bool) -> None:
        self.training, self.in_background = training, in_background

    def snapshot(self) -> Callable[[Path], object]:
        now = self.training
        return Training(now.world, now.line, now.step, now.rank).save

    def load(self, directory: Path) -> None:
        world, found = self.training.world, []
        for part in sorted(directory.glob("rank-[0-9][0-9][0-9][0-9][0-9]")):
            saved = Training(world, rank=int(part.name[-5:]))
            saved.load(part)
            found.append((saved.line, saved.step))
        (self.training.line, self.training.step) = found[0]
        if found != [found[0]] * world.ranks[found[0][0]]:
            world.problems.append(f"a mixed checkpoint was loaded: {found}")


class Job:
    """One start of the training, on some VMs."""

    def __init__(self, world: JobWorld, number: int, local_ranks: dict[JobVm, int]) -> None:
        random = world.random
        self.world, self.vms, self.local_ranks = world, list(local_ranks), local_ranks
        self.line = f"job{number:03}-"
        self.size = sum(local_ranks.values())
        self.every_steps = random.choice([None, 5])
        self.in_background = random.random() < 0.5
        self.ends_with_rank_0 = random.random() < 0.5
        """Whether rank 0 serves the store, and not the launcher on its VM."""
        self.values: dict[str, bytes] = {}
        self.delay_s = random.choice([0.0, 0.0, 0.02, 0.3])
        self.fault_share = 0.0
        self.is_over = self.has_lost_rank = self.has_group = False
        self.processes: list[Process] = []
        self.reached = dict.fromkeys(range(self.size), -1)
        """By rank: the step that it has begun."""
        self.before: tuple[str, int] = ("", 0)
        """The newest commit when rank 0 asked where to resume."""
        self.resumed: tuple[str, int] | None = None

    @property
    def has_store(self) -> bool:
        first = [each for each in self.processes if each.ranks.rank == 0]
        has_server = bool(first) and first[0].is_alive if self.ends_with_rank_0 else True
        return self.vms[0].is_on and has_server

    @property
    def trains(self) -> bool:
        if self.is_over or self.has_lost_rank or self.resumed is None:
            return False
        return min(self.reached.values()) > self.resumed[1] + 1


class Process:
    """The process of one rank."""

    def __init__(self, job: Job, vm: JobVm, ranks: Ranks) -> None:
        self.world, self.job, self.vm, self.ranks = job.world, job, vm, ranks
        self.pid = PID + 1 + len(self.world.processes)
        self.group = f"{vm.name}-rank{ranks.rank}-{self.pid}"
        self.world.processes[self.group] = self
        self.lifeline_read, self.lifeline = os.pipe()
        self.is_alive = True
        self.guard: Any = None
        self.world.schedule.start(self._run, group=self.group, name="training")

    def kill(self) -> None:
        if not self.is_alive:
            return
        self.is_alive, self.job.has_lost_rank = False, True
        self.world.schedule.kill(self.group)
        self.vm.floor = None
        forget(self.guard)
        os.close(self.lifeline)

    def _run(self) -> None:
        try:
            self._train()
        except (OSError, RestoreError) as error:
            if self.world.is_calm:
                raise
            self.world.count(f"rank ended by {type(error).__name__}")
            self.world.schedule.start(self.kill, group="world")

    def _train(self) -> None:
        world, job = self.world, self.job
        world.schedule.sleep(world.random.uniform(0, 2))
        path = self.vm.directory / "s"
        world.schedule.wait(lambda: os.path.lexists(path), None)  # as swansong-ready@.service
        training = Training(world, rank=self.ranks.rank)
        state: Any = State(training, in_background=job.in_background)
        self.guard = swansong.attach(state, socket=path, every_steps=job.every_steps)
        if self.ranks.rank == 0:
            with world.schedule.outside():
                job.before = world.read_back()
        step = self.guard.restore()
        if job.resumed is None:
            job.resumed = training.line, step
            self.vm.sealed = None  # the shares of other VMs may be lost
            world.resumed(self.vm, job.line, training.line, step, job.before)
        if job.resumed != (training.line, step):
            found = f"resumed from step {step} of {training.line}, and others from {job.resumed}"
            world.problems.append(f"rank {self.ranks.rank} of {job.line} {found}")
        training.line, training.step = job.line, step
        self.vm.training = training
        while True:
            world.schedule.sleep(world.random.uniform(0.05, 0.4))
            job.reached[self.ranks.rank] = training.step + 1  # a collective, with all ranks
            world.schedule.wait(lambda: min(job.reached.values()) > training.step, None)
            training.step += 1
            world.trained(training)
            self.guard.step(training.step)


class JobVm(Vm):
    """A VM with its daemon and some ranks of a job."""

    clouds = ("none",)
    processes: list[Process] = []  # noqa: RUF012 - replaced, never changed
    store_late_until_s = 0.0
    """Until this time, some requests reach the bucket late."""

    def kill_trainer(self) -> None:
        for process in self.processes:
            process.kill()
        self.processes, self.training = [], None


class JobWorld(World):
    """A world whose VMs run the ranks of one job after the other."""

    all_features = ()

    def __init__(self, seed: int, directory: Path) -> None:
        super().__init__(seed, directory)
        self.processes: dict[str, Process] = {}
        """By the group of their threads, dead ones too."""
        self.jobs: list[Job] = []
        self.is_calm = False
        self.saved: dict[tuple[str, str], int] = {}
        """Step of the checkpoint that answers a request, by start and request."""
        self.noticed: set[Vm] = set()
        self.connections = 0
        # Another random stream: seeds that found a bug before still find the bug.
        self.replaces = Random(f"replaces {seed}").random() < 0.3
        self.restarts = Random(f"restarts {seed}").random() < 0.5
        self._patch()

    def _patch(self) -> None:
        """Replace the position of a rank, the store of the job and the identity of a peer."""
        connect, save = socket.socket.connect, Saver.save

        def connect_named(self_: socket.socket, address: Any) -> None:
            self.connections += 1
            self_.bind(f"\0{self.directory}:{self.connections}:{self.schedule.current.group}")
            connect(self_, address)

        def save_noted(saver: Saver, *args: Any) -> bool:
            self._saves(args[-1])
            return save(saver, *args)

        changes: list[tuple[Any, str, Any]] = [
            (socket.socket, "connect", connect_named),
            (Saver, "save", save_noted),
            (swansong.guard, "find_ranks", self._find_ranks),
            (session, "Rendezvous", partial(Rendezvous, open_store=self._open_store)),
            (rendezvous, "POLL_S", 0.1),  # half as many polls
        ]
        for owner, name, replacement in changes:
            setattr(owner, name, replacement)

    def _before(self, store: MemoryStore, what: str, key: str) -> None:
        vm: Any = None if self.schedule.current.group == "world" else self.vm
        may_be_late = vm is not None and self.schedule.now_s < vm.store_late_until_s
        if may_be_late and self.random.random() < 0.3:
            self.count("request was late")
            self.schedule.sleep(self.random.uniform(0, LATE_S))
        super()._before(store, what, key)

    @property
    def process(self) -> Process:
        """The rank of the current thread."""
        return self.processes[self.schedule.current.group]

    def _find_ranks(self, _socket: str) -> Ranks:
        """The position of a rank.  On one VM, the ranks of a process group learn their start in its store."""
        ranks = self.process.ranks
        if not self.process.job.has_group or ranks.world_size == 1:
            return ranks
        self.count("rank of a process group")
        start_id = meet_ranks(
            self._open_store(),
            ranks.rank,
            ranks.world_size,
            secrets.token_hex(8),
            closed=_NEVER,
            watch=lambda *_: None,
            prefix="swansong/attach/1/",
        )
        assert start_id is not None
        return replace(ranks, start_id=start_id)

    def _open_store(self) -> Connection:
        connection = Connection(self.process.job)
        connection.check([])
        return connection

    def _saves(self, manifest: RankManifest) -> None:
        request_id = manifest.request_id
        if request_id:
            step = self.saved.setdefault((manifest.start_id, request_id), manifest.step)
            if step != manifest.step:
                found = f"steps {step} and {manifest.step}"
                self.problems.append(f"request {request_id} was answered with {found}")

    def identify(self, connected: socket.socket) -> Peer:
        process = self.processes[connected.getpeername().decode().rpartition(":")[2]]
        if not process.is_alive:
            raise ProcessLookupError(f"process {process.pid} has ended")
        return Peer(process.pid, os.geteuid(), os.getegid(), os.dup(process.lifeline_read))

    def process_start(self, peer: Peer) -> int:
        return 0 if select.select([peer.pidfd], [], [], 0)[0] else peer.pid

    @property
    def began_ticks(self) -> int:
        return self.process.pid

    def _notice(self, vm: Vm, seconds: float) -> bool:
        # A notice joins an evacuation that another VM has begun, and whose checkpoint may be older.
        has_begun = vm.service is not None and vm.service._state.evacuation is not None
        vm.floor = None
        if vm.training is not None and not (has_begun or self.jobs[-1].has_lost_rank):
            # Another rank may be a step ahead.
            vm.floor = max(vm.training.step, self.steps.get(vm.lines, 0)) - 1
        self.noticed.add(vm)
        return super()._notice(vm, seconds)

    def _note_floor(self, vm: Vm, evacuation_id: str) -> None:
        vm.evacuation_id = evacuation_id  # a request of another VM sets no floor

    # ------------------------------------------------------------ the launcher

    def _boot(self, number: int) -> JobVm:
        vm = JobVm(self, number)
        self.vms[vm.name] = vm
        return vm

    @property
    def running(self) -> list[JobVm]:
        """The VMs that run, in order."""
        vms: Iterable[Any] = self.vms.values()
        return [vm for vm in vms if vm.is_on and not vm.is_frozen]

    def _gather(self, count: int) -> list[JobVm]:
        """This number of VMs, of which some run already."""
        found = self.running[:count]
        while len(found) < count:
            found.append(self._boot(len(self.vms)))
        return found

    def _launch(self, local_ranks: dict[JobVm, int]) -> None:
        """Start the job with these ranks, after the ranks on all VMs that run were killed."""
        last = self.jobs[-1] if self.jobs else None
        for vm in self.running:
            vm.kill_trainer()
        vms = list(local_ranks)
        job = Job(self, len(self.jobs), local_ranks)
        self.jobs.append(job)
        self.ranks[job.line] = job.size
        if last is not None:
            last.is_over = True
            if last.vms[0] is vms[0]:  # the same launcher
                job.ends_with_rank_0 = last.ends_with_rank_0
                if not job.ends_with_rank_0:
                    self.count("store of the last job")
                    job.values = last.values
        self.count(f"job of {len(vms)} VMs")
        job.has_group = len(vms) == 1 and len(self.jobs) % 2 == 0
        for node, (vm, count) in enumerate(local_ranks.items()):
            vm.start_daemon()
            vm.lines = job.line
            for local in range(count):
                ranks = Ranks(len(job.processes), local, job.size, count, node, len(vms))
                job.processes.append(Process(job, vm, ranks))
            vm.processes = [each for each in job.processes if each.vm is vm]
        self.schedule.start(self._supervise, (job,), group="world", name="launcher")

    def _supervise(self, job: Job) -> None:
        """Start the job again after the death of a rank."""
        self.schedule.wait(lambda: job.is_over or job.has_lost_rank, None)
        self.schedule.sleep(self.random.uniform(0, 6))
        self.schedule.wait(lambda: job.is_over or bool(set(job.vms) & set(self.running)), None)
        if not job.is_over:
            self.count("launcher started the job again")
            left = {vm: n for vm, n in job.local_ranks.items() if vm in self.running}
            if self.random.random() < 0.3:
                vm = self.random.choice(list(left))
                left[vm] = 3 - left[vm]
                self.count("one rank more or less")
            self._launch(left)

    def _replace(self, old: JobVm) -> None:
        """A new VM, whose daemon has run for a while, replaces a VM with a notice, which lives on."""
        new = self._boot(len(self.vms))
        new.start_daemon()
        self.schedule.sleep(self.random.uniform(0, 6))
        job = self.jobs[-1]
        if new.is_on and old in job.local_ranks and old in self.running:
            self.count("replaced before its end")
            left = [vm for vm in job.vms if vm in self.running and vm is not old]
            self._launch(dict.fromkeys([*left, new], job.local_ranks[old]))

    # ------------------------------------------------------------ what happens

    def run(self) -> None:
        for _ in range(self.random.choice([1, 1, 2])):
            self._live_job()
        self._calm_end()
        if self.store.overwritten:
            self.problems.append(f"written again with other bytes: {self.store.overwritten}")

    def _live_job(self) -> None:
        random = self.random
        self.fault_share = random.choice([0.0, 0.0, 0.03, 0.2])
        vms = self._gather(random.choice([1, 2, 2, 2, 3]))
        if random.random() < 0.15:
            random.choice(vms).spoil_disk(random.uniform(0, 10))
        self._launch(dict.fromkeys(vms, random.choice([1, 1, 2])))
        self._thaw_all()
        if random.random() < 0.7:
            self.schedule.wait(lambda: self.jobs[-1].trains, 60)
        for _ in range(random.randrange(4)):
            self.schedule.sleep(random.expovariate(1 / 3))
            self._disturb_job()
        self.schedule.sleep(random.uniform(0, 6))
        noticed = random.sample(self.running, min(len(self.running), random.choice([0, 1, 1, 2])))
        deadline_s = random.choice([4.0, 12.0, 25.0, 110.0])
        for vm in noticed:
            self._notice(vm, deadline_s)
            self.schedule.sleep(random.choice([0, 0, 0.3, 3]))
        if noticed and self.replaces:
            self._replace(noticed[0])
        for _ in range(random.choice([0, 0, 1, 2])):
            self.schedule.sleep(random.uniform(0, min(4.0, deadline_s / 3)))
            self._disturb_job()
        self.schedule.sleep(random.uniform(0, min(deadline_s, 20.0)))
        for vm in noticed:
            if random.random() < 0.4 and vm.is_on:
                self._freeze(vm)
            if vm.is_on and not vm.is_frozen:
                self.count("power off")
                vm.power_off()

    def _freeze(self, vm: JobVm) -> None:
        if not self.jobs[-1].trains:
            return  # its start would take the run over, as the latest one
        self.count("VM frozen")
        vm.is_frozen = self.jobs[-1].has_lost_rank = True  # the collectives time out
        self.schedule.freeze(vm.name + "-")

    def _thaw_all(self) -> None:
        for vm in self.vms.values():
            if vm.is_frozen and vm.is_on:
                self.schedule.sleep(self.random.uniform(0, 15))
                vm.is_frozen = False
                self.schedule.freeze(vm.name + "-", is_frozen=False)
                if self.random.random() < 0.3:
                    vm.kill_daemon()
                    vm.start_daemon()
                self.schedule.sleep(self.random.uniform(0, 15))
                if self.random.random() < 0.3:
                    self.count("notice after a thaw")
                    self._notice(vm, 25.0)
                    self.schedule.sleep(self.random.uniform(0, 15))
                last = next(job for job in reversed(self.jobs) if vm in job.vms)
                # A VM on which the job ran alone does not take the run back.
                if len(last.vms) == 1 or self.random.random() < 0.5:
                    vm.power_off()
                else:
                    vm.kill_trainer()  # the next start runs there, too

    def _disturb_job(self) -> None:
        running, job = self.running, self.jobs[-1]
        if not running:
            return
        vm = self.random.choice(running)
        kinds = ["daemon", "rank", "VM", "freeze", "outage", "late", "disk", "store of the job"]
        what = self.random.choice([*kinds, "nothing"])
        if self.random.random() < 0.5:
            self.await_moment(limit_s=4.0)
        self.count(f"disturbed: {what}")
        seconds = self.random.uniform(0, 8)
        if what == "daemon":
            vm.kill_daemon()
            self.schedule.sleep(seconds / 4)
            if vm in self.running:
                vm.start_daemon()
        elif what == "rank" and vm.processes:
            self.random.choice(vm.processes).kill()
        elif what == "VM" and len(running) > 1:
            vm.power_off()
        elif what == "freeze":
            self._freeze(vm)
        elif what == "outage":
            before, self.fault_share = self.fault_share, 1.0
            self.schedule.sleep(seconds)
            self.fault_share = before
        elif what == "late":
            vm.store_late_until_s = self.schedule.now_s + 5 * seconds
        elif what == "disk":
            vm.spoil_disk(seconds)
        elif what == "store of the job":
            job.fault_share = self.random.choice([0.02, 0.2, 1.0])
            self.schedule.sleep(seconds)
            job.fault_share = 0.0

    # ------------------------------------------------------------ the end

    def _calm_end(self) -> None:
        """Without faults, a notice on each VM of the job ends SAFE; so it does on the VMs after them."""
        self.fault_share = 0.0
        self._thaw_all()
        for vm in self.running:
            vm.disk_good_at_s = min(vm.disk_good_at_s, self.schedule.now_s)
            vm.store_late_until_s = 0.0
            vm.start_daemon()
        if self.running:
            self.schedule.sleep(10)  # a launcher may start the job again
            if self.jobs[-1].is_over or not set(self.jobs[-1].vms) & set(self.running):
                self._launch(dict.fromkeys(self.running, 1))
            self._expect_safe_job()
            for vm in self.running:
                vm.power_off()
        self.is_calm = True
        vms = self._gather(self.random.choice([1, 2]))
        self._launch(dict.fromkeys(vms, self.random.choice([1, 2])))
        if self.restarts and self.schedule.wait(lambda: self.jobs[-1].trains, START_S):
            vms[-1].processes[-1].kill()
            self.schedule.wait(lambda: not self.jobs[-1].has_lost_rank, START_S)
        self._expect_safe_job()

    def _has_periodic(self) -> bool:
        """Whether a periodic checkpoint of the job is whole, or none is expected."""
        job = self.jobs[-1]
        if job.every_steps is None or self.noticed.intersection(job.vms):
            return True
        self.schedule.sleep(1)
        with self.schedule.outside():
            return self.read_back()[0] == job.line

    def _expect_safe_job(self) -> None:
        if not self.schedule.wait(lambda: self.jobs[-1].trains, START_S):
            job = self.jobs[-1]
            self.problems.append(
                f"without faults, {job.line} does not train: {job.reached} after {job.resumed}"
            )
            return
        self.schedule.sleep(self.random.uniform(0, 5))
        if not any(self._has_periodic() for _ in range(60)):
            self.problems.append(f"without faults, {self.jobs[-1].line} has no periodic checkpoint")
        at_once = self.random.random() < 0.5
        vms = [vm for vm in self.jobs[-1].vms if vm not in self.noticed]
        for group in [vms] if at_once else [[vm] for vm in vms]:
            before = {vm: vm.safes for vm in group}
            for vm in group:
                self._notice(vm, 110.0)
            self.schedule.wait(lambda: all(vm.safes > n for vm, n in before.items()), 60)  # noqa: B023
            for vm in group:
                if vm.safes == before[vm]:
                    self.problems.append(f"without faults, a notice on {vm.name} did not end SAFE")
