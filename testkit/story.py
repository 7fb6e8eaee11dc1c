# SPDX-License-Identifier: Apache-2.0
"""A story for the state machine: methods are events, and the resulting actions are recorded.

Time moves only by calls, and nothing responds by itself: a test plays the trainers, the flush and the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from swansong.layout import sealed_name
from swansong.protocol import FromDaemon, Request
from swansong_bucket.model import (
    CHUNK_BYTES_MAX,
    UNKNOWN_PARENT,
    CheckpointId,
    CheckpointKind,
    CommitRef,
    DeadlineQuality,
    GpuHealth,
    GpuStatus,
    Health,
    Notice,
    Parent,
    Severity,
    SourceStatus,
    Staged,
    StagedFile,
    Start,
    StoredShard,
    TrainerView,
)
from swansongd.core import gpus, machine
from swansongd.core.events import (
    Action,
    ClaimGeneration,
    CommitDone,
    CommitFailed,
    CommitManifest,
    Conclude,
    Flushed,
    GenerationClaimed,
    GpusRead,
    NoticeRaised,
    NoticeWithdrawn,
    ProcessFound,
    RunRead,
    Scanned,
    Send,
    SourceChanged,
    StartFlush,
    Tick,
    TrainerAccepted,
    TrainerFailed,
    TrainerJoined,
    TrainerLeft,
    TrainerProgress,
    TrainerSealed,
)
from swansongd.core.state import Evacuation, Flight, Settings, StartState, State
from swansongd.host import gpu_record
from swansongd.observe.build_status import status_of
from swansongd.observe.facts import Fact, Observed
from swansongd.observe.observer import Observation
from swansongd.observe.snapshot import Snapshot
from swansongd.observe.status import DaemonStatus
from swansongd.observe.tally import Tally

from testkit.committed import named_shard

A = TypeVar("A", bound=Action | FromDaemon)
MIB = 2**20
BOOT = "boot"
"""The boot of the VM."""


def a_notice(
    source: str = "aws.spot",
    *,
    deadline_mono_s: float,
    severity: Severity = Severity.IMMINENT,
    identity: str = "",
    kind: str = "reclaim",
    quality: DeadlineQuality = DeadlineQuality.STATED,
) -> Notice:
    return Notice(
        source=source,
        kind=kind,
        identity=identity or f"{source}:1",
        severity=severity,
        deadline_mono_s=deadline_mono_s,
        deadline_quality=quality,
    )


def a_set(
    step: int,
    nonce: str = "abc",
    *,
    size_bytes: int = 100 * MIB,
    request_id: str = "",
    framework: str = "swansong",
    is_final: bool = False,
    start_id: str = "a",
    nodes: int = 1,
    written_ns: int = 1,
    began_ticks: int = 0,
) -> Staged:
    kind = CheckpointKind.EMERGENCY if request_id else CheckpointKind.PERIODIC
    return Staged(
        id=CheckpointId(step, nonce, is_final, start_id if framework == "swansong" else ""),
        directory=sealed_name(step, nonce) if framework == "swansong" else f"checkpoint-{step}",
        kind=CheckpointKind.FINAL if is_final else kind,
        files=(
            StagedFile(path="model.bin", size_bytes=size_bytes, mtime_ns=written_ns, inode=step),
        ),
        framework=framework,
        request_id=request_id,
        nodes=nodes,
        boot_id=BOOT if began_ticks else "",
        began_ticks=began_ticks,
    )


def shards_of(staged: Staged, flush_id: str = "f") -> tuple[StoredShard, ...]:
    return tuple(
        named_shard(
            file.path,
            file.size_bytes,
            f"{flush_id} {file.path}",
            chunk_bytes=max(CHUNK_BYTES_MAX, file.size_bytes // 64),  # some are out of this world
        )
        for file in staged.files
    )


def a_gpu(health: GpuHealth = GpuHealth.OK, *, index: int = 0) -> GpuStatus:
    return GpuStatus(
        pci=f"0000:{index:02x}:00",
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA H100",
        health=health,
        reason="Xid 95",
        since_mono_s=1000.0,
        xids={"dying": 1},
    )


def as_stored(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as the next daemon reads them."""
    found: dict[str, Any] = json.loads(json.dumps(facts))
    return found


