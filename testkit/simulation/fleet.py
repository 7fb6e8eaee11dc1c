# SPDX-License-Identifier: Apache-2.0
"""A job over several VMs in one deterministic world: one seed, one heap of events, no real time.

The production machine, the claims and the commits run unchanged, one daemon for each VM.  This module plays
ranks, the job's own store, staging, flushes and the bucket.  VMs are lost, daemons die, lag, or lose the
store; the job restarts elastically, shrinks and grows.  A replacement takes the place of a VM with a notice
that still runs, and perhaps lives on.  After every event the invariants F1 to F5 and F7 are checked against
the real content of the bucket:

F1  A manifest belongs to a set that its VM has sealed, and names stored shards.
F2  A manifest has the generation of the job start that sealed its set.
F3  Over several VMs, no set of an earlier start is committed once a later start trains.
F4  A daemon reports no commit that is not whole.
F5  SAFE names a whole checkpoint, and a restore at that moment returns it, or a newer one that continues from
    it.  It is of the start that was asked, at or after its step at the request, or of a later start; or it is
    the very state that the start has loaded, if it had trained nothing since.
F7  A daemon ends only if a start that is later than all starts of its VM has taken the run over.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from swansong._ranks.rendezvous import has_all_shares
from swansong.protocol import Finished, Request, RestoreQuery
from swansong_bucket.errors import StoreError, Transient
from swansong_bucket.format import manifest
from swansong_bucket.format.manifest import chunks_of
from swansong_bucket.model import (
    UNKNOWN_PARENT,
    CommitRef,
    Notice,
    Parent,
    Staged,
    TrainerView,
    Verdict,
)
from swansong_bucket.runs import commit
from swansong_bucket.stores.base import ObjectInfo
from swansongd.core import machine, resume
from swansongd.core.events import (
    Action,
    CancelFlush,
    CheckComplete,
    ClaimGeneration,
    CommitManifest,
    Conclude,
    Event,
    Exit,
    FinishAsked,
    Flushed,
    FlushFailed,
    NoticeRaised,
    PeerRequested,
    Prune,
    Rescan,
    RestoreAsked,
    Scanned,
    Send,
    SetAside,
    StartBegun,
    StartFlush,
    Tick,
    TrainerAccepted,
    TrainerAgreed,
    TrainerFailed,
    TrainerJoined,
    TrainerLeft,
    TrainerProgress,
    TrainerSealed,
    WithdrawClaim,
)
from swansongd.core.request_ids import AGAIN, FOLLOW_UP, evacuation_of
from swansongd.core.state import Settings, StartState, State
from swansongd.flush.claim_record import ClaimRecord

from testkit.simulation.bucket import KEYS, Broken, Committer, SimStore, start_of
from testkit.simulation.world import MIB, TICK_QUIET_S, TICK_S, is_no_worse
from testkit.story import a_notice, a_set, shards_of

FINISH_LIMIT_S = 100.0
SLOWEST = 5.0
"""The flushes of a VM that lags take longer by this factor."""
EVERY_STEPS = 20
REPORT_STEPS = 4
FAULTS = (
    "store_lost", "lost_reply", "daemon_dies", "lags", "vm_lost", "round_fails", "crash", "grows",
    "late_scan", "survives", "not_pruned", "uneven", "replaced",
)  # fmt: skip


class Link(SimStore):
    """One VM's connection to the bucket, which may fail or lose replies."""

    def __init__(self, bucket: SimStore, vm: Vm) -> None:
        super().__init__()
        self.objects, self.names, self.new = bucket.objects, bucket.names, bucket.new
        self._vm = vm

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._vm.reach()
        super().put(key, data, if_absent=if_absent)
        if self._vm.fleet.chance("lost_reply", 0.1):
            raise Transient(f"{key}: reset")

    def get(self, key: str) -> bytes:
        self._vm.reach()
        return super().get(key)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self._vm.reach()
        return super().list(prefix, after=after)


