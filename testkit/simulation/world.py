# SPDX-License-Identifier: Apache-2.0
"""A small deterministic world for the state machine: one seed, one heap of events, no real time.

The production machine, planner, claims and commit rules run unchanged.  This module plays one VM: trainers,
staging, the flush and the store, with the delays and faults of the seed.  After every event I1, I2, I4 to I7,
I9, I16, I18 and the reserve of V4 are checked against the real content of the store, and each verdict SAFE by
the witness of :mod:`testkit.simulation.witness`.

Of the other invariants, :mod:`testkit.simulation.retention` checks I8, :mod:`testkit.simulation.production`
I3, I5, V1, V2 and V5, and :mod:`testkit.simulation.adversary` I11 and I15.
"""

from __future__ import annotations

import bisect
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from swansong.fields import PROCESS_PREFIX
from swansong.protocol import (
    SIGTERM_LIMIT_S,
    NotRequested,
    Request,
    RestoreQuery,
    StartDrawn,
    Target,
    Withdrawn,
)
from swansong_bucket.errors import StoreError
from swansong_bucket.format import claim as claims
from swansong_bucket.format import manifest
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.manifest import Manifest, chunks_of
from swansong_bucket.model import (
    UNKNOWN_PARENT,
    CheckpointId,
    CommitRef,
    GpuHealth,
    GpuStatus,
    Notice,
    Parent,
    Severity,
    Staged,
    StagedFile,
    TrainerView,
    Verdict,
    is_healthy,
)
from swansong_bucket.runs import commit
from swansongd.core import followup, gpus, machine, resume, staged_sets
from swansongd.core.events import (
    Action,
    CancelFlush,
    ClaimGeneration,
    CommitManifest,
    Conclude,
    Event,
    Exit,
    FenceFound,
    Flushed,
    FlushFailed,
    FlushProgress,
    GpusRead,
    Mark,
    NoticeRaised,
    NoticeWithdrawn,
    ProcessFound,
    Prune,
    RequestAsked,
    Rescan,
    RestoreAsked,
    RolledBack,
    Scanned,
    Send,
    SetAside,
    SignalledExited,
    SignalRefused,
    SignalSent,
    SignalTrainer,
    StartBegun,
    StartFlush,
    Tick,
    TrainerAccepted,
    TrainerFailed,
    TrainerJoined,
    TrainerLeft,
    TrainerProgress,
    TrainerSealed,
    WithdrawClaim,
)
from swansongd.core.request_ids import FOLLOW_UP, evacuation_of
from swansongd.core.state import Settings, StartState, State
from swansongd.flush.claim_record import ClaimRecord
from swansongd.restore.downloads import BUDGET_S
from swansongd.sources.gpu import GpuNotices

from testkit.simulation.bucket import KEYS, Broken, Committer, SimStore, restored, start_of
from testkit.simulation.witness import Line, Point, Witness
from testkit.story import BOOT, a_notice, a_set, shards_of

MIB = 2**20
RESERVE_S = 5.0
PART_BYTES = 16 * MIB
LINK_S = 0.5
"""Interval at which the progress of the link is looked at during an evacuation ..."""
LINK_QUIET_S = 2.0
"""... and without one."""
LINK_START_S = 0.05
"""From the order of a flush to its first byte."""
TICK_S = 0.5
"""During an evacuation the core runs at least at this interval ..."""
TICK_QUIET_S = 2.0
"""... and without one at this interval; any event runs it."""
FILES = 4
"""Number of files of each set; those of an emergency save become final one after the other."""
REPORTS_S = (0.0, 1.0, 5.0)
"""Intervals of a rank's reports."""
AGREEMENT_S = 5.0
"""A rank that has accepted a request waits this long for the target."""
SETTLE_S = 2.0
"""Files of a trainer without hooks count as sealed after this time without a change."""
LOOK_S = 1.0
"""Interval at which the daemon looks up the process of a trainer without hooks."""
ASK_AGAIN_S = 3.0
"""A rank that got SIGTERM asks the daemon again after this time."""
LOAD_S = 2.0
"""Longest time to load a checkpoint."""
SLOW_REQUEST = 20.0
"""A claim or a commit may take longer by this factor."""
OTHER = "other"
"""The start of the second VM, and the nonce of its set."""
TRAINERS = ("one rank", "two ranks", "two ranks", "process", "process")
ASKING = ("newest", "asks, then older")
"""Trainers that ask the daemon from which checkpoint they resume."""
UNTIED = ("periodic-", "sigterm-")
"""Beginnings of the ids of requests that belong to no evacuation."""
FAULTS = (
    "lost_reply", "late_write", "refused", "restart", "trainer_death", "dies_slowly", "disconnects",
    "second_vm", "void", "slow_network", "torn_save", "never_answers", "late_scan",
    "claim_lost", "notices_lost", "vanishes", "starts_behind", "rolls_back", "ends", "loads_slowly",
    "orphan", "slow_requests",
)  # fmt: skip


_MOMENTS = (Request, Target, ClaimGeneration, CommitManifest, Conclude, SignalTrainer)
"""A daemon dies most often right after one of these."""
_MERIT = (Verdict.NO_TRAINING, Verdict.LOST, Verdict.PARTIAL, Verdict.SAFE)


def _ticks(trainer: Trainer) -> int:
    """When the process of rank 0 began."""
    return round(100 * trainer.launched_s)


def is_no_worse(before: Conclude, after: Conclude) -> bool:
    """Whether a verdict of the same evacuation stands up to the one before, and so does its commit."""
    is_older = before.commit is not None and (after.commit is None or after.commit < before.commit)
    return _MERIT.index(after.verdict) >= _MERIT.index(before.verdict) and not is_older


@dataclass
class Link:
    """The network link: it sends one part at a time."""

    busy_with: CheckpointId | None = None
    """The set that it sends."""
    used_until_s: float = 0.0
    """The time before is used up."""
    into_part: float = 0.0
    """Bytes sent of the part in flight."""


@dataclass
class Rank:
    """One process of a trainer with hooks."""

    number: int
    pid: int
    knows_start: bool
    """Rank 0 draws the id; the others have it from a store of the job, or else learn it from the daemon."""
    connection: int = 0
    life: int = 0
    """The life of the daemon in which it has connected last."""
    is_connected: bool = False
    step: int = -1
    reported_s: float = 0.0
    owes_start: bool = False
    """It has not reported yet what its start has loaded."""
    asked: str = ""
    """The newest request that it got."""
    standing: str = ""
    """The request that it has accepted; it begins no further step."""
    accepted: int = -1
    target: int | None = None
    declined: set[str] = field(default_factory=set)


@dataclass
class Trainer:
    """One launch of the training: it trains, saves at intervals, and answers requests at step boundaries."""

    number: int
    start_id: str
    line: Line
    ranks: list[Rank]
    has_hooks: bool
    loads: str
    """``newest``: asks the daemon.  ``older``: a directory that names its start.  ``unnamed``: one that names
    none.  ``silent``: without a report, because the script does not call ``restore()``.  ``asks, then
    older``: cannot load what the daemon answers, and loads another directory that names its start."""
    launched_s: float
    parent: Parent = UNKNOWN_PARENT
    """The step that the ranks report as loaded."""
    begins_over: bool = False
    """It could not load what the daemon answered."""
    first_step: int = -1
    is_loading: bool = True
    reading: str = ""
    """Nonce of the set in staging that a rollback loads."""
    is_saving: bool = False
    is_misled: bool = False
    """Without a store, one of its ranks was told the start of the launch before, whose rank 0 was still
    connected, or a process of a launch before was told its start."""
    has_saved: bool = False
    """A save has ended within this step."""
    further: int = 0
    """Number of further starts in the same processes."""
    saved_s: float | None = None
    has_sigterm: bool = False
    """It ends after its last checkpoint, for which it asks the daemon."""
    withdrawn: set[str] = field(default_factory=set)
    """Withdrawn periodic requests, which get no answer."""
    signalled: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        return max(rank.step for rank in self.ranks)

    @property
    def pid(self) -> int:
        return self.ranks[0].pid

    @property
    def process_id(self) -> str:
        """The same for all starts of the same processes."""
        return self.start_id.partition("~")[0]


