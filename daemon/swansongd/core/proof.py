# SPDX-License-Identifier: Apache-2.0
"""The proof of SAFE: the position of the training, and the commit from which the next VM resumes.

The position is that of the newest start known here, at the moment of the request.  Only the training itself
can state it: by accepting the request, by the set that answers it, or by its goodbye.  Everything else leaves
the position unknown, and an unknown position is never SAFE.
"""

from __future__ import annotations

from swansong_bucket.model import CommitRef, Position, Start, Verdict, first_start, is_sound

from swansongd.core import gpus, resume
from swansongd.core.request_ids import are_of_one
from swansongd.core.state import CheckpointRequest, State


def prove(state: State, *, is_final: bool = False) -> tuple[Verdict, str]:
    """The verdict that holds now, with its reason; this is the only way to SAFE.

    Args:
        is_final: nothing can improve it in time.  The position that got SAFE in an earlier life of the daemon
            then counts, if the same start runs: no verdict gets worse.
    """
    proved = _proved_at(state, position_of(state))
    before = _safe_before(state)
    if is_final and before is not None and proved[0] is not Verdict.SAFE:
        again = _proved_at(state, before)
        return again if again[0] is Verdict.SAFE else proved
    return proved


def _proved_at(state: State, position: Position | str | None) -> tuple[Verdict, str]:
    newest = state.commits.last_complete
    doubt = gpus.doubt(state)
    stands = (doubt or f"{newest} stands") if newest is not None else _may_stand(state)
    below = Verdict.PARTIAL if stands else Verdict.LOST
    stands = stands or "no checkpoint of the run is whole"
    if position is None:
        return Verdict.NO_TRAINING, f"no training was seen on this VM; {stands}"
    if state.part is not None:
        stands = f"{state.part}; {stands}"
    if state.starts.fenced_by is not None:
        return (
            below,
            f"the run continues on other VMs as generation {state.starts.fenced_by}; {stands}",
        )
    if isinstance(position, str):
        return below, f"{position}; {stands}"
    if newest is None:
        return below, f"training was at step {max(position.step, 0)}; {stands}"
    if not _reaches(state, newest, position):
        return below, f"{_distance(state, newest, position)}; {stands}"
    if doubt:
        return below, doubt
    later = _later_of_other(state, newest, position)
    if later:
        return below, f"{later}; {stands}"
    was = "had completed no step" if position.step < 0 else f"was at step {position.step}"
    return Verdict.SAFE, f"training {was}, and {newest} is committed"


def _may_stand(state: State) -> str:
    """Which whole commit may stand although this VM has seen none; empty if it is sure that none does."""
    if not state.commits.is_run_read:
        return "the store could not be read, and may have a whole checkpoint"
    if state.starts.fenced_by is not None:
        return f"generation {state.starts.fenced_by} may have committed"
    other = state.starts.predecessor
    if other is not None and other.newest is not None:
        return f"{other.newest} stands, by the VM that this one replaces"
    if state.newest_generation is None:
        return "this VM has not taken the run over yet, so another one may commit"
    if state.commits.ordered is not None:
        return (
            f"{state.commits.ordered} may exist: the store has not confirmed all of its manifests"
        )
    return ""


def _safe_before(state: State) -> Position | None:
    start, evacuation = state.start, state.evacuation
    safe_at = None if evacuation is None else evacuation.safe_at
    is_same = start is not None and start.is_live and safe_at and safe_at.start_id == start.id
    return safe_at if is_same else None


def _reaches(state: State, newest: CommitRef, position: Position) -> bool:
    """Whether the next VM resumes from this position, or from a later one of the same start."""
    start = state.start_of(position.start_id)
    assert start is not None
    if start.generation is None:
        return False  # before its claim, another VM may commit
    if newest.generation == start.generation:
        return newest.step >= position.step
    if position.step < 0 and start.is_restoring:
        local = resume.newest_local(state, newest)
        return local is None or state.ref_of(local.id) == newest
    loaded = (start.parent.start_id, start.parent.step)
    is_loaded = bool(start.parent.start_id) and loaded == (state.owner_of(newest), newest.step)
    return is_loaded and position.step <= newest.step


def _later_of_other(state: State, newest: CommitRef, position: Position) -> str:
    """Why another state may be, or become, a later commit than the newest one; empty if none may.

    The next VM would resume from it: from a manifest whose reply was lost, or from a set in staging or still
    to be sealed by a process of another start.  A later set of the same start is no other state, unless a GPU
    has failed.
    """
    start, ordered = state.start_of(position.start_id), state.commits.ordered
    assert start is not None
    is_suspect = first_start(start.id) in state.gpus.suspect_starts
    is_other = ordered is not None and (is_suspect or ordered.generation != start.generation)
    if ordered is not None and ordered > newest and is_other:
        return f"{ordered} may exist"
    if newest.generation == start.generation and not is_suspect:
        return ""
    running = {process.start_id for process in state.ranks.processes}
    if any(each.is_open and each.id in running for each in state.starts.known if each is not start):
        return "a process of another start runs, which may seal a checkpoint"
    if not state.is_scanned or state.staging.is_settling:
        return "a set that was sealed since the last scan may be committed"
    sets = (*state.uncommitted, *(stored.staged for stored in state.commits.stored))
    others = (s.id for s in sets if s.id.start != start.id or not is_sound(s.health))
    refs = [state.ref_of(id_) for id_ in others]
    is_later = any(ref is None or ref > newest for ref in refs)
    return "a set of another state is not committed yet" if is_later else ""


