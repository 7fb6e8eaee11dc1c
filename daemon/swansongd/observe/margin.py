# SPDX-License-Identifier: Apache-2.0
"""The margin: the seconds that a notice right now would leave to spare, for each kind of notice."""

from __future__ import annotations

from swansong_bucket.model import Health, Verdict

from swansongd.core import emergency, gpus, planner, proof
from swansongd.core.state import State
from swansongd.observe.stall import stalled
from swansongd.observe.status import STORE_HEALTH, Margin, StagingStatus
from swansongd.observe.tally import Figures


def margins(state: State, problem: str = "") -> tuple[Margin, ...]:
    """The margin of each kind of notice that this VM may get, the shortest grace period first.

    Args:
        problem: see :func:`problem_of`; empty to judge the time alone.
    """
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
        own_problem = problem
        if status is not None and status.health is Health.BLIND:
            own_problem = f"{kind.source} is blind: {status.reason}"
        has_time = None if spare_s is None else spare_s >= 0
        found.append(
            Margin(
                source=kind.source,
                grace_s=round(grace_s, 1),
                spare_s=None if spare_s is None else round(spare_s, 1),
                fits=False if own_problem else has_time,
                problem=own_problem or None,
                lost_since_step=lost_since,
            )
        )
    return tuple(sorted(found, key=lambda margin: margin.grace_s))


def problem_of(
    state: State, now_mono_s: float, tally: Figures, staging: StagingStatus | None
) -> str:
    """Why a checkpoint right now would not be SAFE, however much time a notice left; empty if it would.

    Over several VMs it is the problem of this VM; it does not know the problems of the others.

    Args:
        tally: has the saves that failed.
        staging: its space; None if it is unknown.
    """
    store = state.notices.sources.get(STORE_HEALTH)
    if store is not None and store.health is Health.BLIND:
        return f"the store is blind: {store.reason}"
    if state.flush.failures:
        return f"uploads fail, {state.flush.failures} in a row"
    if not emergency.has_trainer(state) or not (state.connected or state.starts.process):
        verdict, reason = proof.prove(state)
        return "" if verdict is Verdict.SAFE else reason
    return (
        gpus.objection(state, now_mono_s)
        or _problem_of_ranks(state, now_mono_s)
        or _problem_of_start(state)
        or _problem_of_saves(state, tally, staging)
    )


def _problem_of_ranks(state: State, now_mono_s: float) -> str:
    silent = stalled(state, now_mono_s)
    if silent:
        return f"rank {min(trainer.rank for trainer in silent)} makes no progress"
    missing = state.local_world_size - len(state.connected)
    if state.connected and missing > 0:
        return f"{missing} of {state.local_world_size} ranks are not connected"
    return ""


def _problem_of_start(state: State) -> str:
    if not state.commits.is_run_read:
        return "the newest commit of the run is not known yet"
    if state.generation is None:
        return "the training has no generation yet"
    if len({trainer.start_id for trainer in state.connected}) > 1:
        return "the ranks are not of one start"
    return ""


def _problem_of_saves(state: State, tally: Figures, staging: StagingStatus | None) -> str:
    saved_mono_s, failed = state.staging.saved_mono_s, tally.failed_saves.last
    if failed is not None and (saved_mono_s is None or tally.failed_mono_s > saved_mono_s):
        return f"the last save failed: {failed.reason}"
    needed = state.measured.save_bytes
    if staging is not None and needed is not None and staging.free_bytes < needed:
        free_mib = staging.free_bytes >> 20
        return f"a checkpoint takes {needed / 2**20:.0f} MiB, and staging has {free_mib} MiB free"
    return ""


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
