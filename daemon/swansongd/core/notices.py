# SPDX-License-Identifier: Apache-2.0
"""Notices: which ones are in force, which deadline counts, and how many evacuations one source may cause.

A source may name any time, any number of times.  Three rules make that harmless:

- A time in the past is wrong while the VM runs: an assumed time replaces it.
- While an evacuation answers a notice, its deadline never moves later.  A later time that the source names
  meanwhile counts once the VM has outlived the earlier one.
- Each source causes :data:`AT_ONCE` evacuations in a row, and one more every :data:`EVERY_S`.  Operators
  and the host's own shutdown are exempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swansong_bucket.model import (
    PEER_SOURCE,
    DeadlineQuality,
    Health,
    Notice,
    Position,
    Severity,
    SourceStatus,
)

from swansongd.core import course
from swansongd.core.request_ids import are_of_one
from swansongd.core.state import NoticeState, State
from swansongd.core.transition import HOST_SOURCE, LOGIND_SOURCE, Transition

OUTLIVED_S = 10.0
"""A VM that still runs this long after its deadline was not terminated: watch again."""
AT_ONCE = 3
EVERY_S = 20.0
BY_HAND = ("manual", "drill")
"""Sources of notices by hand: several can be in force at the same time, each with another deadline."""
BY_HAND_MAX = 16
UNWATCHED = frozenset((*BY_HAND, PEER_SOURCE, HOST_SOURCE))
"""Notices with these sources were received once; no source of the configuration shows or withdraws them."""
SAME_END_S = 0.3
"""Notices by hand with deadlines this close are one notice: simultaneous calls, or a retried call."""
REPEATS_MAX = 16
PRECAUTION = "precaution"
PRECAUTION_EVERY_S = 600.0
"""Advisory notices can come in storms; at most one in this time causes a checkpoint."""
PEER_LONGEST_S = 3600.0
"""The longest notice that a cloud gives: host maintenance."""
PEER_REQUEST = "peer-request"
"""Requests of other VMs become notices at the rate of one source."""


def record_source(transition: Transition, status: SourceStatus) -> None:
    """The health of a source changed."""
    notices = transition.state.notices
    _put(transition, replace(notices, sources={**notices.sources, status.source: status}))
    transition.log(
        "info" if status.health in (Health.OK, Health.UNSUPPORTED) else "warning",
        "health",
        source=status.source,
        health=status.health.value,
        reason=status.reason,
    )


def record_raised(transition: Transition, notice: Notice) -> None:
    """A source shows a notice: a new one, or one that is in force already."""
    if notice.deadline_mono_s <= transition.now:
        notice = _overdue(transition, notice)
    known = transition.state.notices.live.get(_key(notice))
    if known is not None and known.identity == notice.identity:
        _record_again(transition, known, notice)
        return
    if notice.source in BY_HAND and _is_repeated(transition, notice):
        return
    _put_live(transition, {_key(notice): notice})
    _log(transition, notice)
    if notice.severity >= Severity.SCHEDULED and not _is_within_rate(transition, notice):
        hint = "too many in a short time"
        transition.log("warning", "evacuation_held", source=notice.source, hint=hint)


def record_withdrawn(transition: Transition, source: str, reason: str) -> None:
    """A source no longer shows its notice.  The same notice later is a new one."""
    notices = transition.state.notices
    left = {key: notice for key, notice in notices.live.items() if notice.source != source}
    if left == notices.live:
        return
    _put(transition, replace(notices, live=left))
    transition.log("warning", "notice_withdrawn", source=source, reason=reason)


def record_outlived(transition: Transition, live: tuple[Notice, ...]) -> None:
    """The VM has outlived its deadline, and each of these notices whose own deadline has passed."""
    left_live = dict(transition.state.notices.live)
    for notice in live:
        # Its next evacuation gets another id, in this life of the daemon and in the next one.
        left = replace(notice, evacuation_id="")
        later_s = notice.later_mono_s
        if transition.now > notice.deadline_mono_s + OUTLIVED_S:
            if later_s is not None and later_s > transition.now:
                left = replace(left, deadline_mono_s=later_s, later_mono_s=None)
            else:
                left = replace(left, is_outlived=True)
        left_live[_key(notice)] = left
        if notice.source in BY_HAND and left.is_outlived:
            del left_live[_key(notice)]  # no source withdraws it
    _put(transition, replace(transition.state.notices, live=left_live))


def extend_overdue(transition: Transition, live: tuple[Notice, ...]) -> None:
    """An evacuation is about to open: notices that are overdue by now get the assumed time."""
    overdue = [notice for notice in live if notice.deadline_mono_s <= transition.now]
    _put_live(transition, {_key(notice): _overdue(transition, notice) for notice in overdue})


def record_answered(transition: Transition, live: tuple[Notice, ...], evacuation_id: str) -> None:
    """Note the evacuation that answers these notices, for the daemon after a restart."""
    changed = {
        _key(notice): replace(notice, evacuation_id=evacuation_id, safe_at=None)
        for notice in live
        if notice.evacuation_id != evacuation_id
    }
    _put_live(transition, changed)


def record_safe(transition: Transition, position: Position) -> None:
    """Note the position that is SAFE in the notices that it answers, for the daemon after a restart."""
    evacuation = transition.evacuation
    answered = {
        key: replace(notice, safe_at=position)
        for key, notice in transition.state.notices.live.items()
        if notice.evacuation_id == evacuation.id
    }
    _put_live(transition, answered)


def identities(state: State, answered: frozenset[str]) -> frozenset[str]:
    """The identities of these notices and of their repetitions."""
    repeats = (n.repeats for n in state.notices.live.values() if n.identity in answered)
    return answered.union(*repeats)


def admitted(transition: Transition, news: tuple[Notice, ...]) -> tuple[Notice, ...]:
    """The notices whose sources may cause one more evacuation now."""
    return tuple(notice for notice in news if _is_within_rate(transition, notice))


def record_opened(transition: Transition, source: str) -> None:
    """An evacuation opens because of this source."""
    _count(transition, source, EVERY_S)


def admits_precaution(transition: Transition, notice: Notice) -> bool:
    """Whether this advisory notice causes a checkpoint; it may do so once."""
    _put_live(transition, {_key(notice): replace(notice, is_prepared=True)})
    if not _has_room(transition, PRECAUTION, at_once=1, every_s=PRECAUTION_EVERY_S):
        reason = "one was just taken"
        transition.log("info", "precaution_skipped", source=notice.source, reason=reason)
        return False
    _count(transition, PRECAUTION, PRECAUTION_EVERY_S)
    return True


def _has_room(transition: Transition, name: str, *, at_once: int, every_s: float) -> bool:
    """Whether a rate of ``at_once`` in a row, and one more each ``every_s``, has room for one now."""
    until_s = transition.state.notices.rates_mono_s.get(name, transition.now)
    return until_s - transition.now <= (at_once - 1) * every_s


def _count(transition: Transition, name: str, every_s: float) -> None:
    """Use one of a rate."""
    notices = transition.state.notices
    until_s = max(transition.now, notices.rates_mono_s.get(name, transition.now)) + every_s
    _put(transition, replace(notices, rates_mono_s={**notices.rates_mono_s, name: until_s}))


def record_peer(transition: Transition, request_id: str, reason: str, seconds_left: float) -> None:
    """Another VM has requested a checkpoint: its request becomes a notice here.

    Daemons do not connect to each other.  They learn about other VMs from their trainers, which agree in the
    job's own store, and from the bucket.

    There is no notice when the request is known or our own, when no trainer of this VM belongs to a job over
    several VMs, or when there were too many requests.  A trainer that forges requests therefore costs a few
    checkpoints.
    """
    state, notices = transition.state, transition.state.notices
    known = notices.live.get(PEER_SOURCE)
    # Repeated and follow-up requests have the id of the first one and a suffix.
    is_known = any(are_of_one(request_id, opened) for opened in state.course.opened)
    is_known |= known is not None and are_of_one(request_id, known.identity)
    if is_known or not state.spans_vms:
        return
    if not _has_room(transition, PEER_REQUEST, at_once=AT_ONCE, every_s=EVERY_S):
        transition.log("warning", "peer_request_ignored", reason="too many in a short time")
        return
    _count(transition, PEER_REQUEST, EVERY_S)
    deadline_mono_s = transition.now + min(seconds_left, PEER_LONGEST_S)
    ends = (notices.peer_end_mono_s, deadline_mono_s)
    end_mono_s = min(end for end in ends if end is not None)
    _put(transition, replace(transition.state.notices, peer_end_mono_s=end_mono_s))
    of_peer = Notice(
        source=PEER_SOURCE,
        kind="reclaim",
        identity=request_id,
        severity=Severity.IMMINENT,
        deadline_mono_s=deadline_mono_s,
        deadline_quality=DeadlineQuality.DERIVED,
        detail=reason,
    )
    record_raised(transition, of_peer)


def forget_peer_end(transition: Transition) -> None:
    """Another start has begun, perhaps without the VM that ends."""
    _put(transition, replace(transition.state.notices, peer_end_mono_s=None))


def _is_within_rate(transition: Transition, notice: Notice) -> bool:
    if notice.severity is Severity.SHUTTING_DOWN or notice.source in BY_HAND:
        return True  # from this host or its operator
    if notice.evacuation_id and notice.evacuation_id not in transition.state.course.opened:
        return True  # it was open before a restart
    return _has_room(transition, notice.source, at_once=AT_ONCE, every_s=EVERY_S)


def _key(notice: Notice) -> str:
    return notice.identity if notice.source in BY_HAND else notice.source


def _overdue(transition: Transition, notice: Notice) -> Notice:
    return replace(
        notice,
        deadline_mono_s=transition.now + transition.state.settings.assumed_grace_s,
        deadline_quality=DeadlineQuality.ASSUMED,
        is_overdue=True,
    )


def _record_again(transition: Transition, known: Notice, notice: Notice) -> None:
    """The source shows a notice that is in force, perhaps nearer, more severe or put off."""
    state = transition.state
    if known.is_outlived:
        _record_put_off(transition, known, notice)
        return
    evacuation = state.evacuation
    is_answered = (
        evacuation is not None
        and not evacuation.is_precaution
        and notice.identity in evacuation.identities
    )
    is_learned = _is_learned(state, known, notice)
    merged = _merged(known, notice, is_answered=is_answered, is_learned=is_learned)
    _put_live(transition, {_key(merged): merged})
    if is_learned and is_answered:
        live = transition.state.urgent_notices(transition.now) or (merged,)
        course.record(transition, deadline_mono_s=min(n.deadline_mono_s for n in live))
        transition.mark(
            "deadline_learned", seconds_left=round(transition.left_s, 2), source=notice.source
        )


def _record_put_off(transition: Transition, known: Notice, notice: Notice) -> None:
    """A notice that the VM has outlived is in force again if the source states a later time."""
    is_guess = known.deadline_quality is DeadlineQuality.ASSUMED and not known.is_overdue
    is_further = notice.deadline_mono_s > known.deadline_mono_s + OUTLIVED_S
    if notice.deadline_quality is DeadlineQuality.ASSUMED or is_guess or not is_further:
        return
    _put_live(transition, {_key(notice): notice})
    _log(transition, notice)


def _merged(known: Notice, notice: Notice, *, is_answered: bool, is_learned: bool) -> Notice:
    """The notice in force after one more sighting.  Its deadline moves later only by the rules above."""
    is_later = notice.deadline_mono_s > known.deadline_mono_s
    is_stated = notice.deadline_quality is not DeadlineQuality.ASSUMED
    is_put_off = is_stated and not is_answered and known.severity <= Severity.SCHEDULED
    merged = replace(
        known,
        kind=notice.kind,
        detail=notice.detail,
        severity=max(known.severity, notice.severity),
    )
    if is_learned or not is_later or is_put_off:
        return replace(
            merged,
            deadline_mono_s=notice.deadline_mono_s,
            deadline_quality=notice.deadline_quality,
            is_overdue=notice.is_overdue,
            later_mono_s=None,
        )
    return replace(merged, later_mono_s=notice.deadline_mono_s) if is_stated else merged


def _is_repeated(transition: Transition, notice: Notice) -> bool:
    """Whether a notice by hand changes nothing: its end is known, or too many others are in force."""
    others = [n for n in transition.state.notices.live.values() if n.source == notice.source]
    same = next(
        (n for n in others if abs(n.deadline_mono_s - notice.deadline_mono_s) <= SAME_END_S), None
    )
    if same is not None:
        if notice.identity not in same.repeats:
            _merge_repeated(transition, same, notice)
        return True
    if len(others) < BY_HAND_MAX or _make_room(transition, others):
        return False
    transition.log(
        "warning",
        "notice_ignored",
        source=notice.source,
        reason=f"{BY_HAND_MAX} notices by hand are in force",
        hint="swansong notify --withdraw",
    )
    return True


def _merge_repeated(transition: Transition, same: Notice, notice: Notice) -> None:
    """Add a notice by hand to the one with the same end, and to the verdict that answers that one."""
    merged = replace(
        same,
        repeats=(*same.repeats, notice.identity)[-REPEATS_MAX:],
        deadline_mono_s=min(same.deadline_mono_s, notice.deadline_mono_s),
        severity=max(same.severity, notice.severity),
    )
    _put_live(transition, {_key(merged): merged})
    course.record_repeated(transition, same, notice)
    transition.log("info", "notice_repeated", source=notice.source, detail=notice.detail)


def _make_room(transition: Transition, others: list[Notice]) -> bool:
    """Forget the notice that has its verdict and ends last; False without one."""
    state, evacuation = transition.state, transition.state.evacuation
    has_verdict = evacuation is not None and evacuation.verdict is not None
    answered = evacuation.identities if evacuation is not None and has_verdict else frozenset()
    latest = max(
        (n for n in others if n.identity in answered), key=lambda n: n.deadline_mono_s, default=None
    )
    if latest is None:
        return False
    left = {key: n for key, n in state.notices.live.items() if n is not latest}
    _put(transition, replace(state.notices, live=left))
    return True


def _is_learned(state: State, known: Notice, notice: Notice) -> bool:
    """Whether a later deadline replaces the assumed one.

    Compute Engine does not report the time between its notice and the soft-off.  If the soft-off has not come
    after the short time, the long one applies.  That conclusion is valid only while logind works and would
    have reported the soft-off.
    """
    logind = state.notices.sources.get(LOGIND_SOURCE)
    return (
        known.deadline_quality is DeadlineQuality.ASSUMED
        and not known.is_overdue
        and notice.deadline_quality is DeadlineQuality.DERIVED
        and notice.deadline_mono_s > known.deadline_mono_s
        and logind is not None
        and logind.health is Health.OK
        and not state.notices.live.keys() & {LOGIND_SOURCE, HOST_SOURCE}
    )


def _log(transition: Transition, notice: Notice) -> None:
    transition.log(
        "warning",
        "notice",
        source=notice.source,
        kind=notice.kind,
        severity=notice.severity.name.lower(),
        seconds_left=round(notice.deadline_mono_s - transition.now, 2),
        deadline_quality=notice.deadline_quality.value,
        detail=notice.detail,
    )


def _put_live(transition: Transition, changed: Mapping[str, Notice]) -> None:
    notices = transition.state.notices
    _put(transition, replace(notices, live={**notices.live, **changed}))


def _put(transition: Transition, notices: NoticeState) -> None:
    transition.state = replace(transition.state, notices=notices)
