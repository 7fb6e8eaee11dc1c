# SPDX-License-Identifier: Apache-2.0
"""A story for the state machine: methods are events, and the resulting actions are recorded.

Time moves only by calls, and nothing responds by itself: a test plays the trainers, the flush and the store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from swansong.protocol import sealed_name
from swansongd.core import gpus, machine, restart
from swansongd.core.events import (
    Action,
    AskTrainers,
    CommitDone,
    CommitFailed,
    CommitManifest,
    Conclude,
    Event,
    Flushed,
    GenerationClaimed,
    NoticeRaised,
    NoticeWithdrawn,
    Scanned,
    StartFlush,
    Tick,
    TrainerAccepted,
    TrainerJoined,
    TrainerLeft,
    TrainerProgress,
    TrainerSealed,
)
from swansongd.core.state import Settings, State
from swansongd.host import gpu_record, training_record
from swansongd.model import (
    CheckpointId,
    CheckpointKind,
    CommitRef,
    DeadlineQuality,
    Notice,
    Severity,
    Staged,
    StagedFile,
    StoredObject,
    StoredShard,
    TrainerView,
)

from testkit.committed import named_shard

A = TypeVar("A", bound=Action)
MIB = 2**20


def a_notice(
    source: str = "aws.spot",
    *,
    deadline_mono_s: float,
    severity: Severity = Severity.IMMINENT,
    identity: str = "",
    kind: str = "reclaim",
) -> Notice:
    return Notice(
        source=source,
        kind=kind,
        identity=identity or f"{source}:1",
        severity=severity,
        deadline_mono_s=deadline_mono_s,
        deadline_quality=DeadlineQuality.STATED,
    )


def a_set(
    step: int,
    nonce: str = "abc",
    *,
    size_bytes: int = 100 * MIB,
    request_id: str = "",
    framework: str = "swansong",
    is_final: bool = False,
    start_id: str = "",
) -> Staged:
    kind = CheckpointKind.EMERGENCY if request_id else CheckpointKind.PERIODIC
    return Staged(
        id=CheckpointId(step, nonce, is_final),
        directory=sealed_name(step, nonce) if framework == "swansong" else f"checkpoint-{step}",
        kind=CheckpointKind.FINAL if is_final else kind,
        files=(StagedFile(path="model.bin", size_bytes=size_bytes, mtime_ns=1, inode=step),),
        framework=framework,
        request_id=request_id,
        starts=frozenset({start_id} - {""}),
    )


def shards_of(staged: Staged, flush_id: str = "f") -> tuple[StoredShard, ...]:
    attempt = re.sub("[^A-Za-z0-9]", "-", flush_id)
    return tuple(
        named_shard(
            file.path,
            file.size_bytes,
            f"r/data/00000001/{attempt}/00000/{file.path}",
            part_size_bytes=max(MIB, file.size_bytes // 2**16),  # some sizes are out of this world
        )
        for file in staged.files
    )


def objects_of(shards: Sequence[StoredShard]) -> list[StoredObject]:
    return [extent.object for shard in shards for extent in shard.extents]


def as_stored(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as the next daemon reads them."""
    found: dict[str, Any] = json.loads(json.dumps(facts))
    return found


