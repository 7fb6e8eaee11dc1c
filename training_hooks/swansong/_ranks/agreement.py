# SPDX-License-Identifier: Apache-2.0
"""One rank's part in the agreement on the step at which all ranks save.

The background thread answers a request with the last step that the rank has completed.  From then on the
training loop stops at its next step boundary until it receives the target.  The daemon, or a round of the
ranks, chooses the greatest step of all ranks plus one.  So no rank has passed the target when it arrives.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swansong.bounds import NEVER
from swansong.protocol import (
    Accepted,
    Declined,
    Failed,
    Message,
    Request,
    RequestQuery,
    Sealed,
    Target,
)

AGREEMENT_LIMIT_S = 5.0
"""Longest wait at a step boundary.  The limit is a tenth of the time left if that is shorter."""
UNASKED_S = 3.0
"""Wait for the request of a daemon that cannot be asked; pause before a query is repeated."""
_UNSENT_MAX = 2
"""Queries in a row that find no daemon: a restart takes 1 s."""
_ANSWERS_MAX = 16
_LOOK_S = 0.05


@dataclass(frozen=True)
class Ranks:
    """Position of this process in the job, and the size of the job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1
    """Number of VMs of the job."""
    start_id: str = field(default="", compare=False)
    """Id of the start in a job on one VM, which rank 0 has drawn; empty if this rank did not get it from rank
    0 in the store of the process group."""

    @property
    def of_this_vm(self) -> range:
        """Ranks of this VM, if the launcher has numbered them in order."""
        first = self.rank - self.local_rank
        return range(max(0, first), min(first + self.local_world_size, self.world_size))

    @classmethod
    def among(cls, vms: Mapping[int, Hashable]) -> dict[int, Ranks]:
        """Return, by rank, the positions in a job that has only these ranks, counted without gaps.

        Args:
            vms: by rank, in order, its VM.  The VMs are numbered in the order of their first ranks.
        """
        sizes = Counter(vms.values())
        nodes = {vm: node for node, vm in enumerate(sizes)}
        on_vm: Counter[Hashable] = Counter()
        places = {}
        for number, (rank, vm) in enumerate(vms.items()):
            places[rank] = cls(
                rank=number,
                local_rank=on_vm[vm],
                world_size=len(vms),
                local_world_size=sizes[vm],
                node=nodes[vm],
                nodes=len(nodes),
            )
            on_vm[vm] += 1
        return places

    def position(self) -> dict[str, Any]:
        """Return this position, without the start, as fields of a message."""
        fields = dataclasses.asdict(self)
        del fields["start_id"]
        return fields

    def in_manifest(self) -> dict[str, Any]:
        """Return this position as fields of a rank manifest."""
        fields = self.position()
        del fields["local_rank"]
        return fields

    def nonce(self, start_id: str, step: int, request_id: str, secret: str) -> str:
        """Return the nonce in the name of a set, the same for all ranks that save together.

        Args:
            start_id: of the start of the training that the set belongs to.
            step: of the set.
            request_id: of the request that the set answers, or empty.
            secret: from the daemon.  Without a secret, other users could compute the name of the next set,
                and create it before the ranks do.

        Returns:
            16 hexadecimal digits.
        """
        if self.world_size == 1:
            return secrets.token_hex(8)
        facts = "\0".join((secret, start_id, str(step), request_id))
        return hashlib.sha256(facts.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SaveRequest:
    """The daemon's request for a checkpoint, because the VM will be terminated."""

    id: str
    reason: str
    deadline_mono_s: float
    """Expected end of the VM, in seconds of ``time.monotonic()``."""
    urgency: str
    """``emergency``; or ``drain``: a precaution, for which training need not stop early."""


@dataclass(frozen=True)
class Due:
    """A checkpoint that the training loop must take now."""

    kind: str
    request_id: str = ""


@dataclass
class _Active:
    request: SaveRequest
    limit_s: float
    accepted: Accepted
    target: int | None = None
    timed_out_at: int | None = None
    """Step boundary that the rank has passed without a target."""

    @property
    def due(self) -> Due:
        """The checkpoint to take."""
        is_drain = self.request.urgency == "drain"
        return Due("periodic" if is_drain else "emergency", self.request.id)

    @property
    def answer(self) -> Accepted | Declined:
        """The answer to the daemon.

        A repeated acceptance contains the first step again.  The rank has begun no step since, so a restarted
        daemon computes the same target.
        """
        if self.timed_out_at is None:
            return self.accepted
        return Declined(self.request.id, "the target step did not arrive in time")


@dataclass
class Agreement:
    """State that the training loop and the background thread of one rank share.

    Args:
        world_size: number of ranks of the job.
        every_steps: interval of periodic checkpoints, in steps; None without them.
        send: sends a message to the daemon, without blocking.
    """

    world_size: int
    every_steps: int | None
    send: Callable[[Message], object]
    step: int = -1
    """Last completed step.  The training loop writes it before it reads ``attend_at``."""
    attend_at: int = NEVER
    """First step after which the loop must call :meth:`decide`.

    The thread lowers it before it reads ``step``; the loop writes ``step`` before it reads this.  One of the
    two sees the other's write, so the loop needs no lock at a step without a request.
    """
    had_emergency: bool = False
    """An emergency request has arrived, even if it has been answered or withdrawn since."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _active: _Active | None = None
    _newest_id: str = ""
    """Id of the last request that has arrived, which may have been answered since."""
    _is_asking: bool = False
    """The daemon has not answered yet whether it requests a checkpoint."""
    _answers: dict[str, Message] = field(default_factory=dict)
    _periodic_at: int = NEVER

    def __post_init__(self) -> None:
        self.plan_periodic(0)

    # ------------------------------------------------------------ background thread

    def request(self, request: Request) -> int:
        """Answer a request immediately.  A repeated request gets the same answer again.

        Returns:
            The last completed step.  The loop begins no further step until it receives the target.
        """
        with self._changed:
            if request.id not in self._answers and self._find(request.id) is None:
                self.attend_at = -1
                self._newest_id = request.id
                self.had_emergency |= request.urgency == "emergency"
                left_s = max(0.0, request.seconds_left)
                self._active = _Active(
                    request=SaveRequest(
                        id=request.id,
                        reason=request.reason,
                        deadline_mono_s=time.monotonic() + left_s,
                        urgency=request.urgency,
                    ),
                    limit_s=min(AGREEMENT_LIMIT_S, left_s / 10),
                    accepted=Accepted(request_id=request.id, step=int(self.step)),
                )
                self._changed.notify_all()
            self.repeat_answer(request.id)
            active = self._find(request.id)
            return int(self.step) if active is None else active.accepted.step

    def repeat_answer(self, request_id: str) -> bool:
        """Send the answer to a request again; returns False if the request is unknown."""
        with self._changed:
            active = self._find(request_id)
            answer = self._answers.get(request_id) if active is None else active.answer
            if answer is not None:
                self.send(answer)
            return answer is not None

    def abort(self, request_id: str, reason: str) -> None:
        """Decline the request, because the ranks did not agree on a target."""
        with self._changed:
            if self._find(request_id) is not None:
                self._answer(Declined(request_id, reason))

    def wait_finished(self, request_id: str, limit_s: float) -> None:
        """Wait until the request is no longer in progress at this rank."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(request_id) is None, limit_s)

    @property
    def ended_id(self) -> str:
        """Id of the newest request if it has ended; empty while it is in progress."""
        with self._changed:
            return self._newest_id if self._active is None else ""

    def wait_requested(self, limit_s: float, *, ended_id: str) -> str:
        """Wait until a request is in progress, or has arrived after ``ended_id``, and return its id.

        Args:
            limit_s: longest wait, in seconds.
            ended_id: the property of this name, at the time from which requests count.

        Returns:
            Id of the request, which the training loop may have answered since; empty without one.
        """
        with self._changed:
            self._look(limit_s, lambda: self._newest_id != ended_id)
            return self._newest_id if self._newest_id != ended_id else ""

    def ask_for_request(self, limit_s: float, *, ended_id: str) -> str:
        """Ask the daemon for a request; otherwise like :meth:`wait_requested`.

        The wait ends with the answer that no checkpoint will come, and without a connection.
        """
        with self._changed:
            self._is_asking = True
            unsent = 0
            while limit_s > 0 and unsent < _UNSENT_MAX and self._is_asking:
                if self._newest_id != ended_id:
                    break
                # A query may be lost with its connection.
                unsent = 0 if self.send(RequestQuery(int(self.step))) else unsent + 1
                self._look(
                    min(limit_s, UNASKED_S),
                    lambda: self._newest_id != ended_id or not self._is_asking,
                )
                limit_s -= UNASKED_S
            return self._newest_id if self._newest_id != ended_id else ""

    def _look(self, limit_s: float, is_over: Callable[[], bool]) -> None:
        # In looks: while the process is stopped, or a C function holds the interpreter's lock, no message can
        # arrive here, and the time must not count.
        for _ in range(max(1, round(limit_s / _LOOK_S))):
            if self._changed.wait_for(is_over, _LOOK_S):
                return

    def not_requested(self) -> None:
        """Record the daemon's answer that no checkpoint will come."""
        with self._changed:
            self._is_asking = False
            self._changed.notify_all()

    def wait_taken(self, request_id: str, limit_s: float) -> bool:
        """Wait until this rank has taken the checkpoint of a request; whether it is copied or in staging."""
        self.wait_finished(request_id, limit_s)
        with self._changed:
            return isinstance(self._answers.get(request_id), Accepted | Sealed)

    def is_withdrawn(self, request_id: str) -> bool:
        """Whether the request has ended without an answer: withdrawn, or replaced by a later one."""
        with self._changed:
            return self._find(request_id) is None and request_id not in self._answers

    def target(self, target: Target) -> None:
        """Set the step at which all ranks save.  Later targets for the same request are ignored."""
        with self._changed:
            active = self._find(target.request_id)
            if active is not None and active.target is None:
                active.target = target.step
                self._changed.notify_all()

    def withdraw(self, request_id: str) -> None:
        """Drop a request that the daemon has withdrawn.

        The target of several ranks is final: one of them may have saved there already, and stopped.
        """
        with self._changed:
            active = self._find(request_id)
            if active is not None and (self.world_size == 1 or active.target is None):
                self._end_request()

    def resend(self) -> None:
        """Repeat the last answer after a reconnect."""
        with self._changed:
            if self._active is not None:
                self.send(self._active.answer)
            elif self._answers:
                self.send(list(self._answers.values())[-1])

    def periodic_is_due(self) -> None:
        """Take a periodic checkpoint at the next step boundary."""
        with self._changed:
            self._periodic_at = -1
            self._update_attend_at()

    # ------------------------------------------------------------ training loop

    def begin(self, step: int) -> None:
        """A start of the training begins after this step: answers of an earlier start do not count for it.

        A request that arrived during a rollback was accepted with the step before it.  Its target is such a
        step, too, which this start may not reach in time.
        """
        with self._changed:
            self._answers.clear()
            self.step = step
            active = self._active
            if active is not None and active.accepted.step > step:
                self._answer(Declined(active.request.id, "the training was started again"))

    @property
    def current(self) -> SaveRequest | None:
        """The request in progress, unless this rank has declined it."""
        active = self._active
        return active.request if active is not None and active.timed_out_at is None else None

    def decide(self, step: int) -> Due | None:
        """Return the checkpoint to take after ``step``; waits for the target, within limits."""
        with self._changed:
            due = self._decide_request(step)
            if due is None and step >= self._periodic_at:
                due = Due("periodic")
            self._update_attend_at()
            return due

    def between_steps(self) -> Due | None:
        """Return the checkpoint that may be taken while no step is in progress.  Never blocks.

        A job of one rank can save the state of its last completed step.  Several ranks cannot: their target
        is always a later step.
        """
        with self._changed:
            active = self._active
            if active is None or self.world_size > 1 or active.timed_out_at is not None:
                return None
            # The target is the next boundary at the acceptance.  A later one means that step only.
            next_step = active.accepted.step + 1
            is_later = active.target is not None and active.target > max(self.step, next_step)
            return None if is_later else active.due

    def _decide_request(self, step: int) -> Due | None:
        active = self._active
        if active is None:
            return None
        if active.timed_out_at is None:
            self._changed.wait_for(
                lambda: self._active is not active or active.target is not None, active.limit_s
            )
        if self._active is not active:  # withdrawn, or replaced by another request
            return None if self._active is None else self._decide_request(step)
        if active.target is None:
            is_news = active.timed_out_at is None
            active.timed_out_at = step
            if is_news:
                self.send(active.answer)
            if time.monotonic() > active.request.deadline_mono_s:
                self._end_request()
            return None
        if step < active.target:
            return None
        if (
            self.world_size > 1
            and active.timed_out_at is not None
            and active.timed_out_at >= active.target
        ):
            self._answer(
                Failed(active.request.id, step, f"step {active.target} had already passed")
            )
            return None
        return active.due

    def done(self, request_id: str, step: int, answer: Sealed | Failed | Declined | None) -> None:
        """Record that the checkpoint was taken, or failed.

        Args:
            request_id: of the request that it answers; empty without one.
            step: last completed step.
            answer: for the daemon, now and when it repeats the request.  None if another rank of this VM will
                seal the set, or if the state is only copied and :meth:`report` will follow.
        """
        with self._changed:
            active = self._find(request_id)
            if answer is not None:
                self._answer(answer)
            elif active is not None:
                self._remember(active.accepted)
                self._end_request()
            self.plan_periodic(step)

    def report(self, answer: Sealed | Failed) -> None:
        """Send the result of a checkpoint that was written in the background."""
        with self._changed:
            self._answer(answer)

    def plan_periodic(self, step: int) -> None:
        """Schedule the next periodic checkpoint; the last one is that of ``step``."""
        with self._changed:
            every = self.every_steps
            self._periodic_at = (step // every + 1) * every if every else NEVER
            self._update_attend_at()

    def _find(self, request_id: str) -> _Active | None:
        """Return the request in progress if it has this id."""
        active = self._active
        return active if active is not None and active.request.id == request_id else None

    def _answer(self, answer: Sealed | Failed | Declined) -> None:
        if answer.request_id:
            self._remember(answer)
        self.send(answer)
        if self._find(answer.request_id) is not None:
            self._end_request()

    def _remember(self, answer: Accepted | Sealed | Failed | Declined) -> None:
        self._answers[answer.request_id] = answer
        while len(self._answers) > _ANSWERS_MAX:
            self._answers.pop(next(iter(self._answers)))

    def _end_request(self) -> None:
        self._active = None
        self._update_attend_at()
        self._changed.notify_all()

    def _update_attend_at(self) -> None:
        active = self._active
        if active is None:
            self.attend_at = self._periodic_at
        else:
            self.attend_at = -1 if active.target is None else min(active.target, self._periodic_at)
