# SPDX-License-Identifier: Apache-2.0
"""Answers the restore queries of trainers with a local directory to resume from.

:mod:`swansongd.core.resume` has the rule.  There are two candidates, and the newer one is taken:

- the newest sealed set in staging, after a crash of the trainer or on a disk that survived the VM;
- the newest whole commit in the store, which is downloaded and verified.

Staging is scanned before the choice.  Every rank sends its own query, and all ranks of one start get the
same answer, however late they ask: two checkpoints are never mixed, and none is fetched twice.

One thread answers all queries in order, from a bounded queue.  :mod:`swansongd.restore.downloads` fetches.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
from swansong.protocol import Message, Restored, RestoreQuery, Restoring, ShardsTaken
from swansong_bucket.errors import (
    CorruptError,
    NothingToRestore,
    StagingError,
    SwansongError,
    Transient,
    UnreadableError,
)
from swansong_bucket.model import CommitRef, Health, Staged, is_healthy
from swansong_bucket.runs import catalog, commit
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.wrappers.retry import Retrying
from swansong_bucket.transfer.restore import health_of, whole
from swansong_bucket.util.threads import lasting_thread

from swansongd.core import resume
from swansongd.core.events import Event, RestoreAsked, RolledBack
from swansongd.core.state import State
from swansongd.observe.facts import RestoreAnswered
from swansongd.observe.status import STORE_HEALTH
from swansongd.restore.context import RestoreContext
from swansongd.restore.downloads import BUDGET_S, Downloads
from swansongd.restore.wish import Choice, Wish, union
from swansongd.staging.prepare import explained
from swansongd.trainers.admission import Reply

QUERIES_MAX = 1024
"""Limit of the queue; further queries are refused."""
_PROGRESS_INTERVAL_S = 0.5
_LOOK_INTERVAL_S = 0.02
_SCAN_TIMEOUT_S = 10.0
"""Timeout of a scan; after that, the choice uses the result of the last scan."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CachedAnswer:
    """The answer for the ranks of one start."""

    answer: Restored
    start_id: str
    wish: Wish | None
    """Of a download; None for a set in staging and for a fresh run."""

    def is_for(self, start_id: str) -> bool:
        """Whether it answers this start; a download that is gone is fetched again."""
        path = self.answer.path  # the answer for a fresh run has none
        is_there = self.wish is not None or not path or Path(path).is_dir()
        return self.start_id == start_id and is_there


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """A commit that the ranks of a job over several VMs refuse, because it is damaged.

    This start of the training loads neither this commit nor a newer one.  The next start tries it again,
    because an operator may have repaired it.
    """

    start_id: str
    ref: CommitRef
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ticket:
    """A query in the queue."""

    query: RestoreQuery
    reply: Reply
    post: Callable[[Event], None]
    give_up_mono_s: float