class World:
    """One VM with a daemon and a trainer, a store, and perhaps a second VM.

    Args:
        seed: decides everything.
        is_calm_from_s: no fault begins after this instant; None: the seed may break things to the end.
        has_trainer: whether a trainer starts with the daemon; else :meth:`start_trainer` starts it.
        takes_follow_ups: whether it trains on and takes them; else the seed decides.
        trainer: one of :data:`TRAINERS`; None: the seed decides.
    """

    def __init__(  # noqa: PLR0915 - all that a world begins with
        self,
        seed: int,
        *,
        is_calm_from_s: float | None = None,
        has_trainer: bool = True,
        takes_follow_ups: bool = False,
        trainer: str | None = "one rank",
    ) -> None:
        self.random = random.Random(seed)
        # A random subset of faults for each seed finds more than all faults together.
        self.faults = {name for name in FAULTS if self.random.random() < 0.4}
        kind = trainer or self.random.choice(TRAINERS)
        self.has_hooks = kind != "process"
        self.world_size = 2 if kind == "two ranks" else 1
        self.has_store = random.Random(f"store {seed}").random() < 0.7
        """The ranks have a process group, in whose store rank 0 gives its start to the others."""
        if random.Random(f"sigterm {seed}").random() < 0.3:
            self.faults.add("sigterm")
        self.fired: set[str] = set()
        self.is_calm_from_s = is_calm_from_s
        self.now = 1000.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.store = SimStore(self.chance, lambda s, happens: self.at(self.delay_s(s), happens))
        self.witness = Witness()
        self.staging: list[Staged] = []
        self.adopted: list[Staged] = []
        """Sets of a trainer without hooks; ``staging`` has those of the hooks."""
        self.writing = ""
        """Directory that a trainer without hooks is writing."""
        self._settling: dict[str, float] = {}
        """When this life of the daemon first saw the files of an adopted set, by its nonce."""
        self.growing: list[Staged] = []
        self.sealed: list[Staged] = []
        self.rejected: set[str] = set()
        """Nonces of sets that no start may load: changed, vanished, or left behind by a rollback."""
        self.notice: Notice | None = None
        self._withdrawn_sources: set[str] = set()
        self.asks: set[tuple[str, int]] = set()
        self.verdict: Conclude | None = None
        self.exit: Exit | None = None
        self._stepped_s = 0.0
        """When the core ran last."""
        self._woken_s = 0.0
        """The newest instant of an extra tick."""
        self.is_over = False
        """No further trainer starts."""
        self.life = 0
        """Events for an earlier life of the daemon are lost."""
        self.is_up = True
        self.record: ClaimRecord | None = None
        """The record of the claims, which outlives the daemon."""
        self.state = State(settings=Settings(reserve_s=RESERVE_S, signals_trainer=False))
        self.trainer: Trainer | None = None
        self._flush_id = ""
        self._link = Link()
        self.stored_parts: dict[CheckpointId, dict[tuple[str, int], int]] = {}
        """Stored parts, by set; the journal preserves them over a restart."""
        self.early: list[StartFlush] = []
        self.hides_growing = False
        """Scans do not show a set before it is sealed."""
        self.begun: list[float] = []
        """For each part that began in an evacuation: the seconds left before the deadline."""
        self._slow_until_s = 0.0
        self._slow_factor = 1.0
        self._refs: set[CommitRef] = set()
        self._first_refs: dict[str, CommitRef] = {}
        """The commit of each set, by its nonce."""
        self._placed: list[tuple[CommitRef, tuple[int, int]]] = []
        """This VM's commits in the order of readers, each with the place of its state."""
        self.takes_periodic = self.random.random() < 0.5
        self.interval_s: float = self.random.choice((7.0, 40.0))
        self.every_steps = 10
        """The trainer saves at this interval by itself."""
        self.report_s: float = self.random.choice(REPORTS_S)
        self.skew = 0.0
        """Part of a step by which one of two ranks is ahead of the other."""
        if self.world_size > 1:
            self.skew = self.random.choice((0.0, 0.3, 0.8))
        self.overwrites = self.random.random() < 0.5
        """A trainer without hooks has one directory for each step, or one for each process and step."""
        self.vanishes = False
        """Sets that answer a request are deleted before their manifests are written."""
        self.voids = 0
        """This number of sets that answer a request are changed before they are stored."""
        self.hangs = 0
        """This number of requests is declined, by a rank that hangs for a moment."""
        self._orphans: set[int] = set()
        """Connections of ranks of trainers that are over."""
        self._dying: list[tuple[Trainer, Rank, float]] = []
        """Ranks of trainers that are over, whose processes run until then."""
        self.launched_s: dict[str, float] = {}
        """When each start was launched."""
        self._written_s: dict[str, float] = {}
        """When the last file of each set was written, by its nonce."""
        # A trainer that takes none shows the other outcomes.
        self.takes_follow_ups = takes_follow_ups or self.random.random() < 0.7
        self.follow_ups: dict[str, float] = {}
        """By id of the follow-up requests: the seconds left at the request."""
        self.accept_s = 0.0
        """A trainer accepts a request within this time; 0: within a step."""
        self.periodic: list[int] = []
        """Steps of the sets that were sealed for a periodic request."""
        self.keeps = self.random.choice((1, 2, 6))
        """Number of sets that a trainer without hooks keeps while it writes the next one."""
        self.boundary_s: float = self.random.choice((0.2, 1.0, 5.0))
        self.save_s: float = self.random.choice((0.1, 2.0, 20.0))
        self.size_bytes: int = self.random.choice((MIB, 100 * MIB, 800 * MIB))
        self.bandwidth: int = self.random.choice((20, 200)) * MIB
        self.gpu: GpuStatus | None = None
        """The GPU of the VM; None without one."""
        self.suspect_starts: set[str] = set()
        """Processes that the daemon knew when it learned of a failure of the GPU."""
        self.suspect_sets: set[str] = set()
        """Nonces of the sets that they sealed later."""
        self._waits: dict[str, Point] = {}
        """By nonce of each set that waited for its commit at a SAFE: the state that was SAFE."""
        self._joined: set[str] = set()
        self._fenced_by = 0
        """The newest generation of another VM that this life of the daemon has learned of."""
        self._stands: dict[int, tuple[str, int]] = {}
        """By connection: the last request that the rank has accepted, empty for its goodbye, and its step."""
        self._reported: set[int] = set()
        """Connections on which a rank has reported what it has loaded."""
        self._members: set[tuple[str, int]] = set()
        """Launches and numbers of the ranks whose start this life of the daemon knows."""
        self._leaver: Trainer | None = None
        """All its ranks said goodbye, and no other trainer has started since."""
        self.reconnects_slowly = False
        """After a restart of the daemon, the trainer often needs long to reconnect."""
        self.conclusions: list[Conclude] = []
        self._told: list[tuple[int, Conclude]] = []
        """The reported verdicts, with the life of the daemon that reported them."""
        self._start_daemon()
        if has_trainer:
            self._trainer_starts()

    # ------------------------------------------------------------------ the heap

    def chance(self, fault: str, probability: float) -> bool:
        """Whether this fault happens now."""
        calm = self.is_calm_from_s is not None and self.now >= self.is_calm_from_s
        if fault not in self.faults or calm or self.random.random() >= probability:
            return False
        self.fired.add(fault)
        return True

    def at(self, delay_s: float, happens: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._count, happens))

    def delay_s(self, up_to_s: float) -> float:
        return self.random.uniform(0.001, up_to_s)

    def run(self, until_s: float) -> None:
        """Process events until that instant."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now, _, happens = heapq.heappop(self._heap)
            happens()
            self.check()
        self.now = until_s

    # ------------------------------------------------------------------ the daemon

    def _start_daemon(self) -> None:
        self.life += 1
        self.is_up = True
        known = list(self.state.notices.live.values()) if self.life > 1 else []
        record = gpus.record_of(self.state) if self.life > 1 else None
        if record is None:
            self._joined.clear()
        if self.chance("claim_lost", 0.3):
            self.record = None
        life = self.life
        self.committer = Committer(
            self.store,
            self.record,
            self.step,
            lambda s, happens: self.at(
                self.delay_s(SLOW_REQUEST * s if self.chance("slow_requests", 0.3) else s),
                lambda: happens() if life == self.life else None,
            ),
        )
        settings = Settings(
            reserve_s=RESERVE_S,
            signals_trainer=not self.has_hooks,
            checkpoint_interval_s=self.interval_s,
            vm="vm",
            boot_id=BOOT,
        )
        self.state = State(
            settings=settings, starts=StartState(known=self.committer.claimant.starts)
        )
        if record is not None:
            self.state = gpus.resumed(self.state, record)
        self._gpu_notices = GpuNotices()
        self._fenced_by = 0
        self._members.clear()
        self._stands.clear()
        if self.gpu is not None:
            self._read_gpu(1.0)
        self._flush_id, self._link = "", Link()
        self._settling = {}
        self._found = ProcessFound("")
        if not self.chance("notices_lost", 0.3):
            for each in known:
                if each.deadline_mono_s > self.now:
                    self.post(lambda each=each: NoticeRaised(each), 0.001)  # type: ignore[misc]
        self.post(self._scan_result, 0.3)
        self.committer.read_run()
        self._tick()
        if not self.has_hooks:
            self._looks()
            self.at(SETTLE_S + 0.4, lambda: self.post(self._scan_result, 0.1))
        if self.notice is not None:
            self._finds(self.notice, 1.0)
        for trainer, rank, until_s in self._dying:
            if until_s > self.now:
                self._joins_late(trainer, rank, until_s)
        for gone in {each.source for each in known} & self._withdrawn_sources:
            self.post(lambda gone=gone: NoticeWithdrawn(gone, "gone"), 1.0)  # type: ignore[misc]

    def stop_daemon(self, down_s: float = 0.0) -> None:
        """The daemon dies; its next life starts after this time, and the trainer reconnects to it."""
        self.record = self.committer.claimant.record
        self.life += 1
        self.is_up = False
        life = self.life
        for rank in [] if self.trainer is None else self.trainer.ranks:
            rank.is_connected = False

        def starts() -> None:
            if life == self.life:
                self._start_daemon()
                self.reconnect()

        if down_s:
            self.at(down_s, starts)
        else:
            starts()

    def gpu_becomes(self, health: GpuHealth, *, within_s: float = 0.5) -> None:
        """The GPU changes its health, of which the daemon learns within this time."""
        self.gpu = GpuStatus(
            pci="0000:00:00", index=0, health=health, reason="an Xid", since_mono_s=self.now
        )
        self._read_gpu(within_s)

    def _read_gpu(self, within_s: float) -> None:
        life = self.life

        def happens() -> None:
            if life != self.life or self.gpu is None:
                return
            before = self.state.gpus.status.get(self.gpu.pci)
            had_failed = before is not None and before.health.has_failed
            if self.gpu.health.has_failed and not had_failed and self.trainer is not None:
                self.suspect_starts |= {self.trainer.process_id} & self._joined
            self.step(GpusRead((self.gpu,)))
            if self.trainer is not None and self.life in self.trainer.line.lives:
                self._joined.add(self.trainer.process_id)  # it was here before the first reading
            self._look_at_gpu()

        self.at(self.delay_s(within_s), happens)

    def _look_at_gpu(self) -> None:
        """The source of notices looks at the health that it has read."""
        life = self.life
        for event in self._gpu_notices.update(tuple(self.state.gpus.status.values()), self.now):
            if life == self.life:
                self.step(event)

    def post(self, event: Callable[[], Event], delay_up_to_s: float) -> None:
        """Post an event to the daemon after a delay, if it is still the same daemon."""
        life = self.life

        def happens() -> None:
            if life == self.life and self.is_up:
                self.step(event())

        self.at(self.delay_s(delay_up_to_s), happens)

    def step(self, event: Event) -> None:
        if self.exit is not None:
            return
        self._note(event)
        self._stepped_s = self.now
        self.state, actions = machine.step(self.state, event, self.now)
        for action in actions:
            self._carry_out(action)
        self._check_not_safe()
        self._wake_in_time()
        ordered = [each.message if isinstance(each, Send) else each for each in actions]
        is_moment = any(isinstance(each, _MOMENTS) for each in ordered)
        if self.chance("restart", 0.05 if is_moment else 0.01):
            self.stop_daemon(self.random.choice((0.0, 0.0, self.delay_s(15.0))))

    def _note(self, event: Event) -> None:
        """Tell the witness which starts this life of the daemon knows, and note what it is told."""
        self._note_position(event)
        match event:
            case TrainerJoined(view) if view.start_id:
                self._members.add((view.start_id.partition("~")[0], view.rank))
                self._reaches(view.start_id)
            case StartBegun(_, start_id) | ProcessFound(start_id) if start_id:
                self._reaches(start_id)
            case TrainerProgress(start_id=start_id) if start_id:
                self._reaches(start_id)
            case Scanned():
                for staged in event.staged:
                    self._reaches(self.witness.sets[staged.id.nonce].line)
            case _:
                pass

    def _note_position(self, event: Event) -> None:
        match event:
            case FenceFound(generation, start_id=""):
                self._fenced_by = generation
            case TrainerAccepted(connection, request_id, step):
                self._stands[connection] = request_id, step
            case StartBegun(connection):  # what it accepted was of another start
                self._stands.pop(connection, None)
            case TrainerLeft(connection, is_goodbye=True) if self._leaver is not None:
                self._stands[connection] = "", self._leaver.step
            case (
                TrainerJoined(TrainerView(connection=connection, parent=parent))
                | TrainerProgress(connection=connection, parent=parent)
            ) if parent.is_known:
                self._reported.add(connection)
            case _:
                pass

    def _reaches(self, line_id: str) -> None:
        self.witness.reaches_daemon(line_id, self.life, self.now)
        if self.state.gpus.status:
            self._joined.add(line_id.partition("~")[0])

    def _wake_in_time(self) -> None:
        """A tick right after the next follow-up is due: those of the daemon come more often than ours."""
        due_s = followup.wait_s(self.state, self.now)
        if due_s is not None and 0 < due_s < TICK_S and self.now + due_s > self._woken_s + 0.1:
            life, self._woken_s = self.life, self.now + due_s
            self.at(due_s + 0.05, lambda: self.step(Tick()) if life == self.life else None)

    def _tick(self) -> None:
        life = self.life

        def happens() -> None:
            if life != self.life or self.exit is not None:
                return
            tick_s = TICK_QUIET_S if self.state.evacuation is None else TICK_S
            if self.now > self._stepped_s + tick_s - 0.001:
                self.step(Tick())
            if self.gpu is not None:
                self._look_at_gpu()
            self.at(TICK_S, happens)

        self.at(TICK_S, happens)

    def _carry_out(self, action: Action) -> None:
        trainer = self.trainer
        match action:
            case Send(Request(request_id, _, seconds_left), connections):
                if FOLLOW_UP in request_id:
                    self.follow_ups.setdefault(request_id, seconds_left)
                for rank in self._ranks_of(connections):
                    self._asked(rank, request_id)
            case Send(Target(request_id, target), connections):
                for rank in self._ranks_of(connections):
                    self._targeted(rank, request_id, target)
            case Send(NotRequested(), connections):
                if trainer is not None and self._ranks_of(connections):
                    self._ends_at_sigterm(trainer)
            case SignalTrainer(request_id):
                self._signal(request_id)
            case Send(Withdrawn(request_id)):
                if trainer is not None:
                    self._withdrawn(trainer, request_id)
            case Send(StartDrawn(start_id), connections):
                if trainer is not None and trainer.process_id == start_id.partition("~")[0]:
                    trainer.is_misled |= not self._orphans.isdisjoint(connections)
                for rank in self._ranks_of(connections):
                    self._learns_start(rank, start_id)
            case StartFlush():
                if not action.is_sealed:
                    self.early.append(action)
                self._flush(action)
            case CancelFlush(flush_id):
                if flush_id == self._flush_id:
                    self._flush_id, self._link = "", Link()
            case CommitManifest():
                self.committer.commit(action)
            case Rescan():
                self.post(self._scan_result, 0.3)
            case ClaimGeneration():
                self.committer.claim(action)
            case WithdrawClaim():
                self.committer.withdraw_claim()
            case SetAside(directories):
                raise Broken(f"I18: {directories} are set aside on a single VM")
            case Prune(directories):
                self._prune(directories)
            case Conclude():
                self._concluded(action)
            case Mark(id_, "notice", _):
                self.witness.opens(id_, self.now)
            case Exit():
                self.exit = action
            case _:
                pass

    def _ranks_of(self, connections: tuple[int, ...]) -> list[Rank]:
        ranks = [] if self.trainer is None else self.trainer.ranks
        return [rank for rank in ranks if rank.is_connected and rank.connection in connections]

    # ------------------------------------------------------------------ staging

    def _scan_result(self) -> Scanned:
        growing = () if self.hides_growing else tuple(self.growing)
        settled, pending = list(self.staging), [self.writing] if self.writing else []
        for staged in self.adopted:
            first_s = self._settling.setdefault(staged.id.nonce, self.now)
            if self.now >= first_s + SETTLE_S:
                settled.append(staged)
            else:
                pending.append(staged.directory)
        return Scanned(self.now, tuple(settled), growing=growing, pending=tuple(pending))

    def _new_set(
        self,
        step: int,
        request_id: str = "",
        *,
        begun_s: float | None = None,
        is_final: bool = False,
    ) -> Staged:
        nonce = f"{self.random.getrandbits(32):08x}"
        self._written_s[nonce] = self.now
        start_id = "" if self.trainer is None else self.trainer.start_id
        whole = a_set(
            step,
            nonce,
            size_bytes=self.size_bytes // FILES,
            request_id=request_id,
            framework="swansong" if self.has_hooks else "torch",
            start_id=start_id,
            is_final=is_final,
            began_ticks=0 if self.trainer is None else _ticks(self.trainer),
        )
        first_s = self.now if begun_s is None else begun_s
        moments = [first_s + (self.now - first_s) * i / (FILES - 1) for i in range(FILES)]
        files = tuple(
            StagedFile(
                path=f"{i}.bin",
                size_bytes=whole.files[0].size_bytes,
                mtime_ns=round(moments[i] * 1e9),
                inode=i,
            )
            for i in range(FILES)
        )
        line = self.trainer.line.id if self.trainer is not None else start_id
        self.witness.sets[nonce] = Point(line, step)
        return replace(whole, files=files)

    def _seal(self, staged: Staged) -> Staged:
        self.staging.append(staged)
        self._record_sealed(staged)
        self.post(self._scan_result, 3.0 if self.chance("late_scan", 0.5) else 0.1)
        return staged

    def _record_sealed(self, staged: Staged) -> None:
        self.sealed.append(staged)
        line = self.witness.sets[staged.id.nonce].line
        if line.partition("~")[0] in self.suspect_starts:
            self.suspect_sets.add(staged.id.nonce)

    def _loadable(self) -> list[Point]:
        """The states that a start on this VM may load from staging."""
        # No start loads a set without a place among the commits: its start was overtaken before its claim.
        overtaken = {
            s.id for s in self.state.starts.known if not s.is_open and s.generation is None
        }
        here = [each for each in (*self.staging, *self.adopted) if each.id.start not in overtaken]
        nonces = [staged.id.nonce for staged in here]
        return [self.witness.sets[nonce] for nonce in nonces if nonce not in self.rejected]

    # ------------------------------------------------------------------ the trainer starts and ends

    def restart_trainer(self, *, is_behind: bool = False) -> None:
        """The trainer ends, and another one starts from the newest state, or from one before it."""
        if self.trainer is not None:
            self._end(self.trainer)
        self._trainer_starts(is_behind=is_behind)

    def rolls_back(self) -> None:
        """The trainer loads an older state in the same process, if it has one and is idle."""
        if self.trainer is not None and not self.trainer.is_loading:
            self._rolls_back(self.trainer)

    def finishes(self) -> bool:
        """The training seals the end of the run and says goodbye, if its ranks can."""
        trainer = self.trainer
        if trainer is None or not trainer.has_hooks or not self._is_even(trainer):
            return False
        known = all(rank.is_connected and rank.knows_start for rank in trainer.ranks)
        if (
            trainer.is_loading
            or trainer.is_saving
            or not known
            or trainer.step <= trainer.first_step
        ):
            return False
        self._seal(self._new_set(trainer.step, is_final=True))
        self.is_over = True
        self._end(trainer, is_goodbye=True)
        return True

    @property
    def take_s(self) -> float:
        """Longest time from a request to the commit of its checkpoint, without faults."""
        send_s = self.size_bytes / self.bandwidth
        return self.boundary_s + self.save_s + 2 * send_s + RESERVE_S

    def start_trainer(self) -> None:
        """A trainer resumes from the newest state."""
        self._trainer_starts()

    def _trainer_starts(self, *, is_behind: bool = False) -> None:
        """A trainer resumes from the newest state, by the daemon's rule, or from an older one, by its own."""
        if self.is_over or self.trainer is not None:
            return
        is_behind = bool(self.sealed) and (is_behind or self.chance("starts_behind", 0.5))
        rules = ("older", "unnamed", "silent", "asks, then older")
        loads = self.random.choice(rules) if is_behind else "newest"
        self._count += 1
        number = self._count
        start_id = f"start-{number}" if self.has_hooks else f"{PROCESS_PREFIX}{number}"
        ranks = [
            Rank(number=each, pid=10 * number + each, knows_start=each == 0 or self.has_store)
            for each in range(self.world_size)
        ]
        line = self.witness.begins(start_id)
        trainer = Trainer(number, start_id, line, ranks, self.has_hooks, loads, self.now)
        self.trainer, self._leaver = trainer, None
        self.launched_s[start_id] = self.now
        for rank in ranks if self.has_hooks else ():
            self._connect(rank)
        if loads == "newest":
            self.at(self.delay_s(1.0), lambda: self._asks(trainer))
        else:
            point = self._older()
            line.loads = None if loads in ASKING else point
            load_s = self.delay_s(LOAD_S)
            if loads == "asks, then older":
                self.at(load_s, lambda: self._begins_over(trainer))
                load_s += 0.1 + self.delay_s(LOAD_S)
            self.at(load_s, lambda: self._begins(trainer, point))
        self._trains(trainer)

    def _begins_over(self, trainer: Trainer) -> None:
        """The start cannot load the checkpoint from the daemon's answer, and reports this to the daemon."""
        trainer.begins_over = True
        for rank in trainer.ranks if trainer is self.trainer else ():
            if rank.is_connected:
                self._repeats(trainer, rank)

    def _older(self) -> Point:
        """A state that was sealed some time ago, often one of the step of the newest commit."""
        sealed = self.sealed
        newest = max((ref for ref, _ in self._placed), default=None)
        if newest is not None and self.random.random() < 0.7:
            sealed = [each for each in sealed if each.id.step == newest.step] or sealed
        return self.witness.sets[self.random.choice(sealed).id.nonce]

    def _asks(self, trainer: Trainer) -> None:
        """Resume by the daemon's rule, as soon as the start may: production code decides both."""
        if trainer is not self.trainer or not trainer.is_loading:
            return
        try:
            point = self._choice(trainer)
        except StoreError:
            point = None
        if point is None:
            self.at(0.3, lambda: self._asks(trainer))
            return
        limit_s = 25.0 if self.chance("loads_slowly", 0.5) else LOAD_S
        self.at(self.delay_s(limit_s), lambda: self._begins(trainer, point))

    def _choice(self, trainer: Trainer) -> Point | None:
        """The newest state by the daemon's rule; None while it may not answer."""
        if not self.is_up or self.exit is not None:
            return None
        query = RestoreQuery("q", start_id=trainer.start_id if trainer.has_hooks else "")
        is_known = not trainer.has_hooks or trainer.ranks[0].is_connected
        if not is_known or not resume.may_answer(self.state, query):
            return None
        life = self.life
        self.step(self._scan_result())
        if life != self.life or trainer is not self.trainer:
            return None
        state = self.state
        newest = commit.newest_whole_commit(self.store, KEYS, near=state.generation or 0)
        local = resume.newest_local(state, newest)
        if local is not None:
            return self.witness.sets[local.id.nonce]
        return Point("", 0) if newest is None else self._point_of(newest)

    def _point_of(self, ref: CommitRef) -> Point:
        made = self._manifest_of(ref)
        return self.witness.sets.get(made.nonce, Point(OTHER, made.step))

    def _manifest_of(self, ref: CommitRef) -> Manifest:
        return manifest.decode(self.store.objects[KEYS.commit(ref, 0, 1)])

    def _begins(self, trainer: Trainer, point: Point) -> None:
        """It has loaded this state, and trains from here."""
        if trainer is not self.trainer or not trainer.is_loading:
            return
        trainer.is_loading, trainer.reading = False, ""
        trainer.line.loaded = point
        trainer.line.step = point.step
        trainer.first_step = point.step
        if trainer.loads in ("newest", "older", "asks, then older"):
            trainer.parent = Parent(point.line, point.step)
        for rank in trainer.ranks:
            rank.step = point.step
            rank.owes_start = trainer.has_hooks and trainer.loads != "silent"
            self._report_start(rank)
            if rank.standing and rank.accepted > point.step:  # with a step of the start before
                rank.declined.add(rank.standing)
                self._declines(rank, rank.standing)
                rank.standing = ""

    def _report_start(self, rank: Rank) -> None:
        """The rank reports what its start has loaded, as soon as it can."""
        trainer = self.trainer
        if trainer is None or not (rank.owes_start and rank.knows_start and rank.is_connected):
            return
        rank.owes_start = False
        report = TrainerProgress(
            rank.connection, trainer.first_step, start_id=trainer.start_id, parent=trainer.parent
        )
        self.post(lambda: report, 0.01)

    def reconnect(self) -> None:
        """The trainer connects to the next daemon: soon, or only after a long time."""
        trainer = self.trainer
        if trainer is None or not trainer.has_hooks:
            return
        for rank in trainer.ranks:
            is_slow = self.reconnects_slowly and rank.life and self.random.random() < 0.5
            self._connect(rank, within_s=60.0 if is_slow else 1.0)

    def _joins_late(self, trainer: Trainer, rank: Rank, until_s: float) -> None:
        """A rank whose trainer is over connects to the next daemon before its process ends."""
        life = self.life
        view = self._view(trainer, rank)

        def joins() -> None:
            if life != self.life or not self.is_up or self.exit is not None:
                return
            if any(each.rank == rank.number for each in self.state.ranks.trainers):
                return  # it is refused
            self._count += 1
            connection = self._count
            self.fired.add("orphan")
            self._orphans.add(connection)
            self.step(TrainerJoined(replace(view, connection=connection, greeted_mono_s=self.now)))
            left = TrainerLeft(connection, exited=True, reason="x")
            life_then = self.life
            self.at(
                max(0.001, until_s - self.now),
                lambda: self.step(left) if life_then == self.life and self.is_up else None,
            )

        self.at(self.delay_s(1.0), joins)

    def _view(self, trainer: Trainer, rank: Rank) -> TrainerView:
        return TrainerView(
            connection=rank.connection,
            pid=rank.pid,
            process_start=_ticks(trainer) + rank.number,
            rank=rank.number,
            world_size=self.world_size,
            local_world_size=self.world_size,
            step=rank.step,
            save_s=trainer.saved_s,
            takes_periodic=self.takes_periodic,
            takes_follow_ups=self.takes_follow_ups,
            start_id=trainer.start_id if rank.knows_start else "",
            parent=trainer.parent,
            greeted_mono_s=self.now,
        )

    def _connect(self, rank: Rank, *, within_s: float = 1.0) -> None:
        life, trainer = self.life, self.trainer
        assert trainer is not None

        def joins() -> None:
            if life != self.life or not self.is_up or trainer is not self.trainer:
                return  # the next daemon is joined by reconnect(), or it has died meanwhile
            if rank.is_connected:
                return
            self._count += 1
            rank.connection, rank.is_connected, rank.life = self._count, True, life
            view = self._view(trainer, rank)
            self.step(TrainerJoined(view))
            if life == self.life and rank.is_connected:
                self._repeats(trainer, rank)

        self.at(self.delay_s(within_s), joins)

    def _repeats(self, trainer: Trainer, rank: Rank) -> None:
        """Right after the hello: the report of the start, the query, and the last answer."""
        self._report_start(rank)
        if trainer.is_loading and trainer.loads in ASKING and rank.knows_start:
            if trainer.begins_over:
                self.post(lambda: StartBegun(rank.connection, trainer.start_id), 0.01)
            else:
                self.post(lambda: RestoreAsked(trainer.start_id), 0.01)
        if rank.standing and rank.target is None:
            accepted = TrainerAccepted(rank.connection, rank.standing, rank.accepted)
            self.post(lambda: accepted, 0.02)

    def _learns_start(self, rank: Rank, start_id: str) -> None:
        """The daemon tells a rank the start that rank 0 has drawn."""
        trainer = self.trainer
        assert trainer is not None
        if self.has_store:
            raise Broken(f"I4: a rank that knows its start is told {start_id}")
        process_id = start_id.partition("~")[0]
        if process_id == trainer.process_id:
            self._members.add((process_id, rank.number))
        else:
            pids = {each.pid for each in trainer.ranks}
            has_first = any(t.rank == 0 and t.pid not in pids for t in self.state.connected)
            if has_first and (process_id, rank.number) not in self._members:
                trainer.is_misled = True  # the hooks keep the first id that they learn
                return  # known: the end of the old rank 0 is not seen yet
            raise Broken(f"I4: a rank of {trainer.start_id} is told {start_id}")

        def happens() -> None:
            if trainer is self.trainer and rank.is_connected and not rank.knows_start:
                rank.knows_start = True
                self._repeats(trainer, rank)

        self.at(self.delay_s(0.05), happens)

    def _end(self, trainer: Trainer, *, is_goodbye: bool = False) -> None:
        """The processes end, one after the other if they hang."""
        self.trainer = None
        is_known = all(rank.is_connected and rank.life == self.life for rank in trainer.ranks)
        self._leaver = trainer if is_goodbye and is_known else None
        self.writing = ""
        self.growing = []
        within_s = 3.0 if self.chance("dies_slowly", 0.5) else 0.1
        if "orphan" in self.faults and trainer.has_hooks and not is_goodbye:
            until_s = self.now + self.delay_s(10.0)
            # Without a store, one of rank 0 names the ranks of the next start.
            ranks = trainer.ranks if self.has_store else trainer.ranks[1:]
            self._dying = [(trainer, rank, until_s) for rank in ranks]
        for rank in trainer.ranks if trainer.has_hooks else ():
            if rank.life == self.life:
                says_so = is_goodbye and rank.is_connected
                left = TrainerLeft(rank.connection, exited=True, reason="x", is_goodbye=says_so)
                if says_so:
                    self.step(TrainerProgress(rank.connection, rank.step))
                self.post(lambda left=left: left, within_s)  # type: ignore[misc]
        for request_id in trainer.signalled:
            exited = SignalledExited(request_id, trainer.pid)
            self.post(lambda exited=exited: exited, 0.1)  # type: ignore[misc]

    def _dies(self, trainer: Trainer) -> None:
        self._end(trainer)
        self._may_start_again()

    def _may_start_again(self) -> None:
        if self.random.random() < 0.7:
            self.at(self.delay_s(30), self._trainer_starts)

    def _finishes(self, trainer: Trainer) -> None:
        """Training is complete: the script saves the end of the run, or only leaves."""
        if trainer.has_hooks and self.random.random() < 0.5 and self._is_even(trainer):
            self._seal(self._new_set(trainer.step, is_final=True))
        self._end(trainer, is_goodbye=True)
        self._may_start_again()

    def _rolls_back(self, trainer: Trainer) -> None:
        """Load an older state in the same process: with hooks by ``rollback()``, else without a report."""
        own = [
            staged
            for staged in self.sealed
            if self.witness.sets[staged.id.nonce].line == trainer.line.id
            and staged.id.step < trainer.step
        ]
        is_idle = not any(rank.standing for rank in trainer.ranks) and not trainer.is_saving
        if not own or not is_idle or not self._is_even(trainer):
            return
        knows = all(rank.is_connected and rank.knows_start for rank in trainer.ranks)
        if trainer.has_hooks and not (self.is_up and knows):
            return
        chosen = own[-2] if len(own) > 1 and self.random.random() < 0.6 else self.random.choice(own)
        point = self.witness.sets[chosen.id.nonce]
        trainer.further += 1
        trainer.start_id = f"{trainer.process_id}~{trainer.further}"
        trainer.line = self.witness.begins(trainer.start_id)
        trainer.is_loading = True
        if not trainer.has_hooks:
            trainer.line.loads = point
            self.at(self.delay_s(LOAD_S), lambda: self._begins(trainer, point))
            return
        trainer.parent, trainer.loads = UNKNOWN_PARENT, "newest"
        for rank in trainer.ranks:
            begun = StartBegun(rank.connection, trainer.start_id)
            self.post(lambda begun=begun: begun, 0.05)  # type: ignore[misc]
        nonce, give_up_s = chosen.id.nonce, self.now + BUDGET_S
        self.at(0.1, lambda: self._rolled_back(trainer, point, nonce, give_up_s))

    def _rolled_back(self, trainer: Trainer, point: Point, chosen: str, give_up_s: float) -> None:
        """The daemon answers under the generation of the new start, and the state is loaded."""
        query = RestoreQuery("q", rollback=trainer.further, start_id=trainer.start_id)
        life = self.life
        may_answer = self.is_up and self.exit is None and resume.may_answer(self.state, query)
        if may_answer and trainer is self.trainer:
            self.step(self._scan_result())
        if trainer is not self.trainer:
            return
        if not may_answer or life != self.life:
            if self.now > give_up_s:
                self._dies(trainer)
            else:
                self.at(0.3, lambda: self._rolled_back(trainer, point, chosen, give_up_s))
            return
        later = [s.id.nonce for s in self.staging if s.id.step > point.step]
        self.rejected.update(later)
        here = [s.id.nonce for s in self.staging]
        trainer.reading = chosen if chosen in here else ""
        self.step(RolledBack(point.step))
        self.at(self.delay_s(LOAD_S), lambda: self._begins(trainer, point))

    # ------------------------------------------------------------------ the training

    def _is_even(self, trainer: Trainer) -> bool:
        """Whether all ranks are at the same step."""
        return len({rank.step for rank in trainer.ranks}) == 1

    def _trains(self, trainer: Trainer) -> None:
        def happens() -> None:
            if trainer is not self.trainer:
                return
            self.at(self.boundary_s, happens)
            has_saved, trainer.has_saved = trainer.has_saved, False
            if trainer.is_loading or trainer.is_saving or has_saved:
                return  # a step takes its whole time, also after a save
            first = trainer.ranks[trainer.number % len(trainer.ranks)]
            if self.skew:
                self._completes(trainer, [first])
                others = [rank for rank in trainer.ranks if rank is not first]
                self.at(self.skew * self.boundary_s, lambda: self._completes(trainer, others))
            else:
                self._completes(trainer, trainer.ranks)
            self._trouble(trainer)

        self.at(self.boundary_s, happens)

    def _completes(self, trainer: Trainer, ranks: list[Rank]) -> None:
        """These ranks complete a step, unless they stand for a request; none is two steps ahead."""
        if trainer is not self.trainer or trainer.is_loading or trainer.is_saving:
            return
        before = min(rank.step for rank in trainer.ranks)
        for rank in ranks:
            if not rank.standing and rank.step == before:
                rank.step += 1
        trainer.line.step = trainer.step
        for rank in ranks:
            self._reports(rank)
        last = min(rank.step for rank in trainer.ranks)
        if last > before and last % self.every_steps == 0 and self._is_even(trainer):
            self._saves_by_itself(trainer)

    def _reports(self, rank: Rank) -> None:
        if rank.is_connected and self.now >= rank.reported_s + self.report_s:
            rank.reported_s = self.now
            report = TrainerProgress(rank.connection, rank.step, step_s=self.boundary_s)
            self.post(lambda: report, 0.1)

    def _trouble(self, trainer: Trainer) -> None:
        if self.chance("trainer_death", 0.01):
            self._dies(trainer)
        elif self.chance("rolls_back", 0.02):
            self._rolls_back(trainer)
        elif self.chance("ends", 0.005):
            self._finishes(trainer)
        elif trainer.has_hooks and not trainer.has_sigterm and self.chance("sigterm", 0.1):
            trainer.has_sigterm = True
            self._asks_for_request(trainer)
            self.at(SIGTERM_LIMIT_S, lambda: self._ends_at_sigterm(trainer))
        elif trainer.has_hooks and self.chance("disconnects", 0.02):
            rank = self.random.choice(trainer.ranks)
            if rank.is_connected:
                rank.is_connected = False
                lost = TrainerLeft(rank.connection, exited=False, reason="reset")
                self.post(lambda: lost, 0.01)
                self.at(0.02, lambda: self._connects_again(trainer, rank))

    def _asks_for_request(self, trainer: Trainer) -> None:
        """Ask the daemon for a last checkpoint, again after a lost query."""
        if trainer is not self.trainer:
            return
        rank = trainer.ranks[-1]
        if rank.is_connected and rank.life == self.life and not rank.standing:
            self.post(lambda: RequestAsked(rank.connection, rank.step), 0.05)
        self.at(ASK_AGAIN_S, lambda: self._asks_for_request(trainer))

    def _ends_at_sigterm(self, trainer: Trainer) -> None:
        if trainer is self.trainer and trainer.has_sigterm:
            self._end(trainer, is_goodbye=True)
            self._may_start_again()

    def _connects_again(self, trainer: Trainer, rank: Rank) -> None:
        if trainer is self.trainer and not rank.is_connected and self.is_up:
            self._connect(rank, within_s=self.random.choice((1.0, 20.0)))

    def _saves_by_itself(self, trainer: Trainer) -> None:
        if not trainer.has_hooks:
            self._process_saves(trainer)
        elif (
            all(rank.knows_start and rank.life for rank in trainer.ranks) and not trainer.is_saving
        ):
            self._seal(self._new_set(trainer.step))

    def _process_saves(self, trainer: Trainer) -> None:
        """A trainer without hooks writes a set in its training loop."""
        step, begun_s = trainer.step, self.now
        trainer.is_saving = True
        self.writing = f"checkpoint-{step}"
        kept = [s for s in self.adopted if s.id.step != step or not self.overwrites]
        self.adopted = kept[-self.keeps :]

        def done() -> None:
            if trainer is not self.trainer:
                return
            trainer.is_saving, self.writing = False, ""
            trainer.has_saved = True
            staged = replace(self._new_set(step, begun_s=begun_s), begun_mono_s=begun_s)
            self.adopted.append(staged)
            self._record_sealed(staged)
            for delay_s in (0.1, SETTLE_S + 0.2):
                self.at(delay_s, lambda: self.post(self._scan_result, 0.1))

        self.at(self.save_s, done)

    # ------------------------------------------------------------------ requests

    def _asked(self, rank: Rank, request_id: str) -> None:
        trainer = self.trainer
        assert trainer is not None
        is_periodic = request_id.startswith("periodic-")
        if trainer.process_id in self.suspect_starts and not is_periodic:
            raise Broken("suspect training is asked for a checkpoint")
        if (request_id, rank.connection) in self.asks:
            raise Broken("I9: a rank is asked twice on one connection")
        self.asks.add((request_id, rank.connection))
        # The start before may have answered a daemon that has died since.
        is_answered = any(staged.request_id == request_id for staged in self.sealed)
        if not request_id.startswith(UNTIED) and not is_answered:
            self.witness.is_asked(request_id, trainer.line.id)
        rank.asked = request_id
        if self.hangs and rank.number == self.world_size - 1:
            self.hangs -= 1
            self.at(0.2, lambda: self._declines(rank, request_id))
            return
        if "never_answers" in self.faults and rank.number == self.world_size - 1:
            self.fired.add("never_answers")
            return
        self.at(
            # The hooks answer in a thread of their own, and not at the next boundary.
            self.delay_s(self.accept_s or min(1.0, self.boundary_s)),
            lambda: self._accepts(trainer, rank, request_id),
        )

    def _accepts(self, trainer: Trainer, rank: Rank, request_id: str) -> None:
        if trainer is not self.trainer or request_id in trainer.withdrawn:
            return
        if not rank.is_connected or rank.asked != request_id:
            return
        answered = [
            s for s in self.sealed if s.request_id == request_id and s.id.start == trainer.start_id
        ]
        if answered:  # the answer is repeated, the save is not
            self._says_sealed(trainer, rank, answered[-1])
            return
        if request_id in rank.declined:
            self._declines(rank, request_id)
            return
        if rank.standing != request_id:
            rank.standing, rank.target, rank.accepted = request_id, None, rank.step
            self.at(
                AGREEMENT_S + self.boundary_s, lambda: self._gives_up(trainer, rank, request_id)
            )
        accepted = TrainerAccepted(rank.connection, request_id, rank.accepted)
        self.post(lambda: accepted, 0.05)

    def _gives_up(self, trainer: Trainer, rank: Rank, request_id: str) -> None:
        """The target did not arrive in time: training continues."""
        if trainer is not self.trainer or rank.standing != request_id or rank.target is not None:
            return
        if trainer.is_loading:
            self.at(AGREEMENT_S, lambda: self._gives_up(trainer, rank, request_id))
            return
        rank.standing = ""
        rank.declined.add(request_id)
        self._declines(rank, request_id)

    def _declines(self, rank: Rank, request_id: str) -> None:
        failed = TrainerFailed(rank.connection, request_id, "declined: no target in time")
        self.post(lambda: failed, 0.05)

    def _targeted(self, rank: Rank, request_id: str, target: int) -> None:
        trainer = self.trainer
        assert trainer is not None
        if rank.standing != request_id or rank.target is not None:
            return
        rank.target = target
        if any(each.standing != request_id or each.target is None for each in trainer.ranks):
            return
        is_late = target <= max(each.accepted for each in trainer.ranks)
        if is_late and len(trainer.ranks) > 1:  # they have made further steps since they accepted
            self._fails(trainer, request_id, f"step {target} had already passed")
            return
        self._saves_soon(trainer, target, request_id)

    def _fails(self, trainer: Trainer, request_id: str, reason: str) -> None:
        """No set answers this request; the ranks repeat that after a reconnect."""
        for rank in trainer.ranks:
            rank.declined.add(request_id)
            rank.standing = ""
        failed = TrainerFailed(trainer.ranks[0].connection, request_id, reason)
        self.post(lambda: failed, 0.05)

    def _saves_soon(self, trainer: Trainer, target: int, request_id: str) -> None:
        """All ranks complete the target step, as soon as they have loaded a state."""
        if trainer is not self.trainer:
            return
        if trainer.is_loading:
            self.at(0.5, lambda: self._saves_soon(trainer, target, request_id))
            return
        step = max(target, trainer.step + 1)
        ahead = step - min(rank.step for rank in trainer.ranks)
        self.at(ahead * self.boundary_s, lambda: self._saves(trainer, step, request_id))

    def _withdrawn(self, trainer: Trainer, request_id: str) -> None:
        for rank in trainer.ranks:
            if rank.standing == request_id and not trainer.is_saving:
                rank.standing = ""
        if request_id.startswith(UNTIED) or FOLLOW_UP in request_id:
            trainer.withdrawn.add(request_id)

    def _saves(self, trainer: Trainer, step: int, request_id: str) -> None:
        if trainer is not self.trainer or request_id in trainer.withdrawn or trainer.is_loading:
            return
        if any(rank.standing != request_id for rank in trainer.ranks):
            return  # withdrawn, or it stands for another one by now
        trainer.is_saving = True
        for rank in trainer.ranks:
            rank.step = step
        trainer.line.step = step
        whole = self._new_set(step, request_id)

        def grows(final: int) -> None:
            """One file more is final."""
            is_begun = any(item.id == whole.id for item in self.growing)
            self.growing = [item for item in self.growing if item.id != whole.id]
            if trainer is not self.trainer or (final > 1 and not is_begun):
                return
            if self.chance("torn_save", 0.1):
                self.post(self._scan_result, 0.1)
                return
            part = replace(whole, directory=f"{whole.directory}.partial", files=whole.files[:final])
            self.growing.append(part)
            if final < FILES:
                self.at(self.save_s / FILES, lambda: grows(final + 1))

        self.at(self.save_s / FILES, lambda: grows(1))

        def done() -> None:
            is_whole = any(item.id == whole.id for item in self.growing)
            self.growing = [item for item in self.growing if item.id != whole.id]
            if trainer is not self.trainer:
                return
            trainer.is_saving = False
            for rank in trainer.ranks:
                if rank.standing == request_id:  # else it has accepted a more urgent request
                    rank.standing = ""
            if not is_whole:
                self._fails(trainer, request_id, "torn")
                return
            if self.chance("trainer_death", 0.1):
                self._dies(trainer)
                return
            trainer.saved_s = self.save_s
            if request_id.startswith("periodic-"):
                self.periodic.append(step)
            self._says_sealed(trainer, trainer.ranks[0], self._seal(whole))
            self._ends_at_sigterm(trainer)

        self.at(self.save_s * 1.01, done)

    def _says_sealed(self, trainer: Trainer, rank: Rank, staged: Staged) -> None:
        if trainer is self.trainer and rank.is_connected:
            said = TrainerSealed(rank.connection, staged.request_id, staged.id.step, self.save_s, 1)
            self.post(lambda: said, 0.05)

    # ------------------------------------------------------------------ signals

    def _look(self) -> None:
        """Post the process of a trainer without hooks if it is another one than before."""
        trainer, found = self.trainer, ProcessFound("")
        if trainer is not None:
            started_ns = round(trainer.launched_s * 1e9)
            found = ProcessFound(trainer.process_id, trainer.pid, started_ns)
        if found != self._found:
            self._found = found
            self.step(found)

    def _looks(self) -> None:
        life = self.life

        def happens() -> None:
            if life == self.life and self.exit is None:
                self._look()
                if life == self.life:
                    self.at(LOOK_S, happens)

        self.at(0.0, happens)  # before the notices of the earlier life

    def _signal(self, request_id: str) -> None:
        life = self.life
        if self.trainer is not None and self.trainer.process_id in self.suspect_starts:
            raise Broken("suspect training is asked for a checkpoint")

        def happens() -> None:
            if life != self.life or self.exit is not None:
                return
            self._look()
            if life != self.life:
                return
            trainer = self.trainer
            if trainer is None:
                self.step(SignalRefused(request_id, "no process runs"))
                return
            self.witness.is_asked(request_id, trainer.line.id)
            trainer.signalled.append(request_id)
            self._answers_signal(trainer)
            self.step(SignalSent(request_id, trainer.pid))

        self.at(self.delay_s(0.05), happens)

    def _answers_signal(self, trainer: Trainer) -> None:
        if "never_answers" in self.faults:
            self.fired.add("never_answers")
            return

        def saves() -> None:
            if trainer is not self.trainer:
                return
            if trainer.is_saving or trainer.is_loading:
                self.at(0.1, saves)
                return
            self._process_saves(trainer)
            if self.chance("ends", 0.3):  # many exit after the save
                self.at(self.save_s + 0.01, lambda: self._exits(trainer))

        self.at(self.delay_s(self.boundary_s), saves)

    def _exits(self, trainer: Trainer) -> None:
        if trainer is self.trainer:
            self._end(trainer)
            self._may_start_again()

    # ------------------------------------------------------------------ removals

    def _prune(self, directories: tuple[str, ...]) -> None:
        self.check_new()
        trainer = self.trainer
        newest = max((place for _, place in self._placed), default=(0, -1))
        for staged in self.staging:
            is_read = trainer is not None and staged.id.nonce == trainer.reading
            if staged.directory in directories and is_read:
                raise Broken(f"I18: {staged.directory} is deleted, and a rollback loads it")
            if staged.directory in directories and self._place(staged) > newest:
                self._expect_superseded(staged, directories)
        self.staging = [s for s in self.staging if s.directory not in directories]

    def _place(self, staged: Staged) -> tuple[int, int]:
        return self.witness.place(self.witness.sets[staged.id.nonce])

    def _expect_superseded(self, staged: Staged, directories: tuple[str, ...]) -> None:
        """An unsent set may be deleted only if two newer ones stay, and a healthy one if it was healthy.

        A set that a rollback has left needs no other one.
        """
        if self._has_lost_record or staged.id.nonce in self.rejected:
            return
        self.fired.add("unsent_set_dropped")
        known = {other.id.nonce: other for other in (*self.state.staging.staged, *self.staging)}
        stay = [other for other in known.values() if other.directory not in directories]
        newer = [other for other in stay if self._place(other) >= self._place(staged)]
        if len(newer) < staged_sets.NEWEST:
            raise Broken(f"I18: {staged.directory} is deleted, and nothing replaces it")
        if is_healthy(staged.health) and not any(is_healthy(other.health) for other in newer):
            raise Broken(
                f"I18: {staged.directory} is deleted, and no newer set is known to be healthy"
            )

    # ------------------------------------------------------------------ flush and commit

    def _flush(self, order: StartFlush) -> None:  # noqa: PLR0915 - one flush, and what befalls it
        held = {each.generation for each in self.committer.claimant.record.starts}
        if order.generation not in held:
            raise Broken(f"I4: a flush under generation {order.generation}")
        if not self._may_begin():
            raise Broken("V4: a flush is ordered in the reserve")
        self._flush_id = order.flush_id
        life = self.life
        staged = order.staged
        stored = self.stored_parts.setdefault(staged.id, {})
        parts = [
            (file.path, offset, min(PART_BYTES, file.size_bytes - offset))
            for file in staged.files
            for offset in range(0, file.size_bytes, PART_BYTES)
        ]
        left = [part for part in parts if part[:2] not in stored]
        fails_at = len(left) // 2 if self.chance("refused", 0.2) else None
        is_void = self.chance("void", 0.1)
        if self.voids and staged.request_id:
            self.voids, is_void = self.voids - 1, True
        if is_void:
            fails_at = len(left) // 2
        sent = 0.0
        # A flush of the same set, which has more files by now, continues with the part in flight.
        if self._link.busy_with != staged.id:
            self._link = Link(staged.id, self.now + LINK_START_S)

        def stands() -> bool:
            return life == self.life and self._flush_id == order.flush_id

        def fail(reason: str, *, void: bool) -> None:
            self._flush_id, self._link = "", Link()
            if void:
                self._is_changed(staged)
            self.step(FlushFailed(order.flush_id, reason, void=void))

        def moves() -> None:
            """The bytes since the last time: parts are sent one after the other."""
            nonlocal sent, fails_at
            if not stands():
                return
            link = self._link
            rate = self.rate()
            budget = rate * max(0.0, self.now - link.used_until_s)
            link.used_until_s = max(self.now, link.used_until_s)
            while left and budget > 0:
                if fails_at is not None and len(left) <= fails_at:
                    fail("a fault of the seed", void=is_void)
                    return
                if link.into_part == 0.0:
                    if not self._may_begin():
                        fail("no time is left", void=False)
                        return
                    self._note_beginning()
                path, offset, size_bytes = left[0]
                carried = min(budget, size_bytes - link.into_part)
                budget -= carried
                link.into_part += carried
                sent += carried
                if link.into_part > size_bytes - 1:
                    stored[path, offset] = size_bytes
                    del left[0]
                    link.into_part = 0.0
            if not left:
                self._link = Link()
            if left or not order.is_sealed:
                self.step(FlushProgress(order.flush_id, sum(stored.values()), round(sent)))
                if left:
                    self.at(next_s(rate), moves)
            else:
                ends()

        def next_s(rate: float) -> float:
            """When the link is looked at again: at the end of the last part, if it is near."""
            left_bytes = sum(part[2] for part in left) - self._link.into_part
            start_s = max(0.0, self._link.used_until_s - self.now)
            look_s = LINK_QUIET_S if self.state.evacuation is None else LINK_S
            return min(look_s, start_s + left_bytes / rate) if rate else LINK_S

        def ends() -> None:
            if not self._is_there(staged):
                fail("vanished", void=True)
                return
            self._flush_id = ""
            shards = shards_of(staged, f"{life}/{order.flush_id}/{order.generation}")
            for chunk in chunks_of(shards):  # the name and the size matter, the content does not
                self.store.write(chunk.key, str(chunk.size_bytes).encode())
            vanishes = self.vanishes and bool(staged.request_id)
            if staged in self.staging and (vanishes or self.chance("vanishes", 0.1)):
                self.staging.remove(staged)
            self.post(lambda: Flushed(order.flush_id, shards, bytes_sent=round(sent)), 0.05)

        self.at(next_s(self.bandwidth), moves)

    @property
    def _has_lost_record(self) -> bool:
        """Without the record of the claims, the daemon cannot place the sets of starts that are over."""
        return "claim_lost" in self.fired

    def _is_changed(self, staged: Staged) -> None:
        """The files of a set are not those of its seal any more: it is no set from now on."""
        self.rejected.add(staged.id.nonce)
        self.staging = [other for other in self.staging if other.id != staged.id]
        self.adopted = [other for other in self.adopted if other.id != staged.id]

    def _is_there(self, staged: Staged) -> bool:
        return any(other.id == staged.id for other in (*self.staging, *self.adopted))

    def _may_begin(self) -> bool:
        """The limit that the retrying store applies."""
        evacuation = self.state.evacuation
        if evacuation is None:
            return True
        left_s = evacuation.deadline_mono_s - self.now
        return not 0 < left_s <= RESERVE_S

    def _note_beginning(self) -> None:
        evacuation = self.state.evacuation
        if evacuation is not None:
            self.begun.append(evacuation.deadline_mono_s - self.now)

    def rate(self) -> float:
        """Current bandwidth in bytes/s; faults reduce it to a tenth or to zero."""
        if self.now >= self._slow_until_s:
            self._slow_factor = 1.0
            if self.chance("slow_network", 0.02):
                self._slow_factor = self.random.choice((0.1, 0.1, 0.0))
                self._slow_until_s = self.now + self.delay_s(60 if self._slow_factor else 5)
        return self.bandwidth * self._slow_factor

    def ends_slowness(self) -> None:
        """The network has its full bandwidth again."""
        self._slow_until_s = self.now

    # ------------------------------------------------------------------ the weather

    def raise_notice(
        self, in_s: float, severity: Severity = Severity.IMMINENT, source: str = "aws.spot"
    ) -> None:
        self.notice = a_notice(
            source,
            deadline_mono_s=self.now + in_s,
            severity=severity,
            identity=f"{source}:{self.now}",
        )
        notice = self.notice
        self._withdrawn_sources.discard(source)
        self._finds(notice, 0.2)

    def _finds(self, notice: Notice, within_s: float) -> None:
        """A source finds the notice, unless it was withdrawn by then: a source posts in order."""

        def found() -> Event:
            if notice.source in self._withdrawn_sources:
                return NoticeWithdrawn(notice.source, "gone")
            return NoticeRaised(notice)

        self.post(found, within_s)

    def withdraw_notice(self, source: str = "") -> None:
        """The source withdraws its notice; by default, that of the newest one."""
        if self.notice is not None and source in ("", self.notice.source):
            source, self.notice = self.notice.source, None
        if source:
            self._withdrawn_sources.add(source)
            self.post(lambda: NoticeWithdrawn(source, "gone"), 0.2)

    def second_vm(self) -> None:
        """Another VM takes the run over and commits a checkpoint."""
        claimed = max(
            (KEYS.parse_generation(k) or 0 for k in self.store.objects if "/generations/" in k),
            default=0,
        )
        claim = ClaimObject(run="r", generation=claimed + 1, start=OTHER)
        self.store.write(KEYS.generation(claim.generation), claims.encode(claim))
        step = max((ref.step for ref in self.commits()), default=0) + 1
        shards = shards_of(a_set(step, OTHER, size_bytes=1), OTHER)
        for chunk in chunks_of(shards):
            self.store.write(chunk.key, b"1")
        made = Manifest(
            run="r",
            generation=claim.generation,
            step=step,
            kind=a_set(step).kind,
            node=0,
            nodes=1,
            nonce=OTHER,
            shards=shards,
            created="2030-01-01T00:00:00Z",
        )
        self.store.write(KEYS.commit(made.ref, 0, 1), manifest.encode(made))

    # ------------------------------------------------------------------ the invariants

    def commits(self) -> set[CommitRef]:
        """The commits in the store, whatever the state of the daemon."""
        self.check_new()
        return self._refs

    def check(self) -> None:
        """I16: the daemon reports no commit that does not exist."""
        self.check_new()
        last = self.state.commits.last
        if not self.is_up or self.exit is not None:
            return
        if last is not None and last not in self._refs:
            raise Broken(f"I16: the daemon reports {last}, which the store does not contain")
        evacuation = self.state.evacuation
        if evacuation is not None and self.state.flush.flight is not None:
            left_s = evacuation.deadline_mono_s - self.now
            if 0 < left_s < RESERVE_S - 2 * TICK_S:
                raise Broken("V4: a flush is under way in the reserve")

    def check_new(self) -> None:
        """I1, I4, I5, I6: each new manifest names stored shards, belongs to a sealed set, and is in order."""
        if not self.store.new:
            return
        keys, self.store.new = self.store.new, []
        for key in keys:
            parsed = KEYS.parse_commit(key)
            if parsed is None:
                continue
            self._refs.add(parsed.ref)
            made = manifest.decode(self.store.objects[key])
            for chunk in made.chunks:
                if self.store.objects.get(chunk.key) != str(chunk.size_bytes).encode():
                    raise Broken(f"I1: {key} names {chunk.key}, which is not stored")
            if made.nonce != OTHER:
                self._check_own(key, made)

    def _check_own(self, key: str, made: Manifest) -> None:
        claimed_by = start_of(self.store, made.generation)
        point = self.witness.sets.get(made.nonce)
        if claimed_by in ("", OTHER):
            raise Broken(f"I4: {key} under a generation that is not ours")
        if self.has_hooks and point is not None and claimed_by != point.line:
            raise Broken(f"I4: {key} is of {point.line}, and {claimed_by} has its generation")
        launched_s = self.launched_s.get(claimed_by, 0.0) - 0.01  # the kernel counts in such ticks
        is_older = self._written_s[made.nonce] < launched_s
        if not self.has_hooks and is_older and not self._has_lost_record:
            raise Broken(f"I4: {key} was written before {claimed_by} was launched")
        if not any((made.step, made.nonce) == (x.id.step, x.id.nonce) for x in self.sealed):
            raise Broken(f"I5: {key} is of no sealed set")
        assert point is not None
        self._check_follows(made, point)
        entry = made.ref, self.witness.place(point)
        index = bisect.bisect(self._placed, entry)
        self._placed.insert(index, entry)
        before, after = self._placed[max(0, index - 1)], self._placed[index + 1 : index + 2]
        if self._has_lost_record:
            return
        first = self._first_refs.setdefault(made.nonce, made.ref)
        if first != made.ref:
            raise Broken(f"I6: {key} is of the same set as {first}")
        if before[1] > entry[1] or any(entry[1] > other[1] for other in after):
            raise Broken(f"I6: {entry} is out of order, between {before} and {after}")

    def _concluded(self, conclusion: Conclude) -> None:
        before = [
            told
            for life, told in self._told
            if life == self.life and told.evacuation_id == conclusion.evacuation_id
        ]
        if before and conclusion.is_final and not is_no_worse(before[-1], conclusion):
            raise Broken(f"{conclusion} after {before[-1]}")
        if conclusion.is_final:
            self._told.append((self.life, conclusion))
        self.verdict = conclusion
        self.conclusions.append(conclusion)
        refs = self.commits()
        if conclusion.verdict is Verdict.NO_TRAINING:
            line = self.witness.newest_now(self.life)
            if line is not None:
                raise Broken(f"I7: NO_TRAINING, and {line.id} has reached the daemon")
        is_known = conclusion.is_final and "late_write" not in self.fired
        if conclusion.verdict is Verdict.LOST and is_known and self._placed:
            raise Broken(
                f"I16: LOST with {conclusion.slack_s} s left, and {self._placed[-1]} exists"
            )
        is_unread = not self.state.commits.is_run_read
        if conclusion.verdict is Verdict.LOST and conclusion.is_final and is_unread:
            raise Broken("I16: LOST, and the commits of the run were never read")
        may_be_none = conclusion.verdict in (Verdict.LOST, Verdict.NO_TRAINING) or is_unread
        may_be_none |= self.state.commits.ordered is not None
        may_be_none |= self.state.starts.fenced_by is not None
        may_be_none |= self.state.newest_generation is None
        if may_be_none and conclusion.commit is None:
            if self.state.commits.last is not None:
                raise Broken(f"I16: {conclusion.verdict} without a commit, and a commit stands")
            return
        is_repeated = any(
            told.evacuation_id == conclusion.evacuation_id and told.verdict is conclusion.verdict
            for life, told in self._told
            if life != self.life
        )
        if conclusion.commit not in refs and not (conclusion.commit is None and is_repeated):
            raise Broken(f"I7: {conclusion.verdict} of {conclusion.commit}, which is not stored")
        if conclusion.verdict is Verdict.SAFE:
            self._check_safe(conclusion)

    def _check_safe(self, conclusion: Conclude) -> None:
        """S: what a fresh reader of the bucket restores is the newest training on this VM."""
        made = restored(self.store)
        is_other = made is not None and made.nonce == OTHER and made.ref != conclusion.commit
        if made is not None and is_other and made.generation <= self._fenced_by:
            raise Broken(f"S: SAFE, and generation {made.generation} is known to continue the run")
        if is_other and self._placed:  # not read yet: no daemon could know it at once
            made = self._manifest_of(max(ref for ref, _ in self._placed))
        if made is not None and made.nonce in self.suspect_sets:
            raise Broken(f"S: SAFE at {made.ref}, which suspect training has sealed")
        read = None
        if made is not None:
            read = self.witness.sets.get(made.nonce, Point(OTHER, made.step))
        # Sets of this VM are older than a commit of the VM that has taken the run over.
        is_overtaken = made is not None and made.nonce == OTHER
        loadable = [] if is_overtaken else self._loadable()
        self.witness.judge_safe(conclusion.evacuation_id, self.life, read, loadable)
        if read is not None and not is_overtaken:
            self._note_waiting(read)
        trainer = self.trainer
        evacuation = self.state.evacuation
        assert evacuation is not None
        is_known = trainer is not None and self.life in trainer.line.lives
        if is_known and evacuation.request is None and evacuation.plan.kind.value == "TAKE":
            raise Broken("I7: SAFE, and the trainer was never asked")

    def _check_follows(self, made: Manifest, point: Point) -> None:
        """S: no set that waited for its commit at a SAFE replaces the state that was SAFE."""
        safe, read = self._waits.get(made.nonce), restored(self.store)
        if safe is None or read is None or read.nonce != made.nonce:
            return
        if made.nonce in self.suspect_sets or not self.witness.continues(point, safe):
            raise Broken(f"S: SAFE at {safe}, and {point} waited for its commit, and replaces it")

    def _note_waiting(self, safe: Point) -> None:
        """Note the sets that may follow this SAFE.

        The daemon cannot know the state of a later start that has not reported what it has loaded.
        """
        for staged in (*self.staging, *self.adopted):
            point = self.witness.sets[staged.id.nonce]
            start = self.state.start_of(point.line)
            is_reported = start is not None and start.parent.is_known
            is_later = self.witness.place(point)[0] > self.witness.place(safe)[0]
            if staged.id.nonce not in self._first_refs and (is_reported or not is_later):
                self._waits[staged.id.nonce] = safe

    def _check_not_safe(self) -> None:
        """S: an open evacuation is SAFE once the daemon knows that the newest commit is of the position."""
        evacuation, trainer = self.state.evacuation, self.trainer or self._leaver
        if (
            evacuation is None
            or evacuation.is_precaution
            or trainer is None
            or self.gpu is not None
        ):
            return  # a failure of a GPU is a doubt
        commits = self.state.commits
        if evacuation.verdict is Verdict.SAFE or self._fenced_by or self.state.generation is None:
            return  # another VM may commit before the claim, or has taken the run over
        if commits.stored or commits.ordered is not None:
            return  # a manifest that was ordered may be of later training
        request_id = "" if evacuation.request is None else evacuation.request.request_id
        connections = [rank.connection for rank in trainer.ranks]
        stands = [self._stands.get(connection, (None, 0)) for connection in connections]
        if any(answered not in ("", request_id) for answered, _ in stands):
            return
        last, made = commits.last_complete, restored(self.store)
        point = None if made is None else self.witness.sets.get(made.nonce)
        if made is None or point is None or made.ref != last:
            return
        if self.state.generation is None:
            return  # another VM may commit before the claim
        is_loaded = point == trainer.line.loaded and self._reported.issuperset(connections)
        # A set that the start has not loaded may still become the newest commit.
        is_loaded &= self.state.is_scanned and not self.state.uncommitted
        # Another process of this VM may commit.
        is_loaded &= {t.start_id for t in self.state.ranks.trainers} == {trainer.start_id}
        answers = [
            staged.id.step
            for staged in self.sealed
            if staged.id.start == trainer.start_id
            and evacuation_of(staged.request_id) == evacuation.id
        ]
        stood = max(step for _, step in stands)
        if is_loaded and not answers and point.step >= stood:
            raise Broken(f"S: the training has stood at {last} since it loaded it, and is not SAFE")
        if point.line == trainer.line.id and point.step >= max(stood, min(answers, default=0)):
            raise Broken(f"S: the training stood at step {stood}, {last} stands, and is not SAFE")
