# SPDX-License-Identifier: Apache-2.0
"""Whether all is well, so that the heartbeat may be sent.  Pure.

The heartbeat is a request at an interval to a service that raises an alarm when it misses one.  It is sent
only after success: silence raises the alarm, whether a checkpoint, the daemon or the VM is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from swansong_bucket.model import CommitRef, Health

from swansongd.core import periodic
from swansongd.core.state import State
from swansongd.observe.stall import stalled
from swansongd.observe.status import STORE_HEALTH

DECIDED_S = 10.0
"""The decision loop decides at least once a second; one that has not for this long hangs."""
INTERVALS = 3.0
"""A commit may be this many checkpoint intervals old."""
GAP_S = 900.0
"""A trainer that connects within this time after the last rank has left continues the same stretch, as in the
rule SwansongCommitTooOld."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time of training with short gaps only, as of a trainer that crashes and starts again."""

    began_mono_s: float
    seen_mono_s: float
    """When a rank was connected last."""
    state: State
    """The state at that time."""
    newest: CommitRef | None
    """The newest whole commit, also one that was made between two trainers."""
    newest_mono_s: float
    """When it was made; or when the stretch began."""


def continued(stretch: Stretch | None, state: State, now_mono_s: float) -> Stretch | None:
    """The stretch of training after one more decision; None before the first trainer."""
    newest = state.commits.last_complete
    if state.connected and (stretch is None or now_mono_s - stretch.seen_mono_s > GAP_S):
        return Stretch(now_mono_s, now_mono_s, state, newest, now_mono_s)
    if stretch is None:
        return None
    if newest != stretch.newest:
        stretch = replace(stretch, newest=newest, newest_mono_s=now_mono_s)
    return replace(stretch, seen_mono_s=now_mono_s, state=state) if state.connected else stretch


def why_silent(
    state: State,
    stretch: Stretch | None,
    *,
    decided_mono_s: float,
    now_mono_s: float,
    heartbeat_interval_s: float,
    metrics_failure: str = "",
) -> str:
    """The reason against a heartbeat; empty if all is well.

    Args:
        stretch: see :func:`continued`.
        decided_mono_s: when the state was decided.
        metrics_failure: why ``metrics.listen`` is not served: no alert of Prometheus can be trusted then.
    """
    if now_mono_s - decided_mono_s > DECIDED_S:
        return "the decision loop hangs"
    if state.starts.fenced_by is not None:
        return f"generation {state.starts.fenced_by} has taken the run over"
    store = state.notices.sources.get(STORE_HEALTH)
    if store is None or store.health is not Health.OK:
        return "the store is not reached yet" if store is None else f"store: {store.reason}"
    blind = sorted(name for name, s in state.notices.sources.items() if s.health is Health.BLIND)
    if blind:
        return f"source {blind[0]} is blind"
    if metrics_failure:
        return f"the metrics are not served: {metrics_failure}"
    if stalled(state, now_mono_s):
        return "the trainer is stalled"
    return _why_stale(state, stretch, now_mono_s, heartbeat_interval_s)


def _why_stale(
    state: State, stretch: Stretch | None, now_mono_s: float, heartbeat_interval_s: float
) -> str:
    """Training without a commit for too long.

    Between two trainers the age stays as it was when the last rank left: a trainer in a crash loop is not
    healthy in the gaps.  A trainer with a schedule of its own commits when it likes: the rule then holds for
    sealed sets only.
    """
    if stretch is None or now_mono_s - stretch.seen_mono_s > GAP_S or state.is_finished:
        return ""
    seen = stretch.state
    is_planned = any(trainer.takes_periodic for trainer in seen.connected)
    if not (is_planned or seen.uncommitted or seen.commits.stored):
        return ""
    until_mono_s = now_mono_s if state.connected else stretch.seen_mono_s
    age_s = until_mono_s - stretch.newest_mono_s
    limit_s = max(heartbeat_interval_s, INTERVALS * periodic.interval_s(seen))
    return "" if age_s <= limit_s else f"no commit for {age_s:.0f} s"
