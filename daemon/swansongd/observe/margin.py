# SPDX-License-Identifier: Apache-2.0
"""The margin: the seconds that a notice right now would leave to spare, for each kind of notice."""

from __future__ import annotations

from swansong_bucket.model import Health

from swansongd.core import emergency, planner
from swansongd.core.state import State
from swansongd.observe.status import Margin


def margins(state: State) -> tuple[Margin, ...]:
    """The margin of each kind of notice that this VM may get, the shortest grace period first."""
    if state.starts.fenced_by is not None:
        return ()
    needed_s = _needed_s(state)
    found = []
    for kind in state.settings.notice_kinds:
        status = state.notices.sources.get(kind.source)
        if status is not None and status.health is Health.UNSUPPORTED:
            continue
        grace_s = max(kind.grace_s, state.lead_s) if kind.is_scheduled else kind.grace_s
        spare_s = None if needed_s is None else grace_s - needed_s
        lost_since = _covered_step(state, grace_s) if spare_s is not None and spare_s < 0 else None
        found.append(
            Margin(
                source=kind.source,
                grace_s=round(grace_s, 1),
                spare_s=None if spare_s is None else round(spare_s, 1),
                fits=None if spare_s is None else spare_s >= 0,
                lost_since_step=lost_since,
            )
        )
    return tuple(sorted(found, key=lambda margin: margin.grace_s))


def _needed_s(state: State) -> float | None:
    """Time from a notice to the commit of the newest state; None if it is unknown."""
    made = state.forecast
    if emergency.has_trainer(state):
        if not made.is_measured:
            return None
        return made.needed_s(state.settings.reserve_s) + made.spread_s
    left_bytes = max((c.bytes_left for c in state.candidates), default=0)
    if not left_bytes:
        return _store_s(state, 0) if state.commits.stored else 0.0
    if state.learned.bandwidth_bytes_per_s is None:
        return None
    return _store_s(state, left_bytes)


def _store_s(state: State, size_bytes: int) -> float:
    """Time to send these bytes of a sealed set and to commit it."""
    send_s = planner.seconds_to_store(size_bytes, state.learned.bandwidth_bytes_per_s)
    return send_s + max(state.settings.reserve_s, state.forecast.commit_s)


def _covered_step(state: State, grace_s: float) -> int | None:
    """Step of the newest state that would be committed without a new checkpoint."""
    steps = [c.id.step for c in state.candidates if _store_s(state, c.bytes_left) <= grace_s]
    steps += [item.staged.id.step for item in state.commits.stored]
    if state.commits.last_complete is not None:
        steps.append(state.commits.last_complete.step)
    return max(steps, default=None)
