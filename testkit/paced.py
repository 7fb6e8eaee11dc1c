# SPDX-License-Identifier: Apache-2.0
"""VMs of one run in virtual time: saves, a link, its responses and manifests each take a known time.

The production machine decides; this module plays trainer, staging, flush and store, with a random deviation
of each duration.  A manifest carries the pace to the next VM, as a bucket does.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from swansong_bucket.model import CommitRef, Staged, StoredShard
from swansongd.core.events import (
    CommitDone,
    CommitManifest,
    Flushed,
    FlushProgress,
    PaceRead,
    RunRead,
    Scanned,
    TrainerAccepted,
    TrainerProgress,
    TrainerSealed,
)

from testkit.story import Story, a_set, shards_of

TICK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """The durations of a run."""

    size_bytes: int
    files: int
    save_s: float
    link_bytes_per_s: float
    response_s: float = 0.1
    commit_s: float = 0.1
    step_s: float = 0.2
    deviation: float = 0.05
    """Relative standard deviation of each duration."""


class PacedVm(Story):
    """One VM with a trainer of one rank."""

    def __init__(
        self,
        physics: Physics,
        seed: int,
        *,
        generation: int = 1,
        pace: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(claimed=False, reserve_s=3.0)
        self.physics = physics
        self.step = 100 * generation
        self.pace: Mapping[str, float] = pace or {}
        """The figures of the newest manifest."""
        self._random = random.Random(f"{seed} {generation}")
        self._flush_id = ""
        self._stored: dict[str, float] = {}
        self._sent = 0.0
        self._left_s = 0.0
        self._link = physics.link_bytes_per_s
        newest = CommitRef(generation - 1, self.step - 50) if pace is not None else None
        self.next_generation = generation
        self.scan()
        self.tell(RunRead(newest, "earlier" if newest else ""))
        if pace is not None:
            self.tell(PaceRead(pace))
        self.join(step=self.step)
        self.starts(self.step)
        self.tell(TrainerProgress(1, self.step, step_s=physics.step_s))

    def periodic(self) -> None:
        """A checkpoint of the trainer's own schedule, until its commit."""
        self.step += 10
        took_s = self._about(1.2 * self.physics.save_s)  # the files are flushed to the disk
        self._pass(took_s)
        self._seal("", took_s)
        self._until_committed()

    def evacuate(self, in_s: float = 600.0) -> tuple[float | None, float]:
        """A notice, until the commit of the requested checkpoint: expected and actual time."""
        physics = self.physics
        self.notice(in_s)
        began_s = self.now
        request = self.request_id
        self._pass(self._random.random() * physics.step_s)
        self.tell(TrainerAccepted(1, request, self.step))
        self.step += 1
        save_s = self._about(physics.save_s)
        ends_s = self.now + save_s
        whole = self._new_set(request)
        for number in range(1, physics.files):
            self._pass(ends_s - save_s * (1 - number / physics.files) - self.now)
            self.tell(
                Scanned(
                    self.now,
                    tuple(self.staging),
                    growing=(replace(whole, files=whole.files[:number]),),
                )
            )
        self._pass(ends_s - self.now)
        self._seal(request, save_s)
        self._until_committed()
        evacuation = self.state.evacuation
        assert evacuation is not None
        assert evacuation.request is not None
        return evacuation.request.expected_s, self.now - began_s

    # ------------------------------------------------------------------ the physics

    def _about(self, seconds: float) -> float:
        return seconds * max(0.5, self._random.gauss(1.0, self.physics.deviation))

    def _new_set(self, request_id: str) -> Staged:
        physics = self.physics
        whole = a_set(self.step, f"n{self.step}", request_id=request_id)
        size = physics.size_bytes // physics.files
        files = tuple(
            whole.files[0]._replace(path=f"rank-00000/{i}.bin", inode=i, size_bytes=size)
            for i in range(physics.files)
        )
        return replace(whole, files=files)

    def _seal(self, request_id: str, save_s: float) -> None:
        staged = self._new_set(request_id)
        self.staging.append(staged)
        self.tell(TrainerSealed(1, request_id, self.step, save_s, staged.size_bytes))
        self.scan()

    def _until_committed(self) -> None:
        before = len(self.all(CommitManifest))
        while len(self.all(CommitManifest)) == before:
            self._tick(TICK_S)
        order = self.last(CommitManifest)
        self.pace = order.pace
        self.now += self._about(self.physics.commit_s)
        id_ = order.staged.id
        self.tell(CommitDone(order.flush_id, CommitRef(order.generation, id_.step)))

    def _pass(self, seconds: float) -> None:
        end_s = self.now + max(0.0, seconds)
        while self.now < end_s - 1e-9:
            self._tick(min(TICK_S, end_s - self.now))

    def _tick(self, seconds: float) -> None:
        """Let time pass, and the flush in flight send."""
        flight = self.state.flush.flight
        if flight is not None and flight.flush_id != self._flush_id:
            self._flush_id, self._sent = flight.flush_id, 0.0
            self._link = self.physics.link_bytes_per_s / self._about(1.0)
            self._left_s = self._about(self.physics.response_s)
        self.wait(seconds)
        if (
            flight is None
            or self.state.flush.flight is None
            or self.state.flush.flight.flush_id != self._flush_id
        ):
            return
        key, size = str(flight.staged.id), float(flight.staged.size_bytes)
        stored = self._stored.get(key, 0.0)
        moved = min(self._link * seconds, size - stored)
        if moved <= 0:
            self._left_s -= seconds
            if self._left_s <= 0 and flight.is_sealed:
                self.tell(Flushed(self._flush_id, self._shards(flight.staged)))
            return
        self._stored[key], self._sent = stored + moved, self._sent + moved
        self.tell(FlushProgress(self._flush_id, round(stored + moved), round(self._sent)))

    def _shards(self, staged: Staged) -> tuple[StoredShard, ...]:
        return shards_of(staged, self._flush_id)
