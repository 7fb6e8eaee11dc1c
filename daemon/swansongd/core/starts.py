# SPDX-License-Identifier: Apache-2.0
"""The starts of the training, and the generation that each of them claims.

A start is one launch of the training: all ranks, on all VMs.  Rank 0 draws its id, and every sealed set names
it.  A rollback begins another start in the same processes.  A trainer without hooks has one start for each
process, with an id that follows from the process.  Each start has its own generation, which it claims in the
bucket.

The order of the starts is the order of their generations, so the place of each set is a lookup: nothing is
inferred from steps or times.  There is one exception, for trainers without hooks whose process is unknown or
loads an older state: the steps of a start increase, so another set of the same or a lower step that is
written later belongs to another start.

A daemon owns none of this.  After its restart it learns the starts from its record of claims, from the hellos
of the ranks, and from the sets in staging.

- A claim is made when a start begins, before its ranks learn where to resume.  The choice of the checkpoint
  therefore sees every commit of earlier starts.  A process without hooks claims with its first set.
- On one VM, the sets that a start has sealed are still committed after the next one began.
- Over several VMs, a start begins after all daemons have committed what earlier starts had sealed, and the
  sets of earlier starts are not committed any more.
- Each claim is an object that is never deleted, so the rate of claims is limited.  An evacuation may exceed
  the limit by two: for the start that is asked, and for one that begins meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from swansong.fields import PROCESS_PREFIX
from swansong.protocol import Bye, Fenced, Finished, StartDrawn
from swansong_bucket.model import Staged, Start, TrainerView, first_start

from swansongd.core import (
    arrival,
    commits,
    course,
    flight,
    notices,
    ranks,
    request,
    staged_sets,
)
from swansongd.core.events import (
    CheckFence,
    ClaimGeneration,
    FenceFound,
    GenerationClaimed,
    PredecessorFound,
    ProcessFound,
    Rescan,
    Send,
    TrainerLeft,
    TrainerProgress,
    WithdrawClaim,
)
from swansongd.core.state import Finishing, StartState, State
from swansongd.core.transition import EXIT_FENCED, Transition

STARTS_MAX = 64
"""Number of starts that are remembered, however often a trainer starts."""
CLAIMS_MAX = 8
WINDOW_S = 90.0
"""No more than CLAIMS_MAX claims within this time, for which a trainer waits with its restore query ..."""
EVACUATION_CLAIMS_MAX = 2
"""... and, above that, this number in an evacuation."""
PREDECESSOR_SILENCE_S = 900.0
"""The VM that this one replaces is awaited at most this long after its last record in the bucket."""
FINISH_S = 30.0
"""A start over several VMs waits at most this long for the commits of earlier starts ..."""
FINISH_S_MAX = 90.0
"""... and, while a VM of the job is being evacuated, until its deadline, but no longer than this."""


# ---------------------------------------------------------------- starts that become known


def _is_late(state: State, start_id: str, began_ticks: int) -> bool:
    """Whether the process is of an earlier launch: a launch whose processes began later is connected.

    This is the order of the launches of a VM, whether their starts have begun or wait for the commits of
    earlier starts.  Once the processes of the newest launch have ended, an older process, such as a notebook,
    may begin another start.
    """
    running = {first_start(trainer.start_id) for trainer in state.connected}
    began = [(s.id, s.began_ticks) for s in state.starts.known if first_start(s.id) in running]
    finishing = state.starts.finishing
    if finishing is not None:
        asking = (t for t in state.connected if t.connection in finishing.connections)
        ticks = min((trainer.process_start for trainer in asking), default=0)
        began.append((finishing.start_id, ticks))
    launch = first_start(start_id)
    return any(0 < began_ticks < ticks and first_start(id_) != launch for id_, ticks in began)


def see(transition: Transition, start_id: str, began_ticks: int = 0) -> Start:
    """A process of this start runs on this VM.

    Args:
        began_ticks: when the process began.  A process of an earlier launch may end late, and connect to a
            restarted daemon before or after the running processes of the newest launch.  Its start claims
            only for sealed sets, and ends no other start.
    """
    state = transition.state
    known = state.start_of(start_id)
    if known is not None and (known.is_live or known.members):
        return known  # its place among the launches stays
    seen = replace(known or Start(id=start_id), is_live=True, is_of_boot=True)
    seen = replace(seen, is_open=not _is_fenced(state, seen))
    others = tuple(start for start in state.starts.known if start.id != start_id)
    if seen.generation is None:
        is_late = _is_late(state, start_id, began_ticks)
        may_reconnect = arrival.has_just_started(state, transition.now)
        later = [
            start
            for start in others
            if 0 < began_ticks < start.began_ticks
            and first_start(start.id) != first_start(start_id)
            and (is_late or (may_reconnect and not start.is_live))
        ]
        earlier = others[: others.index(later[0])] if later else others
        is_overtaken = any(start.generation is not None for start in later)
        seen = replace(seen, is_open=not is_overtaken, is_live=not is_late)
        _set_starts(transition, (*earlier, seen, *others[len(earlier) :]))
        transition.log("info", "start_seen", start=start_id)
    else:
        update(transition, seen)
    if seen.is_live and transition.state.starts.newest == seen:
        _end_requests(transition, start_id)
    return seen


def _place(start: Start) -> float:
    """The generation; without one, a start that runs is newest, and one known from its sets oldest."""
    if start.generation is not None:
        return start.generation
    return math.inf if start.is_live else 0.0


def update(transition: Transition, start: Start) -> None:
    """Replace what is known of a start."""
    starts = tuple(start if each.id == start.id else each for each in transition.state.starts.known)
    _put(transition, replace(transition.state.starts, known=starts))


def _set_starts(transition: Transition, starts: Sequence[Start]) -> None:
    close(transition, (start.id for start in starts[:-STARTS_MAX]))
    _put(transition, replace(transition.state.starts, known=tuple(starts[-STARTS_MAX:])))


def _end_requests(transition: Transition, start_id: str) -> None:
    """Requests to the processes of an earlier start get no answer any more.

    One to ranks that did not know their start is for this one.
    """
    for waiting in transition.waiting_requests:
        if waiting.by_signal or waiting.start_id == start_id:
            continue
        if waiting.start_id:
            request.fail(transition, waiting, "the training was started again")
        elif not start_id.startswith(PROCESS_PREFIX):
            request.name_start(transition, waiting, start_id)


def record_joined(transition: Transition, connection: int) -> None:
    """A rank connected."""
    trainer = transition.state.ranks.on(connection)
    assert trainer is not None
    _forget_process(transition, trainer.pid)
    if trainer.start_id:
        is_alone = trainer.nodes == 1 and transition.state.start_of(trainer.start_id) is None
        if is_alone and any(
            start.is_open and start.nodes > 1 for start in transition.state.starts.known
        ):
            # The job has only this VM left.
            record_finish_asked(transition, trainer.start_id, connection)
        _record_member(transition, trainer)


def _record_member(
    transition: Transition, trainer: TrainerView, *, may_restore: bool = True
) -> None:
    """A rank belongs to a start.

    Args:
        may_restore: False if the rank has reported that it loads no checkpoint now.
    """
    start = see(transition, trainer.start_id, trainer.process_start)
    began = [ticks for ticks in (start.began_ticks, trainer.process_start) if ticks]
    update(
        transition,
        replace(
            start,
            nodes=trainer.nodes,
            ranks=trainer.local_world_size,
            began_ticks=min(began, default=0),
            members={**start.members, trainer.rank: trainer.process},
            ended={rank: step for rank, step in start.ended.items() if rank != trainer.rank},
            parents={**start.parents, trainer.rank: trainer.parent},
            is_restoring=start.is_restoring and may_restore,
        ),
    )
    if trainer.nodes > 1 and start.is_live:
        _close_earlier(transition, start.id)


def _give_start(transition: Transition) -> None:
    """On one VM, rank 0 of the newest start gives it to the others, one process for each rank.

    Ranks with a process group know their start from rank 0, through the job's own store.  The launch of any
    other process is unknown.  If an earlier launch ends late, a process may get its start, and the next
    launch then saves no checkpoint.
    """
    state = transition.state
    named = {t.start_id: t for t in state.connected if t.rank == 0 and t.start_id and t.nodes == 1}
    start = state.starts.newest
    if start is None or start.id not in named:
        return  # a late rank 0 of an earlier start has nothing to give
    first = named[start.id]
    unnamed = {
        trainer.rank: replace(trainer, start_id=start.id)
        for trainer in state.connected
        if not trainer.start_id
        and (trainer.world_size, trainer.nodes) == (first.world_size, first.nodes)
        and start.members.get(trainer.rank, trainer.process) == trainer.process
        and trainer.rank not in start.ended
    }.values()
    for trainer in unnamed:
        ranks.update(transition, trainer)
    for trainer in unnamed:
        _record_member(transition, trainer)
    if unnamed:
        _end_requests(transition, start.id)
        connections = sorted(trainer.connection for trainer in unnamed)
        transition.do(Send(StartDrawn(start.id), tuple(connections)))


def record_begun(transition: Transition, connection: int) -> None:
    """A rank belongs to a start that begins now, or begins over after a checkpoint that it could not load."""
    trainer = transition.state.ranks.on(connection)
    if trainer is not None:
        _record_member(transition, trainer, may_restore=False)


def record_progress(transition: Transition, event: TrainerProgress) -> None:
    """A rank has loaded its checkpoint, and trains from here on."""
    trainer = transition.state.ranks.on(event.connection)
    if trainer is None or event.step < 0 or not event.start_id:
        return
    _record_member(transition, trainer, may_restore=False)


def record_left(transition: Transition, event: TrainerLeft) -> None:
    """A rank said goodbye: the step that it has reported is its last one.

    After an error in a job over several VMs, a rank of another VM may have completed a further step.
    """
    trainer = transition.state.ranks.on(event.connection)
    start = None if trainer is None else transition.state.start_of(trainer.start_id)
    if trainer is None or start is None or not event.is_goodbye:
        return
    if start.nodes == 1 or event.reason == Bye().reason:
        ended = {**start.ended, trainer.rank: trainer.step}
        update(transition, replace(start, ended=ended))


def record_restoring(transition: Transition, start_id: str) -> None:
    """A rank asked for the checkpoint to resume from, and trains nothing before it has reported its start."""
    start = transition.state.start_of(start_id)
    begun = any(
        t.start_id == start_id and t.start_step >= 0 for t in transition.state.ranks.trainers
    )
    if start is not None and not begun:
        update(transition, replace(start, is_restoring=True))


def record_process(transition: Transition, event: ProcessFound) -> None:
    """The process of a trainer without hooks changed; one that is a connected rank has hooks."""
    state = transition.state
    if any(trainer.pid == event.pid for trainer in state.connected):
        return
    _put(transition, replace(state.starts, process=event.start_id))
    if event.start_id:
        start = see(transition, event.start_id)
        process = {0: (event.pid, 0)}
        update(transition, replace(start, process_ns=event.started_wall_ns, members=process))


def _forget_process(transition: Transition, pid: int) -> None:
    """The process was found before its hooks connected: it is no start of its own."""
    state = transition.state
    found = state.start_of(state.starts.process)
    if found is not None and found.generation is None and found.members.get(0, (0, 0))[0] == pid:
        others = tuple(start for start in state.starts.known if start is not found)
        _put(transition, replace(state.starts, known=others, process=""))


# ---------------------------------------------------------------- sets


def record_found(
    transition: Transition, new: Sequence[Staged], *, is_first: bool
) -> tuple[Staged, ...]:
    """A scan found these sets: learn the starts that they name, and give one to each adopted set.

    Adopted sets that the first scan has seen are of earlier lives of the daemon, although they settle later.

    Returns:
        The sets with their starts.
    """
    for staged in sorted(
        (s for s in new if s.framework == "swansong"), key=lambda each: each.written_ns
    ):
        if transition.state.start_of(staged.id.start) is None:
            _see_staged(transition, staged, new)
    known = [s for s in transition.state.staging.staged if s.framework != "swansong"]
    adopted = (s for s in new if s.framework != "swansong")
    in_order = sorted(adopted, key=lambda each: (each.written_ns, each.id))
    early = [each for each in in_order if is_first or transition.state.staging.predates(each)]
    late = [each for each in in_order if each not in early]
    named = {}
    for staged in (*reversed(early), *late):
        start_id = _adopting(transition, staged, known, is_early=staged in early)
        named[staged.id] = replace(staged, id=replace(staged.id, start=start_id))
        known.append(named[staged.id])
    return tuple(named.get(staged.id, staged) for staged in new)


def _see_staged(transition: Transition, staged: Staged, new: Sequence[Staged]) -> None:
    """A start that is known from its sets only precedes those that run, began later, or have newer sets.

    Args:
        staged: its oldest set in staging.
        new: all sets that a scan just found.
    """
    state = transition.state
    first_ns: dict[str, int] = {}
    for each in sorted((*state.staging.staged, *new), key=lambda each: each.written_ns):
        first_ns.setdefault(each.id.start, each.written_ns)
    is_of_boot = state.names_boot(staged) or staged.written_ns >= state.settings.booted_wall_ns
    later = tuple(
        start
        for start in state.starts.known
        if start.is_live
        or max(first_ns.get(start.id, 0), state.began_ns(start)) > first_ns[staged.id.start]
    )
    earlier = tuple(start for start in state.starts.known if start not in later)
    is_overtaken = any(start.generation is not None for start in later)
    found = Start(
        id=staged.id.start,
        nodes=staged.nodes,
        is_of_boot=is_of_boot,
        is_open=is_of_boot and not is_overtaken,
    )
    _set_starts(transition, (*earlier, found, *later))


def _adopting(
    transition: Transition, staged: Staged, known: Sequence[Staged], *, is_early: bool
) -> str:
    """The start of a set of a trainer without hooks."""
    state = transition.state
    written_ns = staged.written_ns
    if written_ns < state.settings.booted_wall_ns:
        return ""
    live = state.start
    may_be_beside = bool(state.connected) or (is_early and not state.starts.process)
    if live is not None and live.has_hooks and may_be_beside:
        return ""  # the framework saves beside our hooks, which cannot load it
    own = [start for start in state.starts.known if not start.has_hooks and start.is_of_boot]
    begun = [start.id for start in own if start.process_ns <= written_ns]
    is_over = len(begun) < len(own)  # written before the newest process began
    if is_over and not begun:
        return ""
    begun = begun or [f"{PROCESS_PREFIX}{state.settings.vm}"]
    if is_early:
        ids = [start.id for start in own] or begun
        later = [each for each in known if each.written_ns > written_ns]
        start_id = _recorded(staged, ids, later, count=len(begun))
    else:
        start_id = begun[-1]
        if _is_back(state, staged, start_id, known):
            first_id, _, number = start_id.partition("~")
            next_id = f"{first_id}~{int(number or 0) + 1}"
            if is_over:
                return ""  # it would get a greater generation than the process that runs
            again = see(transition, next_id)  # the same process has loaded an older state
            update(transition, replace(again, process_ns=staged.begun_ns))
            return next_id
    if start_id and (not (is_early or is_over) or state.start_of(start_id) is None):
        see(transition, start_id)
    return start_id


def _recorded(staged: Staged, own: Sequence[str], later: Sequence[Staged], *, count: int) -> str:
    """The start of an early set: an earlier one if a set that was written later has no greater step.

    Args:
        staged: the set.
        own: the starts of trainers without hooks, the newest last.
        later: the sets that were written after it, with their starts.
        count: number of these starts that had begun when it was written.
    """
    places = [
        own.index(each.id.start) - (each.id.step <= staged.id.step) if each.id.start in own else -1
        for each in later
    ]
    place = min([*places, count - 1])
    return own[place] if place >= 0 else ""


def _is_back(state: State, staged: Staged, start_id: str, known: Sequence[Staged]) -> bool:
    """Whether a set was written after all others of this start, and is not of a later step."""
    sealed = [each for each in known if each.id.start == start_id]
    steps = [each.id.step for each in sealed]
    start, last = state.start_of(start_id), state.commits.last
    if start is not None and last is not None and last.generation == start.generation:
        steps.append(last.step)
    is_latest = staged.begun_ns > max((each.written_ns for each in sealed), default=-1)
    return is_latest and staged.id.step <= max(steps, default=-1)


def record_rolled_back(transition: Transition, step: int) -> None:
    """The training returns to a healthy checkpoint: the sets of later steps are not worth a commit."""
    state = transition.state
    later = [s for s in state.uncommitted if s.id.step > step]
    transition.log("warning", "rolled_back", to_step=step, sets_dropped=len(later))
    ids = frozenset(staged.id for staged in later)
    if state.flush.flight is not None and state.flush.flight.staged.id in ids:
        flight.stop(transition)
    staged_sets.leave_behind(transition, later)
    commits.drop(transition, ids)
    request.record_rolled_back(transition)


# ---------------------------------------------------------------- claims


def reconcile(transition: Transition) -> None:
    """Name the start of each rank, let a start over several VMs begin, and order the claim that is due."""
    _give_start(transition)
    _finish(transition)
    state = transition.state
    due = _due(state, transition.now)
    if due is not None and due.id == state.starts.retried:
        return
    if state.starts.retried:  # on another VM, the training may continue: this claim would fence it
        _put(transition, replace(state.starts, retried=""))
        transition.do(WithdrawClaim())
    if due is None or not _may_claim(transition):
        return
    if due.nodes == 1 and _is_awaiting(transition):
        return  # a claim would fence the VM that still trains
    claims = (*_recent(transition), (due.id, transition.now))
    _put(transition, replace(transition.state.starts, claims=claims, retried=due.id))
    known = [start.id for start in state.starts.known]
    later = () if due.is_live else tuple(known[known.index(due.id) + 1 :])
    claim = ClaimGeneration(due.id, due.nodes, due.process_ns, due.began_ticks, due.is_live, later)
    transition.do(claim)


def _is_awaiting(transition: Transition) -> bool:
    """Whether the VM that this one replaces may still commit.  The look that denies it must be a new one."""
    other = transition.state.starts.predecessor
    if other is None:
        return False
    due_mono_s = min(other.due_mono_s, transition.now)
    other = replace(other, due_mono_s=due_mono_s)
    _put(transition, replace(transition.state.starts, predecessor=other))
    if other.looked_mono_s < due_mono_s:
        return transition.now < due_mono_s + PREDECESSOR_SILENCE_S
    return transition.now < other.by_mono_s


def record_predecessor(transition: Transition, event: PredecessorFound) -> None:
    """A look at the bucket has found that the VM that this one replaces still trains, or does not."""
    before = transition.state.starts.predecessor
    if before is None:
        return
    found = replace(
        before,
        generation=event.generation,
        by_mono_s=transition.now + min(event.left_s, PREDECESSOR_SILENCE_S),
        is_leaving=event.is_leaving,
        newest=event.newest,
        looked_mono_s=event.looked_mono_s,
    )
    _put(transition, replace(transition.state.starts, predecessor=found))
    if (found.generation, found.is_leaving) == (before.generation, before.is_leaving):
        return
    facts = {"generation": found.generation, "left_s": round(event.left_s, 1)}
    if not found.generation:
        transition.log("info", "predecessor_ended", generation=before.generation)
    elif found.is_leaving:
        transition.log("info", "predecessor_leaves", **facts)
    else:
        transition.log("info", "predecessor_stays", **facts)


def record_denied(transition: Transition, reason: str) -> None:
    """The operator denies that another VM trains, or nothing can tell."""
    before = transition.state.starts.predecessor
    if before is not None:
        transition.log("info", "predecessor_denied", generation=before.generation, reason=reason)
        _put(transition, replace(transition.state.starts, predecessor=None))


def _due(state: State, now_mono_s: float) -> Start | None:
    """The oldest start that needs a generation, has none, and does not precede the last claim.

    The newest start that runs needs one, and so does each start with sealed sets.  A start that has ended
    without a set needs none: its claim would fence the VM on which the training runs by then.  The first
    scan may find older ones.  While the next start waits, only sets that are sealed need one.

    A start that is known from its sets only waits until a process has connected, or could have: its claim
    would get a greater generation than the start that runs has already.
    """
    if state.staging.first_scan_mono_s is None:
        return None
    with_sets = {staged.id.start for staged in state.uncommitted}
    known, claiming = state.starts.known, state.start_of(state.starts.claiming)
    # The last claim may have succeeded: an earlier start would get a greater generation.
    first = known.index(claiming) if claiming is not None and claiming.is_open else 0
    has_just_started = arrival.has_just_started(state, now_mono_s)
    is_alone = has_just_started and not any(start.is_live for start in known)
    inherited = {id_.start for id_ in state.gpus.inherited} if is_alone else set()
    for start in known[first:]:
        is_newest = start is state.running and not state.starts.is_finishing
        is_needed = start.has_hooks or state.evacuation is not None  # for its farewell
        is_wanted = (is_newest and is_needed) or start.id in with_sets  # only open starts are
        if start.generation is None and is_wanted:
            return start if start.is_placed or start.id not in inherited else None
    return None


def _may_claim(transition: Transition) -> bool:
    recent = _recent(transition)
    if len(recent) < CLAIMS_MAX:
        return True
    evacuation = transition.state.evacuation
    if evacuation is None:
        return False
    return sum(at >= evacuation.opened_mono_s for _, at in recent) < EVACUATION_CLAIMS_MAX


def _recent(transition: Transition) -> tuple[tuple[str, float], ...]:
    claims = transition.state.starts.claims
    return tuple(claim for claim in claims if transition.now - claim[1] < WINDOW_S)


def record_claimed(transition: Transition, event: GenerationClaimed) -> None:
    """A start has its generation, and the newest commit of the run is known."""
    start = transition.state.start_of(event.start_id)
    fenced_by = transition.state.starts.fenced_by
    _end_retries(transition, event.start_id)
    if start is not None:
        # The claim of an earlier boot is confirmed only while it is the newest one of the run.
        is_open = start.is_open or not start.is_of_boot
        start = replace(start, generation=event.generation, is_open=is_open)
        update(transition, start)
        if _is_fenced(transition.state, start):
            _fence(transition, [start])
        if event.is_found and start.nodes == 1:
            # A process of it may have connected after a later start.
            in_order = sorted(transition.state.starts.known, key=_place)
            _put(transition, replace(transition.state.starts, known=tuple(in_order)))
        else:
            _close_overtaken(transition, event.start_id)
    if event.generation >= (fenced_by or 0):
        _put(transition, replace(transition.state.starts, fenced_by=None))
    _put(transition, replace(transition.state.starts, predecessor=None))
    commits.record_newest(transition, event)


def _end_retries(transition: Transition, start_id: str) -> None:
    """The claim of this start is made or refused."""
    starts = transition.state.starts
    if start_id == starts.retried:
        _put(transition, replace(starts, retried=""))


def _close_overtaken(transition: Transition, start_id: str) -> None:
    """An earlier start without a generation gets none: it would be greater than the one of this start."""
    starts = transition.state.starts.known
    place = [start.id for start in starts].index(start_id)
    close(transition, (start.id for start in starts[:place] if start.generation is None))


# ---------------------------------------------------------------- starts over several VMs


def record_finish_asked(transition: Transition, start_id: str, connection: int) -> None:
    """A start over several VMs is about to begin: commit the sealed sets first.

    No VM claims a generation before all VMs have done so, since nothing of an earlier start is committed
    after the claim.
    """
    state = transition.state
    finishing = state.starts.finishing
    if state.start_of(start_id) is not None:
        transition.do(Send(Finished(start_id)))  # to a rank that connected late or again
        return
    trainer = state.ranks.on(connection)
    if _is_late(state, start_id, 0 if trainer is None else trainer.process_start):
        transition.log("info", "launch_overtaken", start=start_id)
        return
    if finishing is not None and finishing.start_id == start_id:
        connected = {each.connection for each in state.connected}
        connections = finishing.connections & connected | {connection}
        finishing = replace(finishing, connections=connections)
        _put(transition, replace(state.starts, finishing=finishing))
        if finishing.waits is not None:
            _tell_finished(transition, finishing)
        return
    is_evacuating = state.evacuation is not None and not state.evacuation.is_precaution
    limit_s = min(max(FINISH_S, transition.left_s if is_evacuating else 0.0), FINISH_S_MAX)
    asked = Finishing(
        start_id,
        connections=frozenset({connection}),
        asked_mono_s=transition.now,
        by_mono_s=transition.now + limit_s,
    )
    _put(transition, replace(state.starts, finishing=asked))
    transition.do(Rescan())
    if _has_more(state):
        transition.log("info", "finishing", sets=len(state.uncommitted), limit_s=round(limit_s, 1))


def _has_more(state: State) -> bool:
    """Whether this VM still commits a set that it has sealed."""
    return bool(state.uncommitted) or bool(state.commits.stored)


def _finish(transition: Transition) -> None:
    """Answer the ranks of the next start when nothing is left to commit here, or when time is up.

    A share of another VM can still arrive if that VM has left the job.  Only the ranks together know whether
    it has: the start begins without that share once all VMs of the earlier start have answered.
    """
    state = transition.state
    finishing = state.starts.finishing
    if finishing is None or finishing.is_done:
        return
    has_scanned = state.staging.scanned_mono_s >= finishing.asked_mono_s
    # Ranks that do not query a checkpoint may train already.
    trains = any(staged.id.start == finishing.start_id for staged in state.staging.staged)
    is_over = trains or transition.now >= finishing.by_mono_s
    if not is_over and (not has_scanned or _has_more(state)):
        return
    answered = replace(finishing, waits=state.part is not None and not is_over)
    if answered == finishing:
        return
    _put(transition, replace(state.starts, finishing=answered))
    _tell_finished(transition, answered)
    if answered.is_done and state.start_of(finishing.start_id) is not None:
        _close_earlier(transition, finishing.start_id)


def _tell_finished(transition: Transition, finishing: Finishing) -> None:
    known = transition.state.starts.known
    earlier = next((s for s in reversed(known) if s.nodes > 1 and s.id != finishing.start_id), None)
    answer = Finished(finishing.start_id, waits=bool(finishing.waits))
    if earlier is not None and earlier.members:
        first_rank = min(earlier.members)
        answer = replace(answer, earlier=earlier.id, first_rank=first_rank, nodes=earlier.nodes)
    transition.do(Send(answer))


def _close_earlier(transition: Transition, start_id: str) -> None:
    """A start over several VMs has begun: nothing of an earlier start is committed any more."""
    state = transition.state
    earlier = {start.id for start in state.starts.known if start.is_open and start.id != start_id}
    is_first = state.starts.finishing is not None and state.starts.finishing.start_id == start_id
    if state.starts.known[-1].id != start_id or not (earlier or is_first):
        return
    notices.forget_peer_end(transition)
    _put(transition, replace(state.starts, finishing=None))
    close(transition, earlier)
    staged_sets.set_aside(transition, start_id, state.commits.last)


def close(transition: Transition, start_ids: Iterable[str]) -> None:
    """Commit nothing of these starts any more."""
    closed = frozenset(start_ids)
    state = transition.state
    if not closed:
        return
    if state.flush.flight is not None and state.flush.flight.staged.id.start in closed:
        flight.stop(transition)
    commits.close_starts(transition, closed)
    request.end_periodic(transition)
    known = tuple(replace(s, is_open=s.is_open and s.id not in closed) for s in state.starts.known)
    _put(transition, replace(transition.state.starts, known=known))


# ---------------------------------------------------------------- claims of other VMs


def record_fence(transition: Transition, event: FenceFound) -> None:
    """Another VM has taken the run over.

    A job over several VMs may start again here, also on this VM alone; otherwise the daemon ends.  A start
    that waits for its claim is not overtaken: it gets a greater generation, or the same one if another VM of
    its job has made this claim.

    A start that is known from its sets only may be overtaken by a later start of this VM, whose record was
    lost: that start alone is over.
    """
    _end_retries(transition, event.start_id)
    state, generation = transition.state, event.generation
    refused = state.start_of(event.start_id)
    if refused is not None and not refused.is_live:
        close(transition, (refused.id,))
        transition.log("warning", "start_overtaken", start=refused.id, newer_generation=generation)
        return
    if not event.is_news(max(state.generation or 0, state.starts.fenced_by or 0)):
        return
    known = state.starts.known
    claimed = (place for place, start in enumerate(known) if start.generation is not None)
    since_claim = known[max(claimed, default=0) :]
    is_shared = state.spans_vms or any(start.nodes > 1 for start in since_claim)
    _put(transition, replace(transition.state.starts, fenced_by=generation))
    transition.log("error", "fenced", generation=state.generation, newer_generation=generation)
    if is_shared and not event.in_mirror:
        _fence(
            transition,
            [s for s in known if s.generation is not None or not s.is_live or s is refused],
        )
        return
    close(transition, (start.id for start in known))
    transition.do(Send(Fenced(generation)))
    course.leave(transition, EXIT_FENCED, f"generation {generation} has taken the run over")


def _is_fenced(state: State, start: Start) -> bool:
    """Whether another VM has claimed a newer generation since this start claimed its own."""
    return start.generation is not None and start.generation < (state.starts.fenced_by or 0)


def _fence(transition: Transition, starts: Iterable[Start]) -> None:
    """Commit nothing of these starts any more.  Their ranks, but no others, stop periodic checkpoints."""
    ids = {start.id for start in starts}
    close(transition, ids)
    state = transition.state
    connections = tuple(t.connection for t in state.connected if t.start_id in ids)
    if connections:
        transition.do(Send(Fenced(state.starts.fenced_by or 0), connections))


def record_woke_up(transition: Transition, slept_s: float) -> None:
    """The VM was suspended: another VM may have taken the run over meanwhile."""
    transition.log("warning", "woke_up", slept_s=round(slept_s, 1))
    transition.do(CheckFence())


def _put(transition: Transition, starts: StartState) -> None:
    transition.state = replace(transition.state, starts=starts)
