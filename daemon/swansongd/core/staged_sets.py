# SPDX-License-Identifier: Apache-2.0
"""Sealed sets in staging: those that a scan finds, and those that wait for the store.

A set that a newer one supersedes is sent only if the newer one proves unusable.  The daemon therefore keeps
a few unsent sets and deletes the others: an outage of the store must not fill the trainer's disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swansongd.core import emergency, flight, gpus, learning, starts
from swansongd.core.events import (
    Prune,
    Scanned,
)
from swansongd.core.state import (
    DroppedSets,
    State,
)
from swansongd.core.transition import Transition
from swansongd.model import (
    CheckpointId,
    CheckpointKind,
    Staged,
    is_healthy,
)

NEWEST = 2
"""The newest unsent set, and a fallback if that one is torn or changed."""


def record_scan(transition: Transition, event: Scanned) -> None:
    """A scan of staging ended."""
    before = {staged.id for staged in transition.state.staged}
    is_first = transition.state.first_scan_mono_s is None
    unknown = [staged for staged in event.staged if staged.id not in before]
    starts.record_found(transition, unknown, is_first=is_first)
    event = replace(
        event, staged=tuple(starts.named_by(transition.state, each) for each in event.staged)
    )
    new = [staged for staged in event.staged if staged.id not in before]
    _record_found(transition, event, new, is_first=is_first)
    _forget_absent(transition, event)
    if is_first:
        _first_look(transition, event.staged)
    transition.state = replace(transition.state, scanned_mono_s=event.started_mono_s)
    present = frozenset(staged.id for staged in event.staged)
    flight.record_absent(transition, present)
    emergency.record_scan(transition, event)


def _record_found(
    transition: Transition, event: Scanned, new: Sequence[Staged], *, is_first: bool
) -> None:
    seen = dict(transition.state.seen)
    for staged in event.staged:
        first_mono_s = event.started_mono_s if staged.seen_mono_s is None else staged.seen_mono_s
        seen.setdefault(staged.id, first_mono_s)
    for directory, reason in event.rejected:
        if (directory, reason) not in transition.state.rejected:
            transition.log("error", "sealed_set_rejected", directory=directory, reason=reason)
    if is_first:
        transition.state = replace(transition.state, first_scan_mono_s=event.started_mono_s)
    else:
        _note_signalled(transition, new)
    doubtful = gpus.doubtful(transition.state, new, is_first=is_first)
    transition.state = replace(transition.state, suspect=transition.state.suspect | doubtful)
    by_signal, suspect = transition.state.by_signal, transition.state.suspect
    staged_now = tuple(
        replace(s, kind=CheckpointKind.EMERGENCY) if s.id in by_signal else s for s in event.staged
    )
    staged_now = tuple(gpus.marked(s) if s.id in suspect else s for s in staged_now)
    learning.record_found(transition, new, is_first=is_first)
    new_ids = {staged.id for staged in new}
    transition.state = replace(
        transition.state,
        staged=staged_now,
        pending=event.pending,
        growing=event.growing,
        rejected=frozenset(event.rejected),
        seen=seen,
        saved_mono_s=transition.now if new else transition.state.saved_mono_s,
    )
    for staged in (s for s in staged_now if s.id in new_ids):
        transition.log(
            "info",
            "sealed_set_found",
            step=staged.id.step,
            directory=staged.directory,
            size_bytes=staged.size_bytes,
            kind=staged.kind.value,
        )


def _note_signalled(transition: Transition, new: Sequence[Staged]) -> None:
    """Sets of other frameworks do not name their kind: those that answer a signal are for an emergency."""
    if not any(r.by_signal and r.is_urgent for r in transition.waiting_requests):
        return
    adopted = frozenset(staged.id for staged in new if staged.framework != "swansong")
    transition.state = replace(transition.state, by_signal=transition.state.by_signal | adopted)


def _forget_absent(transition: Transition, event: Scanned) -> None:
    """Forget sets that disappeared: another set may get the name."""
    state = transition.state
    present = frozenset(staged.id for staged in event.staged)
    written = {staged.id for staged in event.growing}
    transition.state = replace(
        state,
        adopted={id_: start for id_, start in state.adopted.items() if id_ in present},
        by_signal=state.by_signal & present,
        suspect=state.suspect & present,
        unusable=state.unusable & present,
        stored_bytes={
            id_: size for id_, size in state.stored_bytes.items() if id_ in present | written
        },
        seen={id_: seen_mono_s for id_, seen_mono_s in state.seen.items() if id_ in present},
    )


def _first_look(transition: Transition, present: tuple[Staged, ...]) -> None:
    """Sets of the first scan are old, even if a notice came before the scan."""
    _doubt_undurable(transition, present)
    evacuation = transition.state.evacuation
    request = evacuation.request if evacuation is not None else None
    if request is not None and request.by_signal:
        known = frozenset(staged.id for staged in present)
        transition.update_request(replace(request, known=known))


def _doubt_undurable(transition: Transition, present: tuple[Staged, ...]) -> None:
    """The power may have been cut before these sets were flushed to the disk."""
    state = transition.state
    doubtful = [
        s
        for s in present
        if not _is_durable(s)
        and s.id not in state.unusable
        and max((f.mtime_ns for f in s.files), default=0) < state.settings.booted_wall_ns
    ]
    for staged in doubtful:
        transition.log(
            "warning",
            "sealed_set_not_durable",
            directory=staged.directory,
            step=staged.id.step,
            reason="it was not flushed to the disk before the last boot, and may be torn",
        )
    unusable = transition.state.unusable | {staged.id for staged in doubtful}
    transition.state = replace(transition.state, unusable=unusable)


def _is_durable(staged: Staged) -> bool:
    """Whether the hooks flushed it to the disk before they sealed it."""
    return staged.framework == "swansong" and staged.kind is not CheckpointKind.EMERGENCY


@dataclass(frozen=True, slots=True)
class Unsent:
    """Sealed sets without a commit."""

    sets: int
    bytes_left: int
    """Bytes of these sets that are not in the store."""


def unsent(state: State) -> Unsent:
    """The sealed sets and bytes that wait for the store."""
    waiting = state.uncommitted
    left = sum(max(0, s.size_bytes - state.stored_bytes.get(s.id, 0)) for s in waiting)
    return Unsent(len(waiting), left)


def reconcile(transition: Transition) -> None:
    """Drop the sets that newer ones supersede, unless an evacuation may still choose one of them."""
    evacuation = transition.state.evacuation
    if evacuation is not None and not evacuation.is_precaution and evacuation.verdict is None:
        return
    if len(transition.state.staged) <= NEWEST:
        return
    wanted = _wanted(transition.state)
    superseded = [
        staged
        for staged in transition.state.uncommitted
        if staged.framework == "swansong" and staged.id not in wanted
    ]
    if not superseded:
        return
    for staged in superseded:
        transition.log(
            "warning",
            "unsent_set_dropped",
            step=staged.id.step,
            size_bytes=staged.size_bytes,
            hint="newer sets supersede it, and the store takes sets more slowly than they are sealed",
        )
    dropped = transition.state.dropped
    transition.state = replace(
        transition.state,
        unusable=transition.state.unusable | {staged.id for staged in superseded},
        dropped=DroppedSets(
            dropped.count + len(superseded), max(s.id.step for s in superseded), transition.now
        ),
    )
    transition.do(Prune(tuple(staged.directory for staged in superseded)))


def _wanted(state: State) -> frozenset[CheckpointId]:
    """The unsent sets that may still become a commit."""
    newest_first = state.uncommitted
    wanted = {staged.id for staged in newest_first[:NEWEST]}
    healthy = next((staged for staged in newest_first if is_healthy(staged.health)), None)
    wanted.update(staged.id for staged in (healthy, state.pinned) if staged is not None)
    if state.flight is not None:
        wanted.add(state.flight.staged.id)
    wanted.update(item.staged.id for item in state.stored)
    answers = (state.answer, state.follow_up_answer)
    wanted.update(id_ for id_ in answers if id_ is not None)
    partly = [staged for staged in newest_first if state.stored_bytes.get(staged.id)]
    if partly:
        wanted.add(max(partly, key=lambda staged: state.stored_bytes[staged.id]).id)
    return frozenset(wanted)
