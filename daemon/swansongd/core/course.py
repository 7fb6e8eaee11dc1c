# SPDX-License-Identifier: Apache-2.0
"""The course of the open evacuation, and of those before it in this life of the daemon.

:mod:`swansongd.core.evacuation` opens and ends it, :mod:`swansongd.core.emergency` makes its requests, and
:mod:`swansongd.core.verdict` concludes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict, Unpack

from swansong_bucket.model import CommitRef, Notice, Verdict

from swansongd.core.events import Conclude, Exit
from swansongd.core.planner import Plan
from swansongd.core.state import CheckpointRequest, CourseState, Evacuation
from swansongd.core.transition import Transition

OPENED_MAX = 64


def begin(transition: Transition, evacuation: Evacuation) -> None:
    """An evacuation opens, perhaps in place of another one."""
    course = transition.state.course
    opened = (*course.opened, evacuation.id)[-OPENED_MAX:]
    _put_course(transition, replace(course, opened=opened))
    _put(transition, evacuation)


def end(transition: Transition) -> None:
    """The evacuation ends."""
    _put(transition, None)


class Facts(TypedDict, total=False):
    """The facts of an open evacuation that other modules find out."""

    deadline_mono_s: float
    identities: frozenset[str]
    plan: Plan
    refusal: str
    foretold: tuple[Verdict, CommitRef | None, CommitRef | None]


def record(transition: Transition, **facts: Unpack[Facts]) -> None:
    """Facts of the open evacuation have changed."""
    _put(transition, replace(transition.evacuation, **facts))


def record_made(transition: Transition, request: CheckpointRequest) -> None:
    """A request, or a follow-up request, is made."""
    evacuation = transition.evacuation
    if request.is_follow_up:
        evacuation = replace(evacuation, follow_ups=evacuation.follow_ups + 1)
    else:
        evacuation = replace(evacuation, requests=evacuation.requests + 1)
    _put(transition, evacuation)
    update_request(transition, request)


def update_request(transition: Transition, request: CheckpointRequest) -> None:
    """The request, or the follow-up request, has come further."""
    if request.is_follow_up:
        _put(transition, replace(transition.evacuation, follow_up=request))
    else:
        _put(transition, replace(transition.evacuation, request=request))


def record_verdict(transition: Transition, made: Conclude) -> None:
    """The verdict is announced."""
    _put(transition, replace(transition.evacuation, verdict=made.verdict))
    _put_course(transition, replace(transition.state.course, last_verdict=made))


def record_repeated(transition: Transition, notice: Notice, repeated: Notice) -> None:
    """A notice is repeated: the verdict that answers it answers both."""
    course = transition.state.course
    last = course.last_verdict
    if last is not None and notice.identity in last.notices:
        answered = replace(last, notices=last.notices | {repeated.identity})
        _put_course(transition, replace(course, last_verdict=answered))


def leave(transition: Transition, exit_code: int, reason: str) -> None:
    """End the daemon: it decides nothing any more."""
    transition.do(Exit(exit_code, reason))
    _put_course(transition, replace(transition.state.course, is_leaving=True))


def forget(transition: Transition) -> None:
    """Forget the open evacuation: its notices open it again, with the same id."""
    _put(transition, None)
    _put_course(transition, replace(transition.state.course, opened=()))


def _put(transition: Transition, evacuation: Evacuation | None) -> None:
    transition.state = replace(transition.state, evacuation=evacuation)


def _put_course(transition: Transition, course: CourseState) -> None:
    transition.state = replace(transition.state, course=course)