class Story:
    """A decision loop that has just started; with ``claimed``, it has scanned staging and has read the run.

    Each claim that it orders is granted at once, with the next free generation, unless ``grants`` is False.

    Args:
        claimed: it has scanned staging, and knows the newest commit.
        generation: that the first claim gets.
        newest: the newest commit of the run, of a start that no set here names.
        staged: sets in staging.
        recorded: starts of earlier lives of the daemon.
        settings: other settings of the daemon.
    """

    def __init__(
        self,
        *,
        claimed: bool = True,
        generation: int = 2,
        newest: CommitRef | None = None,
        staged: Iterable[Staged] = (),
        recorded: Iterable[Start] = (),
        reserve_s: float = 5.0,
        signals_trainer: bool = False,
        **settings: Any,
    ) -> None:
        configured = Settings(
            reserve_s=reserve_s,
            signals_trainer=signals_trainer,
            vm="vm",
            boot_id=BOOT,
            **settings,
        )
        self.state = State(settings=configured, starts=StartState(known=tuple(recorded)))
        self.tally = Tally()
        self.now = 1000.0
        self.actions: list[Action] = []
        self.staging = list(staged)
        self.grants = True
        self.next_generation = generation
        if claimed:
            self.scan()
            self.tell(RunRead(newest, "earlier" if newest else ""))

    def restarted(
        self,
        *,
        claimed: bool = True,
        newest: CommitRef | None = None,
        is_other_boot: bool = False,
    ) -> Story:
        """The next life of the daemon, in the same boot and with the same staging.

        Args:
            claimed: it has scanned staging and holds the claim of its earlier life.
            newest: the newest commit, if it is not the last one of this life.
            is_other_boot: the VM was booted again, with its disk.
        """
        recorded = [
            Start(
                id=start.id,
                generation=start.generation,
                is_of_boot=not is_other_boot,
                is_open=not is_other_boot,
            )
            for start in self.state.starts.known
            if start.generation is not None or start.id == self.state.starts.claiming
        ]
        after = Story(claimed=False, staged=self.staging, recorded=recorded)
        after.next_generation = self.next_generation
        after.now = self.now + 1
        after.state = replace(after.state, settings=self.state.settings)
        gpu = gpus.record_of(self.state)
        if gpu is not None:
            after.state = gpus.resumed(
                after.state,
                gpu_record.RECORD.read(as_stored(gpu_record.RECORD.write(gpu)), "the record"),
            )
        if claimed:
            after.scan()
            last = newest or self.state.commits.last_complete
            owner = "" if last is None else self.state.owner_of(last)
            after.tell(RunRead(last, owner))
            own = [start for start in recorded if start.generation is not None]
            if own and own[-1].generation is not None:
                after.tell(GenerationClaimed(own[-1].id, own[-1].generation, last, owner))
        return after

    def configure(self, **settings: Any) -> None:
        """Change these settings of the daemon."""
        self.state = replace(self.state, settings=replace(self.state.settings, **settings))

    # ------------------------------------------------------------------ events

    def tell(self, event: Observed) -> list[Action]:
        """Post one event; returns the actions."""
        before, actions = self.state, ()
        if not isinstance(event, Fact):
            self.state, actions = machine.step(before, event, self.now)
        self.observe(Observation(before, self.state, event, actions, self.now))
        self.actions += actions
        told = list(actions)
        for action in actions:
            if isinstance(action, ClaimGeneration) and self.grants:
                told += self.grant(action.start_id)
        return told

    def observe(self, observation: Observation) -> None:
        """Called with each event and its actions; the stories of observers extend it."""
        self.tally.observe(observation)

    def grant(self, start_id: str, newest: CommitRef | None = None) -> list[Action]:
        """The claim that was ordered for this start succeeds."""
        last = newest or self.state.commits.last_complete
        owner = "" if last is None else self.state.owner_of(last)
        self.next_generation += 1
        return self.tell(GenerationClaimed(start_id, self.next_generation - 1, last, owner))

    def process(self, start_id: str = "process-a", pid: int = 900) -> list[Action]:
        """The process of a trainer without hooks runs."""
        return self.tell(ProcessFound(start_id, pid if start_id else 0))

    def starts(
        self,
        step: int,
        connection: int = 1,
        *,
        start_id: str = "a",
        parent: Parent | None = None,
    ) -> list[Action]:
        """A rank has loaded a state, by default a fresh one, and trains from this step."""
        loaded = (Parent("", 0) if step == 0 else Parent()) if parent is None else parent
        return self.tell(TrainerProgress(connection, step, start_id=start_id, parent=loaded))

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.tell(Tick())

    def notice(
        self,
        in_s: float = 120.0,
        source: str = "aws.spot",
        *,
        severity: Severity = Severity.IMMINENT,
        identity: str = "",
        quality: DeadlineQuality = DeadlineQuality.STATED,
    ) -> Notice:
        self.now += 0.01  # every scan so far began before it
        raised = a_notice(
            source,
            deadline_mono_s=self.now + in_s,
            severity=severity,
            identity=identity,
            quality=quality,
        )
        self.tell(NoticeRaised(raised))
        return raised

    def withdraw(self, source: str = "aws.spot") -> list[Action]:
        return self.tell(NoticeWithdrawn(source, "gone"))

    def health(self, source: str, health: Health, reason: str = "no answer") -> list[Action]:
        """A source, or the store, reports its health."""
        status = SourceStatus(source=source, health=health, reason=reason, since_mono_s=self.now)
        return self.tell(SourceChanged(status))

    def read_gpus(self, *healths: GpuHealth) -> list[Action]:
        """The health of each GPU of the VM is read."""
        gpus = tuple(a_gpu(health, index=index) for index, health in enumerate(healths))
        return self.tell(GpusRead(gpus))

    def join(
        self,
        connection: int = 1,
        *,
        rank: int = 0,
        ranks: int = 1,
        pid: int | None = None,
        step: int = -1,
        save_s: float | None = None,
        save_bytes: int | None = None,
        start_id: str = "a",
        nodes: int = 1,
        parent: Parent = UNKNOWN_PARENT,
        takes_periodic: bool = False,
        takes_follow_ups: bool = False,
    ) -> list[Action]:
        pid = 100 + rank if pid is None else pid
        view = TrainerView(
            connection=connection,
            pid=pid,
            process_start=1000 + pid,
            rank=rank,
            world_size=ranks,
            local_world_size=ranks,
            step=step,
            save_s=save_s,
            save_bytes=save_bytes,
            start_id=start_id,
            parent=parent,
            nodes=nodes,
            takes_periodic=takes_periodic,
            takes_follow_ups=takes_follow_ups,
            greeted_mono_s=self.now,
        )
        return self.tell(TrainerJoined(view))

    def leave(
        self,
        connection: int = 1,
        *,
        exited: bool = True,
        is_goodbye: bool = False,
        reason: str = "finished",
    ) -> list[Action]:
        return self.tell(TrainerLeft(connection, exited, reason, is_goodbye=is_goodbye))

    def progress(self, step: int, connection: int = 1) -> list[Action]:
        return self.tell(TrainerProgress(connection, step))

    def accept(self, step: int, connection: int = 1) -> list[Action]:
        return self.tell(TrainerAccepted(connection, self.request_id, step))

    def seal(self, step: int, nonce: str = "abc", **facts: object) -> Staged:
        """A set gets its sealed name, and a scan finds it."""
        staged = a_set(step, nonce, **facts)  # type: ignore[arg-type]
        self.staging.append(staged)
        self.scan()
        return staged

    def commit(
        self, step: int, nonce: str = "abc", *, after_s: float = 0.0, **facts: object
    ) -> Staged:
        """A set gets its sealed name, and is committed after any earlier ones."""
        staged = self.seal(step, nonce, **facts)
        self.store_all(after_s=after_s)
        return staged

    def answer(self, step: int, nonce: str = "emg", connection: int = 1) -> Staged:
        """The trainer seals the requested set, and reports it."""
        trainer = next(t for t in self.state.ranks.trainers if t.connection == connection)
        staged = a_set(step, nonce, request_id=self.request_id, start_id=trainer.start_id)
        self.staging.append(staged)
        event = TrainerSealed(connection, self.request_id, step, 2.0, staged.size_bytes)
        self.tell(event)
        self.scan()
        return staged

    def serve(
        self, step: int, nonce: str = "emg", *, connection: int = 1, after_s: float = 0.0
    ) -> None:
        """The trainer accepts the request at this step, and its set of the next step is committed."""
        self.accept(step, connection)
        self.answer(step + 1, nonce, connection)
        self.store_all(after_s=after_s)

    def scan(
        self,
        *,
        rejected: tuple[tuple[str, str], ...] = (),
        growing: tuple[Staged, ...] = (),
    ) -> list[Action]:
        found = Scanned(self.now, tuple(self.staging), growing=growing, rejected=rejected)
        return self.tell(found)

    def lose(self, staged: Staged) -> list[Action]:
        """A set disappears from staging."""
        self.staging.remove(staged)
        return self.scan()

    def conclude(self, *, failure: str = "") -> list[str]:
        """Let time pass, with a scan each second, until the notice has its verdict; returns the verdicts.

        Args:
            failure: rank 0 fails at each request with this reason.
        """
        until_mono_s = self.now + 3600.0
        while self.state.evacuation and not self.state.evacuation.verdict:
            assert self.now < until_mono_s, "no verdict"
            request = self.state.evacuation.request
            if failure and request is not None and request.is_waiting:
                self.tell(TrainerFailed(1, request.request_id, failure))
            self.scan()
            self.wait(1.0)
        return self.verdicts

    def store_all(self, *, after_s: float = 0.0) -> None:
        """Flush and store complete all work, until none is left."""
        while True:
            before = len(self.actions)
            if self.state.flush.flight is not None:
                self.flushed(after_s=after_s)
            if any(item.is_asked for item in self.state.commits.stored):
                self.committed()
            if len(self.actions) == before:
                return

    def flushed(self, *, after_s: float = 0.0) -> list[Action]:
        flight = self.flight
        self.now += after_s
        return self.tell(Flushed(flight.flush_id, shards_of(flight.staged, flight.flush_id)))

    def committed(self) -> list[Action]:
        order = self.last(CommitManifest)
        id_ = order.staged.id
        ref = CommitRef(order.generation, id_.step, id_.is_final)
        return self.tell(CommitDone(order.flush_id, ref))

    def commit_fails(self, *, conflict: bool = False) -> list[Action]:
        return self.tell(CommitFailed(self.last(CommitManifest).flush_id, "503", conflict))

    # ------------------------------------------------------------------ actions

    def snapshot(self) -> Snapshot:
        """The figures of the daemon now; its wall clock shows 1.8e9 seconds more than its monotonic clock."""
        return Snapshot(
            run="llm",
            version="1.0",
            pid=7,
            born_mono_s=900.0,
            now_mono_s=self.now,
            now_wall_s=1.8e9 + self.now,
            state=self.state,
            tally=self.tally.figures,
        )

    @property
    def status(self) -> DaemonStatus:
        """The status of the daemon now."""
        return status_of(self.snapshot())

    def all(self, kind: type[A]) -> list[A]:
        """The actions of this kind, or the messages of this kind to trainers."""
        messages = [action.message for action in self.actions if isinstance(action, Send)]
        return [each for each in (*self.actions, *messages) if isinstance(each, kind)]

    def sent(self, kind: type[FromDaemon]) -> list[Send]:
        """The messages of this kind, each with the connections that get it."""
        return [sent for sent in self.all(Send) if isinstance(sent.message, kind)]

    def last(self, kind: type[A]) -> A:
        found = self.all(kind)
        assert found, f"no {kind.__name__} was ordered"
        return found[-1]

    @property
    def evacuation(self) -> Evacuation:
        """The open evacuation; fails without one."""
        assert self.state.evacuation is not None, "no evacuation is open"
        return self.state.evacuation

    @property
    def flight(self) -> Flight:
        """The flush in flight; fails without one."""
        assert self.state.flush.flight is not None, "nothing is in flight"
        return self.state.flush.flight

    @property
    def request_id(self) -> str:
        return self.last(Request).id

    @property
    def verdicts(self) -> list[str]:
        """Those that were announced; a farewell may have foretold another one."""
        told = (done for done in self.all(Conclude) if done.is_final)
        return [f"{done.verdict.value} {done.commit}" for done in told]

    @property
    def flushes(self) -> list[int]:
        """Steps of the sets whose flush was ordered, in order."""
        return [order.staged.id.step for order in self.all(StartFlush)]


def joined(connection: int = 1, **rank: Any) -> Story:
    """A story with one connected rank; the arguments are those of :meth:`Story.join`."""
    story = Story()
    story.join(connection, **rank)
    return story