@dataclass
class Start:
    """One start of the job."""

    number: int
    members: list[Vm]
    job_start_id: str
    finished: dict[Vm, Finished] = field(default_factory=dict)
    """The last answer of each daemon about earlier starts."""
    has_begun: bool = False
    resumed: CommitRef | None = None
    step: int = 0
    trains: bool = False
    is_over: bool = False
    parent: Parent = UNKNOWN_PARENT
    """The step that the ranks report as loaded."""
    accepted: dict[str, int] = field(default_factory=dict)
    """Step of the ranks when they accepted a request."""
    targets: dict[str, int] = field(default_factory=dict)
    """Step of each request that the ranks agreed on."""
    failed: set[str] = field(default_factory=set)

    @property
    def is_alone(self) -> bool:
        return len(self.members) == 1

    @property
    def first_step(self) -> int:
        """The step from which it trains."""
        return 0 if self.resumed is None else self.resumed.step

    def is_ready(self, state: State) -> bool:
        """Whether the daemon of rank 0 may choose a checkpoint, by the production rule."""
        return resume.may_answer(state, RestoreQuery("q", start_id=self.job_start_id))


class Vm:
    """A VM with its disk and its daemon."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet = fleet
        self.number = number
        self.is_alive = True
        self.life = 0
        self.store = Link(fleet.bucket, self)
        self.cut_until_s = 0.0
        self.slow = 1.0
        self.staging: list[Staged] = []
        self.record: ClaimRecord | None = None
        """The record of the claims, which outlives the daemon."""
        self.notice: Notice | None = None
        self.connection = 0
        self.verdicts: list[Conclude] = []
        self._flush_id = ""
        self._stepped_s = 0.0
        self.start_daemon()

    def reach(self) -> None:
        if self.fleet.now < self.cut_until_s:
            raise Transient("the store is away")

    # ------------------------------------------------------------------ the daemon

    def start_daemon(self) -> None:
        self.life += 1
        life = self.life
        self.committer = Committer(
            self.store,
            self.record,
            self.step,
            lambda s, happens: self.fleet.at(
                self.fleet.delay_s(s),
                lambda: happens() if self.is_alive and life == self.life else None,
            ),
            vm=f"vm{self.number}",
        )
        settings = Settings(reserve_s=2.0, signals_trainer=False, vm=f"vm{self.number}")
        self.state = State(
            settings=settings, starts=StartState(known=self.committer.claimant.starts)
        )
        self._flush_id = ""
        self._scan()
        self._tick()
        self.committer.read_run()
        if self.notice is not None:
            notice = self.notice
            self.post(lambda: NoticeRaised(notice), 1.0)
        self.connect()

    def connect(self) -> None:
        """The rank of this VM connects to its daemon, perhaps again, as the hooks do."""
        start = self.fleet.start
        if start is None or start.is_over or self not in start.members:
            return
        self.connection = self.fleet.number()
        view = TrainerView(
            connection=self.connection,
            pid=start.number,
            rank=start.members.index(self),
            world_size=len(start.members),
            local_world_size=1,
            nodes=len(start.members),
            step=start.step if start.trains else -1,
            takes_follow_ups=self.fleet.takes_follow_ups,
            start_id=start.job_start_id if start.is_alone or start.has_begun else "",
            parent=start.parent,
        )
        self.post(lambda: TrainerJoined(view), 0.1)
        if not start.is_alone and not start.has_begun:
            self.post(lambda: FinishAsked(start.job_start_id), 0.1, after_s=0.1)
        elif not start.trains:
            self.begins(start)

    def begins(self, start: Start) -> None:
        """The rank belongs to this start from now on, and asks for the checkpoint."""
        connection = self.connection
        if not start.is_alone:
            self.post(lambda: StartBegun(connection, start.job_start_id), 0.1, after_s=0.1)
        self.post(lambda: RestoreAsked(start.job_start_id), 0.1, after_s=0.2)

    def loaded(self, start: Start) -> None:
        """The rank reports what its start has loaded."""
        report = TrainerProgress(
            self.connection, start.step, start_id=start.job_start_id, parent=start.parent
        )
        self.post(lambda: report, 0.1, after_s=0.1)

    def post(self, event: Callable[[], Event], delay_up_to_s: float, after_s: float = 0.0) -> None:
        life = self.life

        def happens() -> None:
            if self.is_alive and life == self.life:
                self.step(event())

        self.fleet.at(after_s + self.fleet.delay_s(delay_up_to_s), happens)

    def step(self, event: Event) -> None:
        self._stepped_s = self.fleet.now
        self.state, actions = machine.step(self.state, event, self.fleet.now)
        for action in actions:
            self._carry_out(action)
        if self.is_alive and self.fleet.chance("daemon_dies", 0.002):
            self.record = self.committer.claimant.record
            self.life += 1
            self._flush_id = ""
            # Its successor may start late; until then no daemon answers.
            self.fleet.at(self.fleet.delay_s(20.0), lambda: self._restart(self.life))

    def _restart(self, life: int) -> None:
        if self.is_alive and life == self.life:
            self.start_daemon()

    def _tick(self) -> None:
        life = self.life

        def happens() -> None:
            if not self.is_alive or life != self.life:
                return
            tick_s = TICK_QUIET_S if self.state.evacuation is None else TICK_S
            if self.fleet.now > self._stepped_s + tick_s - 0.001:
                self.step(Tick())
            self.fleet.at(TICK_S, happens)

        self.fleet.at(TICK_S, happens)

    def _scan(self) -> None:
        began_s = self.fleet.now
        delay_s = 3.0 if self.fleet.chance("late_scan", 0.3) else 0.2

        def scanned() -> Scanned:
            return Scanned(began_s, tuple(self.staging))

        self.post(scanned, delay_s)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(Request(request_id, _, seconds_left), connections):
                if self.connection in connections:
                    self.fleet.asked(self, request_id, seconds_left)
            case Send(Finished() as answer):
                self.fleet.finished(self, answer)
            case StartFlush():
                self._flush(action)
            case CancelFlush(flush_id):
                if flush_id == self._flush_id:
                    self._flush_id = ""
            case CommitManifest():
                self.committer.commit(action)
            case ClaimGeneration():
                self.committer.claim(action)
            case WithdrawClaim():
                self.committer.withdraw_claim()
            case CheckComplete():
                self.committer.check_complete(action)
            case Rescan():
                self._scan()
            case Prune(directories) | SetAside(directories):
                if not self.fleet.chance("not_pruned", 0.5):
                    self.staging = [s for s in self.staging if s.directory not in directories]
            case Conclude():
                self.fleet.concluded(self, action)
            case Exit():
                self.fleet.ended(self)
            case _:
                pass

    def _flush(self, order: StartFlush) -> None:
        self._flush_id = order.flush_id
        life, staged = self.life, order.staged
        duration_s = self.fleet.delay_s(self.fleet.flush_s) * self.slow

        def ends() -> None:
            if not self.is_alive or life != self.life or self._flush_id != order.flush_id:
                return
            self._flush_id = ""
            if staged not in self.staging or self.fleet.now < self.cut_until_s:
                void = staged not in self.staging
                self.step(FlushFailed(order.flush_id, "a fault of the seed", void=void))
                return
            shards = shards_of(staged, f"{self.number}.{life}.{order.flush_id}")
            for chunk in chunks_of(shards):
                self.fleet.bucket.write(chunk.key, str(chunk.size_bytes).encode())
            self.post(lambda: Flushed(order.flush_id, shards), 0.05)

        self.fleet.at(duration_s, ends)

    # ------------------------------------------------------------------ staging

    def seal(self, start: Start, step: int, request_id: str) -> None:
        nonce = f"s{start.number}"
        staged = replace(
            a_set(
                step,
                nonce,
                size_bytes=10 * MIB,
                request_id=request_id,
                start_id=start.job_start_id,
                nodes=len(start.members),
                written_ns=round(self.fleet.now * 1e9),
            ),
            node=start.members.index(self),
        )
        self.staging.append(staged)
        self.fleet.sealed[step, nonce] = start
        connection = self.connection
        self.post(lambda: TrainerSealed(connection, request_id, step, 0.5, 10 * MIB), 0.1)
        self._scan()


class Fleet:
    """The VMs, the bucket and the job.

    Args:
        seed: decides everything.
        faults: those that may happen; None: a random subset.
        vms: how many VMs the first start has; 0: two or three.
    """

    def __init__(self, seed: int, *, faults: Sequence[str] | None = None, vms: int = 0) -> None:
        self.random = random.Random(seed)
        chosen = {name for name in FAULTS if name != "replaced" and self.random.random() < 0.5}
        self.faults = chosen if faults is None else set(faults)
        self.fired: set[str] = set()
        self.now = 1000.0
        self.bucket = SimStore()
        self.vms: list[Vm] = []
        self.sealed: dict[tuple[int, str], Start] = {}
        self.parts: dict[tuple[CommitRef, int], set[int]] = {}
        self.wholes: set[CommitRef] = set()
        """Nodes whose manifests are in the bucket, by checkpoint and number of nodes."""
        self.asked_at: dict[str, dict[int, int]] = {}
        """By the id of the evacuation: the step of each start at its first request, by its number."""
        self.start_of: dict[CommitRef, Start] = {}
        self.starts: list[Start] = []
        self.start: Start | None = None
        # Other random streams: seeds that found a bug before still find the bug.
        if faults is None and random.Random(f"replaced {seed}").random() < 0.5:
            self.faults.add("replaced")
        self.takes_follow_ups = random.Random(f"follow-ups {seed}").random() < 0.7
        self.follow_ups: set[str] = set()
        """Ids of the follow-up requests."""
        self.flush_s = self.random.choice((1.0, 4.0, 8.0))
        self._boundary_s = self.random.choice((0.5, 1.0))
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        for _ in range(vms or self.random.choice((2, 3))):
            self.add()
        self.restart(1.0)

    def add(self) -> Vm:
        vm = Vm(self, len(self.vms))
        self.vms.append(vm)
        return vm

    # ------------------------------------------------------------------ the heap

    def chance(self, fault: str, probability: float) -> bool:
        if fault not in self.faults or self.random.random() >= probability:
            return False
        self.fired.add(fault)
        return True

    def number(self) -> int:
        self._count += 1
        return self._count

    def delay_s(self, up_to_s: float) -> float:
        return self.random.uniform(0.001, up_to_s)

    def at(self, delay_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, self.number(), happens))

    def run(self, until_s: float) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            self.now, _, happens = heapq.heappop(self._heap)
            happens()
            self.check()
        self.now = until_s

    def run_until(self, fact: Callable[[], object], limit_s: float) -> None:
        """Process events until ``fact`` holds."""
        end_s = self.now + limit_s
        while not fact():
            assert self.now < end_s, f"not within {limit_s} s"
            self.run(self.now + 0.1)

    # ------------------------------------------------------------------ the job

    def restart(self, delay_s: float) -> None:
        """All ranks end, and later the job starts again on the remaining VMs."""
        before = self.start
        if before is not None:
            before.is_over = True
            for vm in before.members:
                vm.post(partial(TrainerLeft, vm.connection, exited=True, reason="x"), 0.1)
        number = len(self.starts)
        waiting = Start(number, [], f"start-{number}", is_over=True)
        self.starts.append(waiting)
        self.start = waiting

        def happens() -> None:
            if self.start is not waiting:
                return
            members = [vm for vm in self.vms if vm.is_alive]
            leaving = [vm for vm in members if vm.notice is not None]
            if leaving and self.chance("replaced", 0.5):
                # The launcher leaves these VMs out, whose daemons still commit.
                members = [vm for vm in members if vm not in leaving]
                members += [self.add() for _ in leaving]
            if not members or (len(members) < 4 and self.chance("grows", 0.6)):
                members.append(self.add())
            self.random.shuffle(members)  # the rendezvous numbers the VMs as it likes
            waiting.members = members
            waiting.is_over = False
            for vm in members:
                vm.connect()
            self._await_finished(waiting, self.now + FINISH_LIMIT_S)

        self.at(delay_s, happens)

    def finished(self, vm: Vm, answer: Finished) -> None:
        start = self.start
        if start is not None and start.job_start_id == answer.start_id:
            start.finished[vm] = answer

    def _await_finished(self, start: Start, give_up_s: float) -> None:
        if start is not self.start or start.is_over:
            return
        have_answered = len(start.finished) == len(start.members)
        is_ready = have_answered and has_all_shares(list(start.finished.values()))
        if start.is_alone or is_ready or self.now > give_up_s:
            start.has_begun = True
            for vm in start.members:
                vm.begins(start)
            self._await_choice(start)
        else:
            self.at(0.1, lambda: self._await_finished(start, give_up_s))

    def _await_choice(self, start: Start) -> None:
        if start is not self.start or start.is_over:
            return
        first = start.members[0]
        try:
            if not start.is_ready(first.state):
                raise Transient("not yet")
            newest = commit.newest_whole_commit(first.store, KEYS)
        except StoreError:
            self.at(0.2, lambda: self._await_choice(start))
            return
        if start.is_alone:
            newest = self._local_choice(first.state, newest)
        start.resumed = newest
        start.step = start.first_step
        start.parent = Parent("", 0)
        if newest is not None:
            start.parent = Parent(self.start_of[newest].job_start_id, newest.step)
        start.trains = True
        for vm in start.members:
            vm.loaded(start)
        self.at(self._boundary_s, lambda: self._trains(start))

    def _local_choice(self, state: State, newest: CommitRef | None) -> CommitRef | None:
        """The checkpoint from which a job on one VM resumes: its sets are whole, so the newest one."""
        own = resume.newest_local(state, newest)
        chosen = None if own is None else state.ref_of(own.id)
        if own is None or chosen is None:
            return newest
        self.start_of.setdefault(chosen, self.sealed[own.id.step, own.id.nonce])
        return chosen

    def _trains(self, start: Start) -> None:
        if start is not self.start or start.is_over:
            return
        self.at(self._boundary_s, lambda: self._trains(start))
        start.step += 1
        step = start.step
        asked = next((id_ for id_, target in start.targets.items() if target == step), "")
        for vm in start.members:
            if step % REPORT_STEPS == 0:
                vm.post(partial(TrainerProgress, vm.connection, step), 0.1)
            if asked or step % EVERY_STEPS == 0:
                self.at(self.delay_s(2.0), partial(self._seals, vm, start, step, asked))
        if self.chance("crash", 0.002):
            self.restart(self.delay_s(5.0))

    def _seals(self, vm: Vm, start: Start, step: int, request_id: str) -> None:
        if vm.is_alive and start is self.start and not start.is_over:
            vm.seal(start, step, request_id)

    def asked(self, vm: Vm, request_id: str, seconds_left: float) -> None:
        """The daemon of one VM requests a checkpoint; the ranks of all VMs agree, or fail to."""
        start = self.start
        connection = vm.connection
        assert start is not None
        # A VM repeats as its own what began there as the follow-up of another VM.
        if request_id.rfind(FOLLOW_UP) > request_id.rfind(AGAIN):
            is_new = request_id not in self.follow_ups  # ranks of the next start get it again
            self.follow_ups.add(request_id)
            if is_new and 0 not in {trainer.rank for trainer in vm.state.connected}:
                raise Broken(f"{request_id}: a follow-up of a VM that does not lead")
        step = start.step if start.trains else -1
        steps = self.asked_at.setdefault(evacuation_of(request_id), {})
        steps.setdefault(start.number, step)
        if step > start.first_step and not start.is_alone and self.chance("uneven", 0.5):
            step -= 1  # the ranks of other VMs are a step ahead
        step = start.accepted.setdefault(request_id, step)
        if not start.is_over and vm in start.members:
            vm.post(lambda: TrainerAccepted(connection, request_id, step), 0.05)
        if request_id in start.targets:
            target = start.targets[request_id]
            vm.post(lambda: TrainerAgreed(request_id, target), 0.1, after_s=0.05)
            return
        if not start.trains or request_id in start.failed or self.chance("round_fails", 0.5):
            start.failed.add(request_id)
            vm.post(lambda: TrainerFailed(connection, request_id, "declined"), 3.0)
            return
        target = start.step + 1
        while target in start.targets.values():
            target += 1
        start.targets[request_id] = target
        for other in start.members:
            if other is not vm:
                accepted = partial(TrainerAccepted, other.connection, request_id, step)
                other.post(lambda: PeerRequested(request_id, "peer", seconds_left), 0.1)
                other.post(accepted, 0.05, after_s=0.1)
            other.post(lambda: TrainerAgreed(request_id, target), 0.1, after_s=0.2)

    # ------------------------------------------------------------------ the weather

    def trouble(self) -> None:
        """Faults of the VMs at random times."""
        alive = [vm for vm in self.vms if vm.is_alive]
        if alive:
            vm = self.random.choice(alive)
            if self.chance("store_lost", 0.3):
                vm.cut_until_s = self.now + self.delay_s(60.0)
            if self.chance("lags", 0.3):
                vm.slow = self.random.choice((1.0, 1.0, SLOWEST))
            if self.chance("vm_lost", 0.1):
                self.lose(vm)
        if self.chance("grows", 0.05):
            self.restart(self.delay_s(5.0))
        self.at(self.delay_s(20.0), self.trouble)

    def take(self, vm: Vm, in_s: float) -> None:
        """A notice, and the end of the VM at its deadline."""
        deadline = self.now + in_s
        notice = a_notice(deadline_mono_s=deadline, identity=f"vm{vm.number}:{self.now}")
        vm.notice = notice
        vm.post(lambda: NoticeRaised(notice), 0.2)
        if self.chance("replaced", 0.5):
            self.at(self.delay_s(in_s), lambda: self.restart(self.delay_s(5.0)))

        def ends() -> None:
            if vm.notice is notice and vm.is_alive and not self.chance("survives", 0.4):
                self.lose(vm)

        self.at(in_s, ends)

    def lose(self, vm: Vm) -> None:
        """The VM loses its power and its disk."""
        vm.is_alive = False
        vm.life += 1
        start = self.start
        if start is not None and (vm in start.members or start.is_over):
            self.restart(self.delay_s(15.0))

    def ended(self, vm: Vm) -> None:
        """A job on one VM has moved, and the daemon ends: the operator takes the VM out of the job."""
        by = self._start_of(vm.state.starts.fenced_by or 0)
        claimed = {start.id for start in vm.state.starts.known if start.generation is not None}
        own = [start.number for start in self.starts if start.job_start_id in claimed]
        if by is None or by.number <= max(own, default=-1):
            raise Broken(f"F7: the daemon of vm{vm.number} ends, and no later start has the run")
        self.lose(vm)

    # ------------------------------------------------------------------ the invariants

    def whole_sets(self, start: Start) -> set[int]:
        """Steps of the sets that all VMs of this start have sealed and still have."""
        steps = [
            {s.id.step for s in vm.staging if s.id.start == start.job_start_id}
            for vm in start.members
        ]
        return set.intersection(*steps)

    def whole(self) -> CommitRef | None:
        """The commit that a restore would return now."""
        return max(self.wholes, default=None)

    def commits(self) -> bool:
        """Whether that commit is of the newest start."""
        newest = self.whole()
        return newest is not None and self.start_of[newest] is self.start

    def check(self) -> None:
        self._check_new()
        for vm in self.vms:
            last = vm.state.commits.last_complete
            if vm.is_alive and last is not None and last not in self.wholes:
                raise Broken(f"F4: vm{vm.number} reports {last}, which is not whole")

    def _check_new(self) -> None:
        keys = list(self.bucket.new)
        self.bucket.new.clear()
        for key in keys:
            if KEYS.parse_commit(key) is not None:
                self._check_manifest(key)

    def _check_manifest(self, key: str) -> None:
        made = manifest.decode(self.bucket.objects[key])
        for chunk in made.chunks:
            if chunk.key not in self.bucket.objects:
                raise Broken(f"F1: {key} names {chunk.key}, which is not stored")
        start = self.sealed.get((made.step, made.nonce))
        if start is None:
            raise Broken(f"F1: {key} is of no sealed set")
        parts = self.parts.setdefault((made.ref, made.nodes), set())
        parts.add(made.node)
        if len(parts) == made.nodes:
            self.wholes.add(made.ref)
        self.start_of[made.ref] = start
        generation = self._start_of(made.generation)
        if generation is not None and generation is not start:
            raise Broken(f"F2: {key} is of start {start.number}, not of {generation.number}")
        later = [
            other
            for other in self.starts
            if other.number > start.number
            and other.trains
            and not _continues(other, made.ref)
            and not (made.nodes == 1 and other.is_alone)
        ]
        if later:
            raise Broken(f"F3: {key} is of start {start.number}, and {later[-1].number} trains")

    def _start_of(self, generation: int) -> Start | None:
        name = start_of(self.bucket, generation)
        return next((start for start in self.starts if start.job_start_id == name), None)

    def concluded(self, vm: Vm, conclusion: Conclude) -> None:
        if not conclusion.is_final:
            return
        before = [each for each in vm.verdicts if each.evacuation_id == conclusion.evacuation_id]
        if before and not is_no_worse(before[-1], conclusion):
            raise Broken(f"F5: {conclusion} after {before[-1]}")
        vm.verdicts.append(conclusion)
        self._check_new()
        commit_ref, restored = conclusion.commit, self.whole()
        if conclusion.verdict is not Verdict.SAFE:
            return
        if commit_ref not in self.wholes:
            raise Broken(f"F5: SAFE at {commit_ref}, which is not whole")
        evacuation = vm.state.evacuation
        assert evacuation is not None
        self._check_position(vm, evacuation.id, restored)
        newest = restored
        while newest is not None and newest.generation > commit_ref.generation:
            newest = self.start_of[newest].resumed
        if newest is None or newest < commit_ref:
            raise Broken(f"F5: SAFE at {commit_ref}, and a restore returns {restored}")

    def _check_position(self, vm: Vm, evacuation_id: str, restored: CommitRef | None) -> None:
        """Whether a restore gives the training that was asked, or a later start of it."""
        joined = [each.number for each in self.starts if each.has_begun and vm in each.members]
        steps = self.asked_at.get(evacuation_id) or dict.fromkeys(joined, -1)
        if restored is None or not steps:
            raise Broken(f"F5: SAFE, the starts are {joined}, and a restore returns {restored}")
        asked, step = self.starts[max(steps)], steps[max(steps)]
        by = self.start_of[restored]
        is_loaded = asked.resumed == restored or not asked.trains
        if by.number < asked.number and not (is_loaded and step <= restored.step):
            raise Broken(f"F5: SAFE, start {asked.number} was at {step}; a restore has {restored}")
        if by is asked and restored.step < step:
            raise Broken(f"F5: SAFE at {restored}, and the job was at {step} when asked")


def _continues(start: Start, ref: CommitRef) -> bool:
    """Whether a start has resumed from this commit, or from a later one of the same generation."""
    resumed = start.resumed
    return resumed is not None and resumed.generation == ref.generation and resumed.step >= ref.step