def _distance(state: State, newest: CommitRef, position: Position) -> str:
    start, step = state.start_of(position.start_id), position.step
    assert start is not None
    if newest.generation == start.generation:
        return f"the newest commit is of step {newest.step}, not of step {step}"
    if start.generation is None:
        return "this VM has not taken the run over yet, so another one may commit"
    parent = start.parent
    if step < 0 and start.is_restoring:
        return "this start loads a set in staging, which is not committed"
    if not parent.is_known:
        return (
            f"this start has committed nothing up to step {step}, and has not said what it loaded"
        )
    if parent.start_id == state.owner_of(newest) and parent.step == newest.step:
        return f"the newest commit is of step {parent.step}, not of step {step}"
    return f"this start has committed nothing up to step {step}; it began at step {parent.step}"


def position_of(state: State) -> Position | str | None:
    """The position of the newest start at the request, or why it is unknown; None without any start."""
    start = state.start
    later = "" if start is None else _may_be_later(state, start)
    if later:
        return f"which start is the newest is unknown: {later} has sealed a checkpoint, and has not connected"
    request = None if state.evacuation is None else state.evacuation.request
    position: Position | str
    if state.strangers:
        ranks = _named([trainer.rank for trainer in state.strangers])
        position = f"the start of {ranks} is unknown, or not the newest one"
    elif start is None:
        return None
    else:
        position = _position_in(state, start, request)
    if not isinstance(position, str) or state.has_gone_back:
        return position
    if request is not None and request.sealed is not None:
        asked = state.start_of(request.sealed.start)  # the training was started again since
        if asked is not None and (request.by_signal or asked.id == request.start_id):
            return _position_in(state, asked, request)
    return position


def _may_be_later(state: State, start: Start) -> str:
    """A start that is known from its sets only, unless its processes are known to have begun earlier.

    File times prove nothing here: a clock may step.
    """
    unplaced = {each.id for each in state.starts.known if not each.is_placed}
    sets = (each for each in state.staging.staged if each.id.start in unplaced)
    return next((each.id.start for each in sets if not state.precedes(each, start)), "")


def _position_in(state: State, start: Start, request: CheckpointRequest | None) -> Position | str:
    answered = _answered_step(state, start)
    if answered is not None:
        return Position(start.id, answered)
    if start.has_hooks:
        return _agreed(state, start, request)
    if request is None or not request.by_signal or request.is_unsent:
        return "the position of the training is unknown: its process was not asked"
    return (
        "the position of the training is unknown: its process has sealed nothing since the signal"
    )


def _answered_step(state: State, start: Start) -> int | None:
    """Step of a set that answers a request of this evacuation, or that ends the run."""
    evacuation, last = state.evacuation, state.commits.last_complete
    sets = [s.id for s in state.staging.usable if s.id.start == start.id]
    ends = [id_.step for id_ in sets if id_.is_final]
    if last is not None and last.is_final and last.generation == start.generation:
        ends.append(last.step)
    running = [t for t in state.ranks.trainers if t.start_id == start.id]
    if ends and all(t.is_connected and t.step <= max(ends) for t in running):
        return max(ends)
    if evacuation is None:
        return None
    made = [r.sealed for r in state.requests_made if r.by_signal or r.start_id == start.id]
    answers = [id_.step for id_ in made if id_ is not None and id_.start == start.id]
    if start.is_live:  # otherwise it may have been started again while the daemon was down
        answers += [
            s.id.step
            for s in state.staging.staged
            if s.id in sets and are_of_one(evacuation.id, s.request_id)
        ]
    return min(answers, default=None)


def _agreed(state: State, start: Start, request: CheckpointRequest | None) -> Position | str:
    """The greatest step of all ranks of this VM, each by its acceptance of the request or its goodbye."""
    if request is not None and request.start_id != start.id:
        request = None
    steps, unknown = [], []
    for rank in range_of(state, start):
        step = start.ended.get(rank)
        if step is None and request is not None:
            step = request.accepted.get(rank)
        if step is None:
            unknown.append(rank)
        else:
            steps.append(step)
    if unknown:
        return (
            f"the position of {_named(unknown)} is unknown: {_why(state, start, request, unknown)}"
        )
    step = max(steps)
    have_ended = start.ended.keys() >= set(range_of(state, start))
    if start.nodes > 1 and step >= 0 and not have_ended:  # ranks of other VMs may be a step ahead
        if request is None or request.target is None:
            return "the position of the training is unknown: the ranks of all VMs have not agreed on a step"
        step = max(step, request.target - 1)
    return Position(start.id, step)


def range_of(state: State, start: Start) -> list[int]:
    """The ranks of a start on this VM; ranks that never connected have no number, and count as -1."""
    known = {t.rank for t in state.ranks.trainers if t.start_id == start.id} | set(start.members)
    missing = max(0, start.ranks - len(known))
    return sorted(known) + [-1] * missing


def _named(ranks: list[int]) -> str:
    named = [str(rank) for rank in ranks if rank >= 0]
    if not named:
        return "a rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
    return f"rank {named[0]}" if len(ranks) == 1 else f"ranks {', '.join(named)}"


def _why(state: State, start: Start, request: CheckpointRequest | None, unknown: list[int]) -> str:
    if not start.is_live:
        return "it has not reconnected since the daemon's restart"
    connected = {t.rank for t in state.connected if t.start_id == start.id}
    if not connected.issuperset(unknown):
        return "its process has no connection, or did not say that it has finished"
    if request is None:
        return "it was not asked for a checkpoint"
    return request.failure or "it has not answered the request"