class Story:
    """A decision loop that has just started; with ``claimed``, it has scanned staging and has a claim."""

    def __init__(
        self,
        *,
        claimed: bool = True,
        generation: int = 2,
        newest: CommitRef | None = None,
        staged: Iterable[Staged] = (),
        reserve_s: float = 5.0,
        signals_trainer: bool = False,
    ) -> None:
        settings = Settings(reserve_s=reserve_s, signals_trainer=signals_trainer)
        self.state = State(settings=settings)
        self.now = 1000.0
        self.actions: list[Action] = []
        self.staging = list(staged)
        if claimed:
            self.scan()
            self.tell(GenerationClaimed(generation, newest))

    def restarted(
        self,
        *,
        claimed: bool = True,
        newest: CommitRef | None = None,
        generation: int | None = None,
        ended: Collection[int] = (),
        remembers: bool = True,
    ) -> Story:
        """The next life of the daemon, in the same boot and with the same staging.

        Args:
            claimed: it has scanned staging and holds the claim of its earlier life.
            newest: the newest commit, if it is not the last one of this life.
            generation: of the claim, if it is another one.
            ended: pids of trainers that have ended meanwhile.
            remembers: it has the record of the training; not after ``systemctl stop``.
        """
        own = self.state.generation or self.state.settings.sealed_under
        after = Story(claimed=False, staged=self.staging)
        after.now = self.now + 1
        after.state = replace(
            after.state,
            settings=replace(self.state.settings, sealed_under=own),
            abandoned=self.state.abandoned,
            unusable=self.state.abandoned,
        )
        gpu = gpus.record_of(self.state)
        if gpu is not None:
            after.state = gpus.resumed(
                after.state, gpu_record.parse(as_stored(gpu_record.facts_of(gpu)))
            )
        if remembers:
            facts = training_record.facts_of(restart.record_of(self.state))
            training = training_record.parse(as_stored(facts))
            running = [view for view in training.trainers if view.pid not in ended]
            after.state = restart.resumed(after.state, training, running)
        if claimed:
            after.scan()
            assert own is not None
            after.tell(GenerationClaimed(generation or own, newest or self.state.last_complete))
        return after

    # ------------------------------------------------------------------ events

    def tell(self, event: Event) -> list[Action]:
        """Post one event; returns the actions."""
        self.state, actions = machine.step(self.state, event, self.now)
        self.actions += actions
        return list(actions)

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
    ) -> Notice:
        self.now += 0.01  # every scan so far began before it
        raised = a_notice(
            source, deadline_mono_s=self.now + in_s, severity=severity, identity=identity
        )
        self.tell(NoticeRaised(raised))
        return raised

    def withdraw(self, source: str = "aws.spot") -> list[Action]:
        return self.tell(NoticeWithdrawn(source, "gone"))

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
        start_id: str = "",
        nodes: int = 1,
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
            nodes=nodes,
            takes_follow_ups=takes_follow_ups,
            greeted_mono_s=self.now,
        )
        return self.tell(TrainerJoined(view))

    def leave(self, connection: int = 1, *, exited: bool = True) -> list[Action]:
        return self.tell(TrainerLeft(connection, exited, "gone"))

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

    def answer(self, step: int, nonce: str = "emg", connection: int = 1) -> Staged:
        """The trainer seals the requested set, and reports it."""
        staged = a_set(step, nonce, request_id=self.request_id)
        self.staging.append(staged)
        event = TrainerSealed(connection, self.request_id, step, 2.0, staged.size_bytes)
        self.tell(event)
        self.scan()
        return staged

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

    def store_all(self, *, after_s: float = 0.0) -> None:
        """Flush and store complete all work, until none is left."""
        while True:
            before = len(self.actions)
            if self.state.flight is not None:
                self.flushed(after_s=after_s)
            if any(item.is_asked for item in self.state.stored):
                self.committed()
            if len(self.actions) == before:
                return

    def flushed(self, *, after_s: float = 0.0) -> list[Action]:
        flight = self.state.flight
        assert flight is not None, "nothing is in flight"
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

    def all(self, kind: type[A]) -> list[A]:
        return [action for action in self.actions if isinstance(action, kind)]

    def last(self, kind: type[A]) -> A:
        found = self.all(kind)
        assert found, f"no {kind.__name__} was ordered"
        return found[-1]

    @property
    def request_id(self) -> str:
        return self.last(AskTrainers).request_id

    @property
    def verdicts(self) -> list[str]:
        """Those that were announced; a farewell may have foretold another one."""
        told = (done for done in self.all(Conclude) if done.is_final)
        return [f"{done.verdict.value} {done.commit}" for done in told]

    @property
    def flushes(self) -> list[int]:
        """Steps of the sets whose flush was ordered, in order."""
        return [order.staged.id.step for order in self.all(StartFlush)]
