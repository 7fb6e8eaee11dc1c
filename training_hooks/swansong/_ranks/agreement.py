# SPDX-License-Identifier: Apache-2.0
"""One rank's side of agreeing with the others on the step at which all of them save.

The background thread answers a request with the last step that the rank has completed, and from that
moment the training loop stops at its next step boundary until it knows the target.  The daemon takes
the greatest step of all ranks plus one, so no rank can have passed the target when it hears of it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from swansong.protocol import Accepted, Declined, Failed, Message, Request, Sealed, Target

AGREEMENT_LIMIT_S = 5.0
"""Longest wait at a step boundary; a tenth of the time left if that is shorter."""
NEVER = sys.maxsize
_ANSWERS_MAX = 16


@dataclass(frozen=True)
class Ranks:
    """Which part of the job this process is."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1
    """How many VMs the job has."""
    restart_id: str = ""

    @classmethod
    def from_environment(cls) -> Ranks:
        """As torchrun says it in the environment.

        Raises:
            ValueError: a variable is no number, or it is not said how many ranks this VM has.
        """

        def number(name: str, default: int) -> int:
            try:
                return int(os.environ.get(name) or default)
            except ValueError:
                raise ValueError(f"{name}={os.environ[name]!r} is not a number") from None

        world_size = number("WORLD_SIZE", 1)
        if world_size > 1 and not os.environ.get("LOCAL_WORLD_SIZE"):
            raise ValueError(
                f"WORLD_SIZE is {world_size} but LOCAL_WORLD_SIZE is not set: Swansong must know how"
                " many ranks run on this VM (torchrun sets it)"
            )
        local_world_size = number("LOCAL_WORLD_SIZE", 1)
        elastic_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
        restarts = number("TORCHELASTIC_RESTART_COUNT", 0)
        return cls(
            rank=number("RANK", 0),
            local_rank=number("LOCAL_RANK", 0),
            world_size=world_size,
            local_world_size=local_world_size,
            node=number("GROUP_RANK", 0),
            nodes=number("GROUP_WORLD_SIZE", -(-world_size // max(1, local_world_size))),
            restart_id=f"{elastic_id}/{restarts}" if elastic_id else "",
        )

    def nonce(self, step: int, request_id: str, secret: str) -> str:
        """Tells two sets of one step apart; the same for all ranks that save together.

        Args:
            step: of the set.
            request_id: that it answers, or empty.
            secret: from the daemon; without one, other users can compute the name of the next set, and
                create it before the ranks do.
        """
        if self.world_size == 1:
            return secrets.token_hex(8)
        # The generation is no part of it: ranks may hear of it at different moments.
        facts = "\0".join((secret, self.restart_id, str(step), request_id))
        return hashlib.sha256(facts.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class CheckpointRequest:
    """The daemon wants a checkpoint because the VM goes away."""

    id: str
    reason: str
    deadline_mono_s: float
    """When the power goes, as far as anyone knows; seconds of ``time.monotonic()``."""
    urgency: str


@dataclass(frozen=True)
class Due:
    """A checkpoint that is to be written now."""

    kind: str
    request_id: str = ""


@dataclass
class _Active:
    request: CheckpointRequest
    limit_s: float
    accepted: Accepted
    target: int | None = None
    timed_out_at: int | None = None
    """Boundary that the rank has passed without knowing the target."""

    @property
    def due(self) -> Due:
        """What is asked for.  A drain is a precaution: nothing has to stop for it, or to hurry."""
        is_drain = self.request.urgency == "drain"
        return Due("periodic" if is_drain else "emergency", self.request.id)

    @property
    def answer(self) -> Accepted | Declined:
        """How things stand.

        The step of an acceptance stays the one first said: the rank has kept its word since, and a
        daemon that has forgotten all arrives at the same target.
        """
        if self.timed_out_at is None:
            return self.accepted
        return Declined(self.request.id, "the ranks' common step did not come in time")


@dataclass
class Agreement:
    """Between the training loop and the background thread of one rank.

    Args:
        world_size: number of ranks of the job.
        every_steps: periodic checkpoints at multiples of this step.
        send: says something to the daemon, without waiting.
    """

    world_size: int
    every_steps: int | None
    send: Callable[[Message], object]
    step: int = -1
    """Last completed step.  Written by the training loop, before it looks at ``attend_at``."""
    attend_at: int = NEVER
    """From this step on the loop must call :meth:`decide`.

    The thread lowers it before it reads ``step``, the loop writes ``step`` before it reads this: one
    of the two sees the other's write, so the loop needs no lock in a step that asks nothing of it.
    """
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _active: _Active | None = None
    _answers: dict[str, Message] = field(default_factory=dict)
    _periodic_at: int = NEVER

    def __post_init__(self) -> None:
        self.plan_periodic(0)

    # ------------------------------------------------------------ background thread

    def request(self, request: Request) -> int:
        """Answer a request, at once; one that was answered before gets the same answer again.

        Returns:
            The last completed step, after which the loop begins none until it knows the target.
        """
        with self._changed:
            if request.id in self._answers:
                self.send(self._answers[request.id])
                return int(self.step)
            if self._active is None or self._active.request.id != request.id:
                self.attend_at = -1
                left_s = max(0.0, request.seconds_left)
                self._active = _Active(
                    request=CheckpointRequest(
                        id=request.id,
                        reason=request.reason,
                        deadline_mono_s=time.monotonic() + left_s,
                        urgency=request.urgency,
                    ),
                    limit_s=min(AGREEMENT_LIMIT_S, left_s / 10),
                    accepted=Accepted(request_id=request.id, step=int(self.step)),
                )
                self._changed.notify_all()
            self.send(self._active.answer)
            return self._active.accepted.step

    def repeat_answer(self, request_id: str) -> bool:
        """Say once more how things stand with a request; False when it is not known."""
        with self._changed:
            active = self._active
            if active is not None and active.request.id == request_id:
                self.send(active.answer)
            elif request_id in self._answers:
                self.send(self._answers[request_id])
            else:
                return False
            return True

    def abort(self, request_id: str, reason: str) -> None:
        """The ranks have given the request up."""
        with self._changed:
            if self._active is not None and self._active.request.id == request_id:
                self._answer(Declined(request_id, reason))

    def wait_finished(self, request_id: str, limit_s: float) -> None:
        """Wait until this rank has saved for the request, or will not."""

        def is_over() -> bool:
            return self._active is None or self._active.request.id != request_id

        with self._changed:
            self._changed.wait_for(is_over, limit_s)

    def target(self, target: Target) -> None:
        """The ranks' common step is known.  The first target that is heard stands."""
        with self._changed:
            active = self._active
            if (
                active is not None
                and active.request.id == target.request_id
                and active.target is None
            ):
                active.target = target.step
                self._changed.notify_all()

    def withdraw(self, request_id: str) -> None:
        """The request no longer stands."""
        with self._changed:
            if self._active is not None and self._active.request.id == request_id:
                self._end_request()

    def resend(self) -> None:
        """Say again, after a reconnect, how things stand."""
        with self._changed:
            if self._active is not None:
                self.send(self._active.answer)
            elif self._answers:
                self.send(list(self._answers.values())[-1])

    def periodic_is_due(self) -> None:
        """A periodic checkpoint is due at the next step boundary."""
        with self._changed:
            self._periodic_at = -1
            self._update_attend_at()

    # ------------------------------------------------------------ training loop

    @property
    def current(self) -> CheckpointRequest | None:
        """The request that is under way."""
        active = self._active
        return active.request if active is not None and active.timed_out_at is None else None

    def decide(self, step: int) -> Due | None:
        """What is to be done at the boundary after ``step``; waits for the target, within limits."""
        with self._changed:
            due = self._decide_request(step)
            if due is None and step >= self._periodic_at:
                due = Due("periodic")
            self._update_attend_at()
            return due

    def between_steps(self) -> Due | None:
        """What may be done while no step is under way; never waits.

        A lone rank can save the state of its last completed step.  Several cannot: they have no
        target that they have already reached.
        """
        with self._changed:
            active = self._active
            if active is None or self.world_size > 1 or active.timed_out_at is not None:
                return None
            # A target beyond the next boundary is meant: somebody wants that very step.
            is_later = active.target is not None and active.target > self.step + 1
            return None if is_later else active.due

    def _decide_request(self, step: int) -> Due | None:
        active = self._active
        if active is None:
            return None
        if active.timed_out_at is None:
            self._changed.wait_for(
                lambda: self._active is not active or active.target is not None, active.limit_s
            )
        if self._active is not active:  # withdrawn, or another one has come
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
                Failed(active.request.id, step, f"step {active.target} had passed already")
            )
            return None
        return active.due

    def done(self, due: Due, step: int, answer: Sealed | Failed | Declined | None) -> None:
        """A checkpoint was written, or failed.  ``answer`` goes to the daemon, now and when it asks again.

        None: this rank's part is written, and other ranks of this node will seal the set; or it is
        copied, and :meth:`report` will tell what becomes of it.
        """
        with self._changed:
            active = self._active
            if due.request_id and answer is not None:
                self._answer(answer)
            elif due.request_id and active is not None and active.request.id == due.request_id:
                self._remember(active.accepted)
                self._end_request()
            elif answer is not None:
                self.send(answer)
            self.plan_periodic(step)

    def report(self, answer: Sealed | Failed) -> None:
        """A checkpoint that was written behind the training loop is sealed, or failed."""
        with self._changed:
            if answer.request_id:
                self._answer(answer)
            else:
                self.send(answer)

    def plan_periodic(self, step: int) -> None:
        """The last checkpoint is that of ``step``: from when is the next periodic one due?"""
        with self._changed:
            every = self.every_steps
            self._periodic_at = (step // every + 1) * every if every else NEVER
            self._update_attend_at()

    def _answer(self, answer: Sealed | Failed | Declined) -> None:
        self._remember(answer)
        self.send(answer)
        if self._active is not None and self._active.request.id == answer.request_id:
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
