# SPDX-License-Identifier: Apache-2.0
"""A small deterministic world for the state machine: one seed, one heap of events, no real time.

The production machine, planner, keys and commit rules run unchanged.  This module plays trainers, staging,
the flush and the store, with the delays and faults of the seed.  After every event the invariants I1 to I9
are checked against the real content of the store.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swansongd.bucket import commit, manifest
from swansongd.bucket.claim import ClaimObject
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.manifest import Manifest
from swansongd.core import followup, gpus, machine, restart, resume, staged_sets
from swansongd.core.events import (
    Action,
    AskTrainers,
    CancelFlush,
    ClaimGeneration,
    CommitDone,
    CommitFailed,
    CommitManifest,
    Conclude,
    Event,
    Exit,
    FenceFound,
    Flushed,
    FlushFailed,
    FlushProgress,
    GenerationClaimed,
    GpusRead,
    Mark,
    NoticeRaised,
    NoticeWithdrawn,
    Prune,
    Rescan,
    Scanned,
    SendTarget,
    SetAside,
    StartFlush,
    Tick,
    TrainerAccepted,
    TrainerFailed,
    TrainerJoined,
    TrainerLeft,
    TrainerProgress,
    TrainerSealed,
    WithdrawRequest,
)
from swansongd.core.request_ids import FOLLOW_UP, are_of_one
from swansongd.core.state import Settings, State
from swansongd.errors import Exists, FencedError, NotFound, StoreError, Transient
from swansongd.model import (
    CheckpointId,
    CommitRef,
    GpuHealth,
    GpuStatus,
    Notice,
    Severity,
    Staged,
    TrainerView,
    Verdict,
    is_healthy,
)
from swansongd.sources.gpu import GpuNotices
from swansongd.stores.base import (
    Body,
    ObjectInfo,
    ObjectStore,
    OpenUpload,
    Page,
    PartReceipt,
    Sink,
    Upload,
    delete_each,
)

from testkit.story import a_notice, a_set, objects_of, shards_of

KEYS = RunKeys("r")
MIB = 2**20
RESERVE_S = 5.0
PART_BYTES = 16 * MIB
LINK_S = 0.5
"""Interval at which the progress of the link is looked at."""
LINK_START_S = 0.05
"""From the order of a flush to its first byte."""
TICK_S = 0.5
FILES = 4
"""Number of files of each set; those of an emergency save become final one after the other."""
FAULTS = (
    "lost_reply", "refused", "restart", "trainer_death", "withdrawn", "second_vm", "void",
    "slow_network", "torn_save", "never_answers", "late_scan", "claim_lost", "vanishes", "starts_behind",
)  # fmt: skip


class Broken(AssertionError):
    """An invariant is violated; the message names it."""


_MERIT = (Verdict.LOST, Verdict.PARTIAL, Verdict.SAFE)


def is_no_worse(before: Conclude, after: Conclude) -> bool:
    """Whether a verdict of the same evacuation stands up to the one before, and so does its commit."""
    is_older = before.commit is not None and (after.commit is None or after.commit < before.commit)
    return _MERIT.index(after.verdict) >= _MERIT.index(before.verdict) and not is_older


class SimStore:
    """The reference model of a store: create-if-absent, faults on request, and a memory of every write."""

    url = "sim://store"
    part_size_bytes_min = 1

    def __init__(self, chance: Callable[[str, float], bool]) -> None:
        self.objects: dict[str, bytes] = {}
        self.new: list[str] = []
        """Keys that are not checked yet."""
        self._chance = chance

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        if self._chance("refused", 0.2):
            raise Transient(f"{key}: 503")
        if if_absent and key in self.objects:
            raise Exists(key)
        if self.objects.get(key, bytes(data)) != bytes(data):
            raise Broken(f"I2: {key} is written twice with different bytes")
        self.write(key, bytes(data))
        if self._chance("lost_reply", 0.2):
            raise Transient(f"{key}: reset")

    def write(self, key: str, data: bytes) -> None:
        self.objects[key] = data
        self.new.append(key)

    def get(self, key: str) -> bytes:
        if self._chance("refused", 0.1):
            raise Transient(f"{key}: 503")
        if key not in self.objects:
            raise NotFound(key)
        return self.objects[key]

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        if self._chance("refused", 0.1):
            raise Transient("list: 503")
        for key in sorted(self.objects):
            if key.startswith(prefix) and key > after:
                yield ObjectInfo(key, len(self.objects[key]))

    def page(self, prefix: str, token: str | None, *, after: str = "") -> Page:
        del token  # the first page contains all
        return Page(list(self.list(prefix, after=after)), None)

    def head(self, key: str) -> ObjectInfo | None:
        return ObjectInfo(key, len(self.objects[key])) if key in self.objects else None

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        raise NotImplementedError

    def delete(self, key: str, *, if_tag: str = "") -> None:
        del if_tag  # a key is never written twice with different bytes
        if self._chance("refused", 0.1):
            raise Transient(f"{key}: 503")
        self.objects.pop(key, None)

    def delete_many(self, infos: Sequence[ObjectInfo]) -> Mapping[str, str]:
        return delete_each(self, infos)

    def locked_until(self, key: str) -> float | None:
        del key
        return None

    def lock(self, key: str) -> float | None:
        del key
        return None

    def begin(self, key: str, size_bytes: int, part_size_bytes: int) -> Upload:
        raise NotImplementedError

    def put_shard(self, key: str, body: Body) -> int:
        raise NotImplementedError

    def put_part(self, upload: Upload, number: int, body: Body) -> PartReceipt:
        raise NotImplementedError

    def complete(self, upload: Upload, parts: Sequence[PartReceipt]) -> None:
        raise NotImplementedError

    def parts(self, upload: Upload) -> Sequence[PartReceipt]:
        raise NotImplementedError

    def uploads(self, prefix: str) -> Iterator[OpenUpload]:
        raise NotImplementedError

    def abort(self, key: str, upload_id: str) -> None:
        raise NotImplementedError

    def check(self) -> None:
        return None

    def warm(self) -> None:
        return None


def commit_event(store: ObjectStore, order: CommitManifest, claim: ClaimObject) -> Event:
    """Create the manifest by the production rules; returns the event for the daemon."""
    staged = order.staged
    made = Manifest(
        run="r",
        generation=order.generation,
        step=staged.id.step,
        kind=staged.kind,
        node=staged.node,
        nodes=staged.nodes,
        nonce=staged.id.nonce,
        shards=order.shards,
        parent=order.parent,
        created="2030-01-01T00:00:00Z",
    )
    try:
        commit.commit(store, KEYS, made, claim)
    except FencedError as error:
        return fence_found(error)
    except Exists:
        return CommitFailed(order.flush_id, "taken", conflict=True)
    except StoreError as error:
        return CommitFailed(order.flush_id, str(error), conflict=False)
    return CommitDone(order.flush_id, made.ref)


def fence_found(error: FencedError) -> FenceFound:
    return FenceFound(error.newer, is_same_number=error.newer == error.own)


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
class Trainer:
    """One rank: it trains, saves every ten steps, and answers requests at the next step boundary."""

    connection: int
    pid: int
    step: int
    saved_s: float | None = None
    asked: set[str] = field(default_factory=set)
    request: str = ""
    accepted: int = -1
    target: int | None = None
    is_standing: bool = False
    start_id: str = ""
    withdrawn: set[str] = field(default_factory=set)
    """Withdrawn periodic requests, which get no answer."""


class World:
    """One VM with a daemon and a trainer, a store, and perhaps a second VM.

    Args:
        seed: decides everything.
        is_calm_from_s: no fault begins after this instant; None: the seed may break things to the end.
        has_trainer: whether a trainer starts with the daemon; else :meth:`start_trainer` starts it.
        takes_follow_ups: whether it trains on and takes them; else the seed decides.
    """

    def __init__(  # noqa: PLR0915 - all that a world begins with
        self,
        seed: int,
        *,
        is_calm_from_s: float | None = None,
        has_trainer: bool = True,
        takes_follow_ups: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        # A random subset of faults for each seed finds more than all faults together.
        self.faults = {name for name in FAULTS[:-1] if self.random.random() < 0.4}
        # Another random stream: seeds that found a bug before find the bug again.
        if random.Random(f"starts {seed}").random() < 0.4:
            self.faults.add("starts_behind")
        self.fired: set[str] = set()
        self.is_calm_from_s = is_calm_from_s
        self.now = 1000.0
        self.store = SimStore(self.chance)
        self.staging: list[Staged] = []
        self.growing: list[Staged] = []
        self.sealed: list[Staged] = []
        self.notice: Notice | None = None
        self.asks: set[tuple[str, int]] = set()
        self.verdict: Conclude | None = None
        self.exit: Exit | None = None
        self._woken_s = 0.0
        """The newest instant of an extra tick."""
        self.is_over = False
        """No further trainer starts."""
        self.life = 0
        """Events for an earlier life of the daemon are lost."""
        self.claim: ClaimObject | None = None
        """The claim of the daemon, which outlives the daemon."""
        self.abandoned: tuple[CheckpointId, ...] = ()
        """The sets recorded with the claim; the record outlives the daemon."""
        self.starts: dict[str, tuple[str, int]] = {}
        """For each start of a trainer: the start whose state it continued, and the step of that state."""
        self.aside: list[Staged] = []
        self.own: set[int] = set()
        self.trainer: Trainer | None = None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
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
        self._refs: list[CommitRef] = []
        # Other random streams: seeds that found a bug before still find the bug.
        self._forgets = random.Random(f"forgets {seed}")
        self.stood_at: dict[str, tuple[int, int]] = {}
        """By evacuation: process and step of the trainer when it opened."""
        periodic = random.Random(f"periodic {seed}")
        self.takes_periodic = periodic.random() < 0.5
        self.interval_s = periodic.choice((7.0, 40.0))
        self.every_steps = 10
        """The trainer saves at this interval by itself."""
        # A trainer that takes none shows the other outcomes.
        self.takes_follow_ups = (
            takes_follow_ups or random.Random(f"follow-ups {seed}").random() < 0.7
        )
        self.follow_ups: dict[str, float] = {}
        """By id of the follow-up requests: the seconds left at the request."""
        self.accept_s = 0.0
        """A trainer accepts a request within this time; 0: within a step."""
        self.periodic: list[int] = []
        """Steps of the sets that were sealed for a periodic request."""
        self._boundary_s = self.random.choice((0.2, 1.0, 5.0))
        self._save_s = self.random.choice((0.1, 2.0, 20.0))
        self._size_bytes = self.random.choice((MIB, 100 * MIB, 3000 * MIB))
        self._bandwidth = self.random.choice((20, 200)) * MIB
        self.gpu: GpuStatus | None = None
        """The GPU of the VM; None without one."""
        self.suspect_starts: set[str] = set()
        """Starts of trainers that the daemon knew when it learned of a failure of the GPU."""
        self.suspect_sets: set[CheckpointId] = set()
        """Sets that they sealed later."""
        self._joined: set[str] = set()
        self.known_pids: set[int] = set()
        """Processes that have been connected to some life of the daemon."""
        self.reconnects_slowly = False
        """After a restart of the daemon, the trainer often needs long to reconnect."""
        self._reconnects = random.Random(f"reconnects {seed}")
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
        known = self.state.notices.values() if self.life > 1 else ()
        record = gpus.record_of(self.state) if self.life > 1 else None
        training = restart.record_of(self.state) if self.life > 1 else None
        if record is None:
            self._joined.clear()
        settings = Settings(
            reserve_s=RESERVE_S,
            signals_trainer=False,
            checkpoint_interval_s=self.interval_s,
            sealed_under=self.claim.generation if self.claim is not None else None,
        )
        abandoned = frozenset(self.abandoned)
        self.state = State(settings=settings, abandoned=abandoned, unusable=abandoned)
        if record is not None:
            self.state = gpus.resumed(self.state, record)
        if training is not None:
            pid = 0 if self.trainer is None else self.trainer.pid
            views = [view for view in training.trainers if view.pid == pid]
            self.state = restart.resumed(self.state, training, views)
        self._gpu_notices = GpuNotices()
        if self.gpu is not None:
            self._read_gpu(1.0)
        self._flush_id, self._link = "", Link()
        if self._forgets.random() < 0.8:  # else the record of the notices in force is lost as well
            for each in known:
                if each.deadline_mono_s > self.now:
                    self.at(0.0, lambda each=each: self.step(NoticeRaised(each)))  # type: ignore[misc]
        self.post(self._scan_result, 0.3)
        self._claim()
        self._tick()
        if self.notice is not None:
            notice = self.notice
            self.post(lambda: NoticeRaised(notice), 1.0)

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
            before = self.state.gpus.get(self.gpu.pci)
            had_failed = before is not None and before.health.has_failed
            if self.gpu.health.has_failed and not had_failed and self.trainer is not None:
                self.suspect_starts |= {self.trainer.start_id} & self._joined
            notices = self._gpu_notices
            events = [GpusRead((self.gpu,)), *notices.update((self.gpu,), self.now)]
            for event in events:
                if life == self.life:
                    self.step(event)

        self.at(self.delay_s(within_s), happens)

    def post(self, event: Callable[[], Event], delay_up_to_s: float) -> None:
        """Post an event to the daemon after a delay, if it is still the same daemon."""
        life = self.life

        def happens() -> None:
            if life == self.life:
                self.step(event())

        self.at(self.delay_s(delay_up_to_s), happens)

    def step(self, event: Event) -> None:
        if self.exit is not None:
            return
        self.state, actions = machine.step(self.state, event, self.now)
        for action in actions:
            self._carry_out(action)
        self._wake_in_time()
        if self.chance("restart", 0.01):
            restart_alone(self)

    def _wake_in_time(self) -> None:
        """A tick right after the next follow-up is due: those of the daemon come more often than ours."""
        due_s = followup.wait_s(self.state, self.now)
        if due_s is not None and 0 < due_s < TICK_S and self.now + due_s > self._woken_s + 0.1:
            life, self._woken_s = self.life, self.now + due_s
            self.at(due_s + 0.05, lambda: self.step(Tick()) if life == self.life else None)

    def _tick(self) -> None:
        life = self.life

        def happens() -> None:
            if life == self.life and self.exit is None:
                self.step(Tick())
                self.at(TICK_S, happens)

        self.at(TICK_S, happens)

    def _claim(self, *, is_rollback: bool = False) -> None:
        life = self.life

        def happens() -> None:
            if life != self.life:
                return
            try:
                if not is_rollback and self.chance("claim_lost", 0.5):
                    self.claim, self.abandoned = None, ()  # the record of it is gone
                if self.claim is None:
                    nonce = f"{self.random.getrandbits(64):x}"
                    claim = commit.claim_generation(self.store, KEYS, identity={}, nonce=nonce)
                    self.claim = claim.content
                    self.own.add(claim.generation)
                else:
                    commit.ensure_not_fenced(self.store, KEYS, self.claim)
                newest = commit.newest_whole_commit(self.store, KEYS, near=1)
            except FencedError as error:
                self.step(fence_found(error))
            except StoreError:
                self.at(2.0, happens)
            else:
                generation = self.claim.generation
                self.step(GenerationClaimed(generation, newest, is_rollback=is_rollback))

        self.at(self.delay_s(1.0), happens)

    def _carry_out(self, action: Action) -> None:
        match action:
            case AskTrainers(request_id, _, deadline_mono_s, connections):
                if FOLLOW_UP in request_id:
                    self.follow_ups.setdefault(request_id, deadline_mono_s - self.now)
                trainer = self.trainer
                if trainer is not None and trainer.connection in connections:
                    self._asked(trainer, request_id)
            case SendTarget(request_id, target, _):
                trainer = self.trainer
                if trainer is not None and trainer.request == request_id and trainer.target is None:
                    trainer.target = target
                    # More than one ahead: the target was set with a trainer that died since.
                    ahead = target - trainer.step
                    if ahead < 1 or (ahead > 1 and len(self.starts) < 2):
                        raise Broken(f"target {target} is not one ahead of {trainer.step}")
                    wait_s = ahead * self._boundary_s
                    self.at(wait_s, lambda: self._saves(trainer, target, request_id))
            case WithdrawRequest(request_id, _):
                if self.trainer is not None:
                    if self.trainer.request == request_id:
                        self.trainer.is_standing = False
                    if request_id.startswith("periodic-") or FOLLOW_UP in request_id:
                        self.trainer.withdrawn.add(request_id)
            case StartFlush():
                if not action.is_sealed:
                    self.early.append(action)
                self._flush(action)
            case CancelFlush(flush_id):
                if flush_id == self._flush_id:
                    self._flush_id, self._link = "", Link()
            case CommitManifest():
                self._commit(action)
            case Rescan():
                self.post(self._scan_result, 0.3)
            case ClaimGeneration(_, abandoned):
                self.claim, self.abandoned = None, abandoned
                self._claim(is_rollback=True)
            case SetAside(directories):
                self._set_aside(directories)
            case Prune(directories):
                self._prune(directories)
            case Conclude():
                self._concluded(action)
            case Mark(id_, "notice", _) if self.trainer is not None:
                self.stood_at.setdefault(id_, (self.trainer.pid, self.trainer.step))
            case Exit():
                self.exit = action
            case _:
                pass

    # ------------------------------------------------------------------ staging and trainer

    def _scan_result(self) -> Scanned:
        growing = () if self.hides_growing else tuple(self.growing)
        return Scanned(self.now, tuple(self.staging), growing=growing)

    def _new_set(self, step: int, request_id: str = "") -> Staged:
        nonce = f"{self.random.getrandbits(32):08x}"
        whole = a_set(step, nonce, size_bytes=self._size_bytes // FILES, request_id=request_id)
        files = (replace(whole.files[0], path=f"{i}.bin", inode=i) for i in range(FILES))
        starts = frozenset({self.trainer.start_id} if self.trainer is not None else ())
        return replace(whole, files=tuple(files), starts=starts)

    def _seal(self, staged: Staged) -> Staged:
        self.staging.append(staged)
        self.sealed.append(staged)
        if staged.starts & self.suspect_starts:
            self.suspect_sets.add(staged.id)
        self.post(self._scan_result, 3.0 if self.chance("late_scan", 0.5) else 0.1)
        return staged

    def restart_trainer(self, *, is_behind: bool = False) -> None:
        """The trainer ends, and another one starts from the newest state, or from one before it."""
        if self.trainer is not None:
            trainer, self.trainer = self.trainer, None
            self.post(lambda: self._left(trainer), 0.1)
        self._trainer_starts(is_behind=is_behind)

    @property
    def take_s(self) -> float:
        """Longest time from a request to the commit of its checkpoint, without faults."""
        send_s = self._size_bytes / self._bandwidth
        return self._boundary_s + self._save_s + 2 * send_s + RESERVE_S

    def start_trainer(self) -> None:
        """A trainer resumes from the newest state."""
        self._trainer_starts()

    def _trainer_starts(self, *, is_behind: bool = False) -> None:
        """A trainer resumes from the newest state, by the daemon's rule, or from an older one, by its own."""
        if self.is_over or self.trainer is not None:
            return
        newest = max(self.commits(), default=None)
        scanned, _ = machine.step(self.state, self._scan_result(), self.now)
        local = resume.newest_local(scanned, newest)
        step, parent = 0, ""
        if local is not None:
            step, parent = local.id.step, self._written_by(local.id)
        elif newest is not None:
            step, parent = newest.step, self._written_by_commit(newest)
        if step and (is_behind or self.chance("starts_behind", 0.5)):
            step = self.random.randrange(step)  # on the line, but not its newest state
        self._count += 1
        trainer = Trainer(connection=self._count, pid=self._count, step=step)
        trainer.start_id = f"start-{self._count}"
        self.starts[trainer.start_id] = parent, step
        self.trainer = trainer
        self._connect(trainer, starts=True)
        self._trains(trainer)

    def _written_by(self, checkpoint: CheckpointId) -> str:
        return next((min(s.starts, default="") for s in self.sealed if s.id == checkpoint), "")

    def _written_by_commit(self, ref: CommitRef) -> str:
        place = self._set_of_commit(ref)
        return "" if place is None else self._written_by(CheckpointId(*place))

    def _set_of_commit(self, ref: CommitRef) -> tuple[int, str] | None:
        """Step and nonce of the set that this commit contains."""
        keys = [key for key in self.store.objects if key.startswith(KEYS.commits)]
        for key in keys:
            parsed = KEYS.parse_commit(key)
            if parsed is not None and parsed.ref == ref:
                made = manifest.decode(self.store.objects[key])
                return made.step, made.nonce
        return None

    def is_newest_on_line(self) -> bool:
        """Whether the next VM would resume from a state that training continued from."""
        newest = max(self.commits(), default=None)
        return newest is not None and self.is_on_line(newest.step, self._written_by_commit(newest))

    def is_on_line(self, step: int, written_by: str) -> bool:
        """Whether the trainer's state came from this one, which the daemon has to find out."""
        if self.trainer is None or not written_by:
            return True
        start_id, limit = self.trainer.start_id, step
        while start_id:
            if start_id == written_by:
                return step <= limit or start_id == self.trainer.start_id
            start_id, limit = self.starts[start_id]
        return False

    def reconnect(self) -> None:
        """The trainer connects to the next daemon: soon, or only after a long time."""
        if self.trainer is not None:
            is_slow = (
                self.reconnects_slowly
                and self.trainer.pid in self.known_pids
                and self._reconnects.random() < 0.5
            )
            self._connect(self.trainer, within_s=60.0 if is_slow else 1.0)

    def _connect(self, trainer: Trainer, *, starts: bool = False, within_s: float = 1.0) -> None:
        self._count += 1
        connection = trainer.connection = self._count
        start = TrainerProgress(connection, trainer.step, start_id=trainer.start_id)

        def joined() -> Event:
            if trainer is not self.trainer:
                return Tick()  # it has died meanwhile
            if self.state.gpus:
                self._joined.add(trainer.start_id)
            self.known_pids.add(trainer.pid)
            if starts:  # right after the hello, and never before it
                self.post(lambda: start, 0.002)
            return TrainerJoined(
                TrainerView(
                    connection=connection,
                    pid=trainer.pid,
                    process_start=trainer.pid,
                    rank=0,
                    world_size=1,
                    local_world_size=1,
                    step=trainer.step,
                    save_s=trainer.saved_s,
                    takes_periodic=self.takes_periodic,
                    takes_follow_ups=self.takes_follow_ups,
                    start_id=trainer.start_id,
                    greeted_mono_s=self.now,
                )
            )

        self.post(joined, within_s)

    def _trains(self, trainer: Trainer) -> None:
        def happens() -> None:
            if trainer is not self.trainer:
                return
            self.at(self._boundary_s, happens)
            if trainer.is_standing:
                return
            trainer.step += 1
            at_step = trainer.step
            report = TrainerProgress(trainer.connection, at_step, step_s=self._boundary_s)
            self.post(lambda: report, 0.1)
            if trainer.step % self.every_steps == 0:
                self._seal(self._new_set(trainer.step))
            if self.chance("trainer_death", 0.01):
                self._dies(trainer)

        self.at(self._boundary_s, happens)

    def _dies(self, trainer: Trainer) -> None:
        self.trainer = None
        self.post(lambda: self._left(trainer), 0.1)
        if self.random.random() < 0.5:
            self.at(self.delay_s(30), self._trainer_starts)

    def _left(self, trainer: Trainer) -> TrainerLeft:
        """The process has ended.  After a restart the daemon has another number for it, until it connects."""
        known = (view.connection for view in self.state.trainers if view.pid == trainer.pid)
        return TrainerLeft(next(known, trainer.connection), exited=True, reason="ended")

    def _asked(self, trainer: Trainer, request_id: str) -> None:
        if trainer.start_id in self.suspect_starts and not request_id.startswith("periodic-"):
            raise Broken("suspect training is asked for a checkpoint")
        if (request_id, trainer.pid) in self.asks and self.life == 1:
            raise Broken("I9: the trainer is asked twice for one notice by one daemon")
        self.asks.add((request_id, trainer.pid))
        if "never_answers" in self.faults:
            self.fired.add("never_answers")
            return

        def accepts() -> None:
            if trainer is self.trainer and request_id not in trainer.withdrawn:
                if trainer.request != request_id:
                    trainer.request, trainer.target = request_id, None
                    trainer.accepted, trainer.is_standing = trainer.step, True
                at_step = trainer.accepted
                self.post(lambda: TrainerAccepted(trainer.connection, request_id, at_step), 0.05)

        if request_id in trainer.asked:  # answered before: the answer is repeated, the save is not
            again = next((s for s in self.sealed if s.request_id == request_id), None)
            if again is not None:
                self._says_sealed(trainer, again)
                return
        trainer.asked.add(request_id)
        self.at(self.delay_s(self.accept_s or self._boundary_s), accepts)

    def _saves(self, trainer: Trainer, target: int, request_id: str) -> None:
        if trainer is not self.trainer or request_id in trainer.withdrawn:
            return
        trainer.step = target
        whole = self._new_set(target, request_id)

        def grows(final: int) -> None:
            """One file more is final."""
            is_begun = any(item.id == whole.id for item in self.growing)
            self.growing = [item for item in self.growing if item.id != whole.id]
            if trainer is not self.trainer or (final > 1 and not is_begun):
                return
            if self.chance("torn_save", 0.05):
                self.post(self._scan_result, 0.1)
                return
            part = replace(whole, directory=f"{whole.directory}.partial", files=whole.files[:final])
            self.growing.append(part)
            if final < FILES:
                self.at(self._save_s / FILES, lambda: grows(final + 1))

        self.at(self._save_s / FILES, lambda: grows(1))

        def done() -> None:
            is_whole = any(item.id == whole.id for item in self.growing)
            self.growing = [item for item in self.growing if item.id != whole.id]
            if trainer is not self.trainer:
                return
            if trainer.request == request_id:  # else it stands for another one by now
                trainer.is_standing = False
            if not is_whole:
                self.post(lambda: TrainerFailed(trainer.connection, request_id, "torn"), 0.05)
                return
            if self.chance("trainer_death", 0.1):
                self._dies(trainer)
                return
            trainer.saved_s = self._save_s
            if request_id.startswith("periodic-"):
                self.periodic.append(target)
            self._says_sealed(trainer, self._seal(whole))

        self.at(self._save_s * 1.01, done)

    def _says_sealed(self, trainer: Trainer, staged: Staged) -> None:
        self.post(
            lambda: TrainerSealed(
                trainer.connection, staged.request_id, staged.id.step, self._save_s, 1
            ),
            0.05,
        )

    def _set_aside(self, directories: tuple[str, ...]) -> None:
        for staged in self.staging:
            if staged.directory in directories:
                trainer = self.trainer
                if trainer is not None and trainer.start_id in staged.starts:
                    raise Broken(f"I18: {staged.directory} is set aside, and its trainer lives")
                self.aside.append(staged)
        self.staging = [s for s in self.staging if s.directory not in directories]

    def _prune(self, directories: tuple[str, ...]) -> None:
        newest = max(self.commits(), default=None)
        for staged in self.staging:
            is_abandoned = staged.id in self.state.abandoned
            if (
                staged.directory in directories
                and not is_abandoned
                and (newest is None or staged.id.step > newest.step)
            ):
                self._expect_superseded(staged, directories)
        self.staging = [s for s in self.staging if s.directory not in directories]

    def _expect_superseded(self, staged: Staged, directories: tuple[str, ...]) -> None:
        """An unsent set may be deleted only if two newer ones stay, and a healthy one if it was healthy."""
        self.fired.add("unsent_set_dropped")
        stay = [
            other
            for other in self.staging
            if other.directory not in directories and other.id not in self.state.unusable
        ]
        if sum(other.id > staged.id for other in stay) < staged_sets.NEWEST:
            raise Broken(f"I18: {staged.directory} is deleted, and nothing replaces it")
        is_healthier = is_healthy(staged.health) and not any(
            other.id > staged.id and is_healthy(other.health) for other in stay
        )
        if is_healthier:
            raise Broken(
                f"I18: {staged.directory} is deleted, and no newer set is known to be healthy"
            )

    # ------------------------------------------------------------------ flush and commit

    def _flush(self, order: StartFlush) -> None:  # noqa: PLR0915 - one flush, and what befalls it
        if self.claim is None or order.generation != self.claim.generation:
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
            return min(LINK_S, start_s + left_bytes / rate) if rate else LINK_S

        def ends() -> None:
            if staged not in self.staging:
                fail("vanished", void=True)
                return
            self._flush_id = ""
            shards = shards_of(staged, f"{life}/{order.flush_id}/{order.generation}")
            for stored in objects_of(
                shards
            ):  # the content does not matter, the name and the size do
                self.store.write(stored.key, str(stored.size_bytes).encode())
            if self.chance("vanishes", 0.1):
                self.staging.remove(staged)
            self.post(lambda: Flushed(order.flush_id, shards, bytes_sent=round(sent)), 0.05)

        self.at(next_s(self._bandwidth), moves)

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
        return self._bandwidth * self._slow_factor

    def _commit(self, order: CommitManifest) -> None:
        claim = self.claim
        assert claim is not None
        self.post(lambda: commit_event(self.store, order, claim), 0.3)

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
        self.post(lambda: NoticeRaised(notice), 0.2)

    def withdraw_notice(self) -> None:
        if self.notice is not None:
            source, self.notice = self.notice.source, None
            self.post(lambda: NoticeWithdrawn(source, "gone"), 0.2)

    def second_vm(self) -> None:
        """Another VM takes the run over and commits a checkpoint."""
        claimed = max(
            (KEYS.parse_generation(k) or 0 for k in self.store.objects if "/generations/" in k),
            default=0,
        )
        generation = claimed + 1
        self.store.write(KEYS.generation(generation), json.dumps({"nonce": "other"}).encode())
        step = max((ref.step for ref in self.commits()), default=0) + 1
        shards = shards_of(a_set(step, "other", size_bytes=1), "other")
        for stored in objects_of(shards):
            self.store.write(stored.key, b"1")
        made = Manifest(
            run="r",
            generation=generation,
            step=step,
            kind=a_set(step).kind,
            node=0,
            nodes=1,
            nonce="other",
            shards=shards,
            created="2030-01-01T00:00:00Z",
        )
        self.store.write(KEYS.commit(made.ref, 0, 1), manifest.encode(made))

    # ------------------------------------------------------------------ the invariants

    def commits(self) -> list[CommitRef]:
        """The commits in the store, whatever the state of the daemon."""
        self.check_new()
        return self._refs

    def check(self) -> None:
        """I16: the daemon reports no commit that does not exist."""
        self.check_new()
        last = self.state.last_commit
        if last is not None and last not in self._refs:
            raise Broken(f"I16: the daemon reports {last}, which the store does not contain")
        evacuation = self.state.evacuation
        if evacuation is not None and self.state.flight is not None:
            left_s = evacuation.deadline_mono_s - self.now
            if 0 < left_s < RESERVE_S - TICK_S:
                raise Broken("V4: a flush is under way in the reserve")

    def check_new(self) -> None:
        """I1, I4, I5: each new manifest names stored shards, and belongs to a sealed set."""
        keys, self.store.new = self.store.new, []
        for key in keys:
            parsed = KEYS.parse_commit(key)
            if parsed is None:
                continue
            self._refs.append(parsed.ref)
            made = manifest.decode(self.store.objects[key])
            for stored in made.objects:
                if self.store.objects.get(stored.key) != str(stored.size_bytes).encode():
                    raise Broken(f"I1: {key} names {stored.key}, which is not stored")
            if made.nonce == "other":
                continue
            if made.generation not in self.own:
                raise Broken(f"I4: {key} under a generation that is not ours")
            if not any((made.step, made.nonce) == (x.id.step, x.id.nonce) for x in self.sealed):
                raise Broken(f"I5: {key} is of no sealed set")

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
        if conclusion.verdict is Verdict.LOST:
            if self.state.last_commit is not None:
                raise Broken("I16: LOST, and a commit stands")
            return
        if conclusion.commit not in refs:
            raise Broken(f"I7: {conclusion.verdict} of {conclusion.commit}, which is not stored")
        if conclusion.verdict is not Verdict.SAFE:
            return
        assert conclusion.commit is not None
        evacuation = self.state.evacuation
        assert evacuation is not None
        places = {(s.step, s.nonce) for s in self.suspect_sets}
        if self._set_of_commit(conclusion.commit) in places:
            raise Broken(f"SAFE at {conclusion.commit}, which suspect training has sealed")
        # A set that was sealed well before cannot have been missed.
        answers = [s for s in self.sealed if s.request_id == conclusion.evacuation_id]
        known = [
            s for s in self.state.staged if s.id not in self.state.inherited | self.state.unusable
        ]
        if not self.is_on_line(conclusion.commit.step, self._written_by_commit(conclusion.commit)):
            raise Broken(
                f"I7: SAFE at {conclusion.commit}, a state that training did not continue from"
            )
        for staged in answers or known:
            if staged.id.step > conclusion.commit.step:
                raise Broken(f"I7: SAFE at {conclusion.commit}, and {staged.id} is sealed")
        trainer = self.trainer
        pid, step = self.stood_at.get(conclusion.evacuation_id, (0, 0))
        is_same = trainer is not None and trainer.pid == pid
        # The report of the last step may be on its way.
        is_ahead = trainer is not None and trainer.step - 1 > conclusion.commit.step
        is_known = trainer is not None and trainer.pid in self.known_pids
        is_answered = any(  # by the commit, or by one before it
            are_of_one(conclusion.evacuation_id, s.request_id)
            and s.id.step <= conclusion.commit.step
            for s in self.sealed
        )
        if is_ahead and is_known and evacuation.request is None and not is_answered:
            raise Broken(f"I7: SAFE at {conclusion.commit}, and training is ahead of it")
        if is_same and evacuation.request is not None and conclusion.commit.step < step:
            raise Broken(f"I7: SAFE at {conclusion.commit}, the trainer was asked at step {step}")
        if (
            trainer is not None
            and evacuation.request is None
            and evacuation.plan.kind.value == "TAKE"
        ):
            raise Broken("I7: SAFE, and the trainer was never asked")


def restart_alone(world: World) -> None:
    """The daemon dies and restarts; staging, store, notice and trainer stay as they are."""
    world._start_daemon()
    world.reconnect()