class Resume:
    """Answers queries in one thread, in the order of their arrival.

    Args:
        context: of the run.
    """

    def __init__(self, context: RestoreContext) -> None:
        self._context = context
        self._keys = context.keys
        self._state = context.state
        self._stop = context.stop
        self._monotonic = context.monotonic
        self.downloads = Downloads(context)
        self.downloads.listener = self._report
        self.answered: Callable[[], None] = lambda: None
        """Called after each answer without an error."""
        self.restored_generation = -1
        """Generation of the newest checkpoint that was an answer; -1 without one."""
        self._reported_mono_s = context.monotonic()
        self._waited_mono_s = -math.inf
        """When the queries last had to wait for another VM."""
        self._given: _CachedAnswer | None = None
        """The answer of the newest start, which its late ranks get also after answers to an operator."""
        self._last_refusal: _Refusal | None = None
        self._changed = threading.Condition()
        self._waiting: deque[_Ticket] = deque()
        self._current: _Ticket | None = None
        lasting_thread("resume", self._serve).start()

    def ask(self, query: RestoreQuery, reply: Reply, post: Callable[[Event], None]) -> None:
        """Queue a query.  The replies are Restoring during a download, then one Restored.

        A rollback posts RolledBack before its answer.  Over several VMs the answer to a rollback only
        names the checkpoint.  The ranks then begin another start, and ask for that checkpoint by name.
        """
        ticket = _Ticket(
            query=query, reply=reply, post=post, give_up_mono_s=self._monotonic() + BUDGET_S
        )
        with self._changed:
            is_full = len(self._waiting) >= QUERIES_MAX
            if not is_full:
                self._waiting.append(ticket)
                self._changed.notify()
        if not query.rollback:
            self._context.post(RestoreAsked(query.start_id))
        if is_full:
            error = f"restore query refused: {QUERIES_MAX} queries wait already; retry later"
            _send(ticket, Restored(query.query_id, error=error))
        else:
            self.downloads.verified.join(query, reply)

    def take(self, message: ShardsTaken, reply: Reply) -> None:
        """Record how many shards a trainer has taken, before its query is answered."""
        self.downloads.verified.take(message, reply)

    def _serve(self) -> None:
        while not self._stop.is_set():
            ticket = self._next()
            if ticket is None:
                return
            try:
                with explained(self._context.run.path, "check the disk of staging"):
                    answer = replace(self._find(ticket), query_id=ticket.query.query_id)
            except Transient as error:
                answer = Restored(ticket.query.query_id, error=self._unreachable(error))
            except SwansongError as error:
                is_damaged = isinstance(error, NothingToRestore) and error.is_damaged
                answer = Restored(ticket.query.query_id, error=error.line(), is_damaged=is_damaged)
            except Exception as error:
                _log.exception("resume_fault")
                answer = Restored(ticket.query.query_id, error=f"{type(error).__name__}: {error}")
            with self._changed:
                self._current = None
            _log.info(
                "resume",
                step=answer.step,
                generation=answer.generation,
                path=answer.path,
                error=answer.error,
            )
            self.downloads.verified.leave(ticket.reply)
            if answer.path:
                self.restored_generation = answer.generation
            _send(ticket, answer)
            if not ticket.query.rollback:
                self._context.post(RestoreAnswered(answer.step, answer.generation, answer.error))
            if not answer.error:
                self.answered()

    def _unreachable(self, error: Transient) -> str:
        """The reason why the store gives no checkpoint, with the newest commit of the mirror.

        The trainer does not get that commit: the store may have newer ones, and only an operator knows
        whether it is lost.
        """
        mirror = self._context.mirror
        if mirror is None:
            return error.line()
        try:
            newest = commit.newest_whole_commit(mirror, self._keys)
        except SwansongError as other:
            return f"{error.line()}; the mirror cannot be read either: {other.line()}"
        return (
            f"{error.line()}; the mirror {mirror.url} has {newest or 'no commit'}: if the store is "
            "lost, continue there with swansong mirror --promote"
        )

    def _next(self) -> _Ticket | None:
        """The first query that can be answered now; None after the stop.

        A query for a start that has no generation yet waits without blocking the queries behind it.  It
        fails at once if the store refuses every claim: the trainer's log then names the cause.
        """
        with self._changed:
            while not self._stop.is_set():
                for place, ticket in enumerate(self._waiting):
                    is_ready = resume.may_answer(self._state(), ticket.query)
                    is_ready = is_ready or bool(self._context.claim_refusal())
                    give_up_mono_s = max(ticket.give_up_mono_s, self._waited_mono_s + BUDGET_S)
                    if is_ready or self._monotonic() > give_up_mono_s:
                        del self._waiting[place]
                        self._current = ticket
                        return ticket
                self._changed.wait(_LOOK_INTERVAL_S if self._waiting else None)
        return None

    def _find(self, ticket: _Ticket) -> Restored:
        query = ticket.query
        if not resume.may_answer(self._state(), query):
            raise StagingError(
                f"no generation for this start of the training: {self._why_unclaimed()}",
                hint="See: swansong status",
            )
        if query.generation >= 0:
            ref = CommitRef(query.generation, query.step)
            if not query.refused:
                return self._named(ref)
            self._refuse(ref, query.refused)
        if query.rollback and self._state().spans_vms:
            return self._healthy_of_all_vms(query)
        given = self._given
        if given is not None and given.is_for(query.start_id):
            return self._repeated(given)
        if query.rollback:
            return self._rollback(query, ticket.post)
        return self._newest(query.start_id)

    def _why_unclaimed(self) -> str:
        """Why this start has no generation, for the log of the trainer."""
        refusal = self._context.claim_refusal()
        store = self._state().notices.sources.get(STORE_HEALTH)
        if refusal or store is None or store.health is Health.OK:
            return refusal or "it was started again"
        return store.reason

    def _scanned(self) -> State:
        """The state after a scan that begins now, which finds sets sealed just before the query."""
        rescan = self._context.rescan
        if rescan is None:
            return self._state()
        begun_mono_s = self._monotonic()
        rescan()
        while self._monotonic() - begun_mono_s < _SCAN_TIMEOUT_S:
            state = self._state()
            if state.staging.scanned_mono_s >= begun_mono_s:
                return state
            if self._stop.wait(_LOOK_INTERVAL_S):
                break
        return self._state()

    def _newest(self, start_id: str) -> Restored:
        """The newest checkpoint."""
        state = self._scanned()
        store = self._store()
        refusal = self._refusal
        before = None if refusal is None else refusal.ref
        newest = commit.newest_whole_commit(
            store, self._keys, before=before, near=state.generation or 0
        )
        if newest is None and refusal is not None:
            raise NothingToRestore(
                f"run {self._keys.run} has no whole commit before {refusal.ref}, which is damaged: "
                f"{refusal.reason}",
                hint="See: swansong verify",
            )
        own = resume.newest_local(state, newest)
        wish = None
        if own is not None:
            answer = self._in_staging(own, state)
        else:
            answer = self._fetched(Wish(ref=newest, before=before))
            if answer.path:
                # Late ranks get the same commit, also if the newest one was damaged, or newer
                # ones exist by then.
                wish = _by_name(CommitRef(answer.generation, answer.step))
        self._keep(answer, start_id, wish)
        return answer

    def _keep(self, answer: Restored, start_id: str, wish: Wish | None) -> None:
        if start_id:
            self._given = _CachedAnswer(answer=answer, start_id=start_id, wish=wish)

    def _named(self, ref: CommitRef) -> Restored:
        """This commit, downloaded once for all ranks of this VM; refused once it proves damaged."""
        if ref.step < 0:
            raise NothingToRestore(f"generation {ref.generation} has no commit of step {ref.step}")
        refusal = self._refusal
        if refusal is not None and ref >= refusal.ref:
            raise NothingToRestore(f"{ref} is damaged: {refusal.reason}", is_damaged=True)
        try:
            return self._fetched(_by_name(ref))
        except NothingToRestore as error:
            if error.is_damaged:
                self._refuse(ref, error.line())
            raise

    @property
    def _refusal(self) -> _Refusal | None:
        """The refusal of the oldest commit in this start of the training."""
        last = self._last_refusal
        return last if last is None or last.start_id == self._newest_start_id() else None

    def _refuse(self, ref: CommitRef, reason: str) -> None:
        """Refuse this commit and newer ones."""
        earlier = self._refusal
        if earlier is not None and earlier.ref <= ref:
            return
        start_id = self._newest_start_id()
        self._last_refusal = _Refusal(start_id=start_id, ref=ref, reason=reason)
        self._given = None
        _log.error("commit_refused", commit=str(ref), reason=reason)

    def _newest_start_id(self) -> str:
        start = self._state().start
        return "" if start is None else start.id

    def _repeated(self, cached: _CachedAnswer) -> Restored:
        """The same checkpoint, with the files that this rank reads."""
        return cached.answer if cached.wish is None else self._fetched(cached.wish)

    def _healthy_of_all_vms(self, query: RestoreQuery) -> Restored:
        """The newest healthy commit before a step: staging has only this VM's share of a checkpoint."""
        committed = self._newest_healthy_commit(query.before_step)
        if committed is None:
            raise self._nothing_before(query.before_step)
        return self._fetched(_by_name(CommitRef(committed.generation, committed.step)))

    def _rollback(self, query: RestoreQuery, post: Callable[[Event], None]) -> Restored:
        """The newest healthy checkpoint before a step; posts RolledBack once for all ranks."""
        state = self._scanned()
        committed = self._newest_healthy_commit(query.before_step)
        own = resume.newest_local(state, committed, before_step=query.before_step)
        wish = None
        if own is not None:
            answer = self._in_staging(own, state)
        elif committed is not None:
            wish = Wish(ref=committed, choice=Choice.EXACT)
            answer = self._fetched(wish)
        else:
            raise self._nothing_before(query.before_step)
        post(RolledBack(answer.step))
        self._keep(answer, query.start_id, wish)
        return answer

    def _nothing_before(self, step: int) -> NothingToRestore:
        return NothingToRestore(
            f"run {self._keys.run} has no healthy checkpoint before step {step}"
        )

    def _newest_healthy_commit(self, before_step: int) -> CommitRef | None:
        """The newest whole commit before the step that is known to be healthy.

        Raises:
            UnreadableError: there is none, and the store refused a manifest that might be one.
        """
        unread: UnreadableError | None = None
        store, near = self._store(), self._state().generation or 0
        for found in catalog.newest_commits(store, self._keys, near=near):
            if found.ref.step >= before_step:
                continue
            try:
                manifests = whole(store, self._keys, found)
            except UnreadableError as error:
                unread = unread or error
                continue
            except CorruptError:
                continue
            if is_healthy(health_of(manifests)):
                return found.ref
        if unread is not None:
            raise unread
        return None

    def _store(self) -> ObjectStore:
        return Retrying(self._context.store, budget_s=BUDGET_S, stop=self._stop)

    def _in_staging(self, own: Staged, state: State) -> Restored:
        return Restored(
            "",
            path=str(self._context.run.path / own.directory),
            step=own.id.step,
            generation=-1 if (ref := state.ref_of(own.id)) is None else ref.generation,
            age_s=_since_s(own.written_ns / 1e9),
        )

    def _fetched(self, wish: Wish) -> Restored:
        """Download this commit, for all ranks that wait; the answer has no path if the run is fresh."""
        with self._changed:
            tickets = [*self._waiting] if self._current is None else [self._current, *self._waiting]
        prefixes = union(frozenset(ticket.query.prefixes) for ticket in tickets)
        try:
            download = self.downloads.fetch(replace(wish, prefixes=prefixes))
        except NothingToRestore as error:
            if wish.ref is None and error.is_fresh:
                return Restored("")
            raise
        assert download.result is not None
        place, created_wall_s = download.result.ref, download.result.created_wall_s
        return Restored(
            "",
            path=str(download.result.path),
            step=place.step,
            generation=place.generation,
            age_s=None if created_wall_s is None else _since_s(created_wall_s),
            download=download.id,
        )

    def wait_for(self, other: str) -> None:
        """Tell the queries in the queue that they have to wait for another VM."""
        with self._changed:
            self._waited_mono_s = self._monotonic()
            tickets = [*self._waiting]
        for ticket in tickets:
            _send(ticket, Restoring(ticket.query.query_id, 0, 0, other))

    def _report(self, done_bytes: int, total_bytes: int) -> None:
        """Report the progress of a download to all queries in the queue."""
        now_mono_s = self._monotonic()
        with self._changed:
            if now_mono_s - self._reported_mono_s < _PROGRESS_INTERVAL_S:
                return
            self._reported_mono_s = now_mono_s
            current = [] if self._current is None else [self._current]
            tickets = [*current, *self._waiting]
        for ticket in tickets:
            _send(ticket, Restoring(ticket.query.query_id, done_bytes, total_bytes))


def _by_name(ref: CommitRef) -> Wish:
    return Wish(ref=ref, choice=Choice.NAMED)


def _since_s(wall_s: float) -> float:
    return max(0.0, time.time() - wall_s)


def _send(ticket: _Ticket, message: Message) -> None:
    """Reply to one peer; a failure affects that peer alone."""
    try:
        ticket.reply(message)
    except Exception as error:
        _log.warning("restore_reply_failed", reason=f"{type(error).__name__}: {error}")
