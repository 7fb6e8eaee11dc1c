# SPDX-License-Identifier: Apache-2.0
"""The rendezvous: all ranks of one start of a job over several VMs meet in the job's store.

Rank 0 draws a random id for each rendezvous.  All later keys in the store begin with that id.  A store that
outlives a start of the job therefore holds nothing that the next start could mistake for its own.

After the ranks have met, every daemon first commits the sets that earlier starts have sealed.  Only then does
the new start begin, because its claim fences those sets off.  A daemon whose checkpoint lacks the share of
another VM waits for it, unless all VMs of that start have answered: then no share is still to come.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

from swansong._log import log
from swansong._ranks.agreement import Ranks
from swansong._ranks.job_store import (
    POLL_S,
    JobStore,
    first_line,
    open_job_store,
    wait_for_key,
)
from swansong.fields import ProtocolError
from swansong.protocol import Finish, Finished, Message, decode, encode

FINISH_LIMIT_S = 100.0
"""Longest wait of a start for all daemons to commit what earlier starts have sealed.  A daemon stops
after 90 s."""
ABSENT_S = 10.0
"""A rank's report that its VM has no daemon counts after this time.  Until then it may be from an earlier
start."""
_ABSENT = "absent"
_ABSENT_POLL_S = 1.0
_POLLS_PER_S = 2000.0
"""Polls by all ranks together while nothing is urgent.  In a large job each rank polls less often."""
_INIT_FIRST = "call torch.distributed.init_process_group() first"


class Rendezvous:
    """One rank's part in the rendezvous of all ranks, whose id is that of the start.

    Args:
        ranks: position of this process in the job.
        send: sends a message to the daemon of this VM, without blocking.
        begin: called with the id when the start begins: all ranks have met, and all daemons have finished.
        open_store: opens a new connection to the job's store.
    """

    def __init__(
        self,
        ranks: Ranks,
        send: Callable[[Message], object],
        begin: Callable[[str], object],
        open_store: Callable[[], JobStore] = open_job_store,
    ) -> None:
        self.ranks = ranks
        self.send = send
        self._begin = begin
        self.open_store = open_store
        self.closed = threading.Event()
        """Set when this rank leaves the job: ends all waits in the store."""
        self.poll_s = max(POLL_S, ranks.world_size / _POLLS_PER_S)
        # The daemon passes an urgent call on to the other ranks of its VM.
        self.call_poll_s = (
            self.poll_s if ranks.local_rank else max(POLL_S, ranks.nodes / _POLLS_PER_S)
        )
        self._changed = threading.Condition()
        self._met_id: str | None = None
        """Id of the rendezvous, from the moment when all ranks have met."""
        self._id: str | None = None
        """The same id, from the moment when all daemons have finished the sets of earlier starts."""
        self._answer: Finished | None = None
        """Last answer of the daemon of this VM about those sets."""
        self._problem = f"they have not all arrived yet; {_INIT_FIRST}"
        self._is_hopeless = False
        """Whether a rank has no daemon, so that waiting gains nothing."""
        self._announcing: threading.Thread | None = None

    def meet(self, store: JobStore) -> str | None:
        """Meet the other ranks, and wait until all daemons have finished the sets of earlier starts.

        A second call returns the same id.

        Args:
            store: connection of the calling thread.

        Returns:
            Id of the rendezvous; None if :attr:`closed` was set first.

        Raises:
            Exception: the store failed; call this again.
        """
        if self._id is None:
            met_id = self._met_id or self._meet_ranks(store)
            with self._changed:
                self._met_id, self._is_hopeless = met_id, False
                self._changed.notify_all()
            if met_id is None:
                return None
            self._wait_for_daemons(store, met_id)
            self._begin(met_id)  # before a restore query of this start
            with self._changed:
                self._id = met_id
                self._changed.notify_all()
        return self._id

    def wait(self, limit_s: float, finish_limit_s: float = 0.0) -> str:
        """Wait until another thread has completed :meth:`meet`.

        Args:
            limit_s: longest wait for the other ranks, in seconds.
            finish_limit_s: longest further wait for the daemons of ranks that have met, in seconds.

        Returns:
            Id of the rendezvous.

        Raises:
            TimeoutError: a limit passed, a rank has no daemon, or this rank left the job.
        """

        def is_over() -> bool:
            return bool(self._id) or self._is_hopeless or self.closed.is_set()

        give_up_mono_s = time.monotonic() + limit_s
        with self._changed:
            self._changed.wait_for(lambda: self._met_id or is_over(), limit_s)
            if self._met_id is not None:
                left_s = max(0.0, give_up_mono_s - time.monotonic())
                self._changed.wait_for(is_over, left_s + finish_limit_s)
            if self._id is None:
                raise TimeoutError(f"the ranks of the other VMs cannot be reached: {self._problem}")
            return self._id

    def resend(self) -> None:
        """Repeat the message that the daemon has not answered, after a reconnect."""
        if self._met_id is not None and self._id is None:
            self.send(Finish(self._met_id))

    def finished(self, answer: Finished) -> None:
        """Record that the daemon of this VM has committed what earlier starts have sealed here.

        The daemon sends its answers to all ranks, also those about a start that another launch asks for.
        """
        with self._changed:
            if answer.start_id == self._met_id:
                self._answer = answer
                self._changed.notify_all()

    def store_failed(self, reason: str) -> None:
        """Record why the store failed, for the error that :meth:`wait` raises."""
        self._problem = f"{reason}; {_INIT_FIRST}"

    def announce_absence(self) -> None:
        """Report to the other ranks that this VM has no daemon; returns immediately."""

        def announce() -> None:
            try:
                report_absence(self.open_store(), self.ranks.rank)
            except Exception as error:  # no store, or no torch: no other rank is waiting
                log.info("cannot report to the other ranks: %s", first_line(error))

        self._announcing = threading.Thread(target=announce, name="swansong-absent", daemon=True)
        self._announcing.start()

    def close(self) -> None:
        """End all waits; blocks for at most 1 s until the thread of :meth:`announce_absence` has ended."""
        self.closed.set()
        with self._changed:
            self._changed.notify_all()
        if self._announcing is not None:
            self._announcing.join(1.0)

    def _meet_ranks(self, store: JobStore) -> str | None:
        begun_mono_s = time.monotonic()

        def watch(_missing: Sequence[int], without_daemon: Sequence[int]) -> None:
            self._report_absent(without_daemon, begun_mono_s)

        rank, world_size = self.ranks.rank, self.ranks.world_size
        nonce = secrets.token_hex(8)
        return meet_ranks(store, rank, world_size, nonce, closed=self.closed, watch=watch)

    def _report_absent(self, ranks: Sequence[int], begun_mono_s: float) -> None:
        """Give up the wait if ranks have reported for :data:`ABSENT_S` that their VM has no daemon."""
        if not ranks or time.monotonic() - begun_mono_s <= ABSENT_S:
            return
        with self._changed:
            self._problem = (
                f"the VMs of ranks {ranks} have no daemon that answers: start swansongd there, and then the"
                " job; without it those ranks would begin at step 0"
            )
            self._is_hopeless = True
            self._changed.notify_all()

    def _wait_for_daemons(self, store: JobStore, met_id: str) -> None:
        """Publish each answer of the daemon until the start may begin, which rank 0 decides."""
        give_up_mono_s = time.monotonic() + FINISH_LIMIT_S
        self._problem = "their daemons still commit what an earlier start has sealed"
        self.send(Finish(met_id))
        may_begin = f"{met_id}/may_begin"
        answers = [f"{met_id}/answer/{rank}" for rank in range(self.ranks.world_size)]
        published: Finished | None = None

        def has_news() -> bool:
            return self.closed.is_set() or self._answer != published

        while not store.check([may_begin]) and time.monotonic() < give_up_mono_s:
            with self._changed:
                self._changed.wait_for(has_news, self.poll_s)
                answer = self._answer
            if self.closed.is_set():
                return
            if answer is not None and answer != published:
                store.set(answers[self.ranks.rank], encode(answer).decode())
                published = answer
            if self.ranks.rank != 0 or not store.check(answers):
                continue
            if has_all_shares([_parsed(data) for data in store.multi_get(answers)]):
                store.set(may_begin, "")


def meet_ranks(
    store: JobStore,
    rank: int,
    world_size: int,
    nonce: str,
    *,
    closed: threading.Event,
    watch: Callable[[Sequence[int], Sequence[int]], object],
    prefix: str = "",
    value: str = "",
) -> str | None:
    """Meet the other ranks of this start of the job, and no rank of an earlier one.

    Rank 0 acknowledges each rank by the nonce of that rank, so a rank cannot take an acknowledgement that an
    earlier start has left for its own.

    Args:
        store: connection of the calling thread.
        rank: of this process.
        world_size: number of ranks.
        nonce: random, and new in each call; rank 0's becomes the id.
        closed: ends the wait.
        watch: called during the wait with the ranks that are missing, and with those that report that their
            VM has no daemon; may raise.
        prefix: of all keys.
        value: of a rank other than 0, which rank 0 finds under ``<prefix><id>/met/<rank>``.

    Returns:
        Id of the rendezvous, the same for all ranks; None if ``closed`` was set before all ranks had met.
    """
    every_s = max(POLL_S, world_size / _POLLS_PER_S)
    store.set(f"{prefix}hello/{rank}", nonce)
    if rank != 0:
        welcome = f"{prefix}welcome/{nonce}"
        while not wait_for_key(store, welcome, closed, every_s=every_s, limit_s=_ABSENT_POLL_S):
            if closed.is_set():
                return None
            watch([0], [0] if _is_absent(store, f"{prefix}hello/0") else [])
        rendezvous_id = store.get(welcome).decode()
        store.set(f"{prefix}{rendezvous_id}/met/{rank}", value)
        return rendezvous_id
    missing = set(range(1, world_size))
    acknowledged: set[str] = set()
    while missing:
        without_daemon = []
        for other in sorted(missing):
            if store.check([f"{prefix}{nonce}/met/{other}"]):
                missing.remove(other)
            elif store.check([f"{prefix}hello/{other}"]):
                theirs = store.get(f"{prefix}hello/{other}").decode()
                if theirs == _ABSENT:
                    without_daemon.append(other)
                elif theirs not in acknowledged:
                    acknowledged.add(theirs)
                    store.set(f"{prefix}welcome/{theirs}", nonce)
        if missing:
            watch(sorted(missing), without_daemon)
            if closed.wait(POLL_S):
                return None
    return nonce


def _parsed(data: bytes) -> Finished | None:
    """The answer of a daemon that another rank has published; None if it is invalid."""
    try:
        message = decode(data)
    except ProtocolError:
        return None
    return message if isinstance(message, Finished) else None


def has_all_shares(answers: Sequence[Finished | None]) -> bool:
    """Whether no share of an earlier start is still to come: all its VMs have committed what they sealed.

    Args:
        answers: the last answer of each rank's daemon; None for an invalid one, which proves nothing.  The
            lowest rank in that start identifies a VM.
    """
    valid = [each for each in answers if each is not None]

    def answered(earlier: str) -> int:
        return len({each.first_rank for each in valid if each.earlier == earlier})

    return len(valid) == len(answers) and all(
        each.earlier != "" and answered(each.earlier) == each.nodes for each in valid if each.waits
    )


def report_absence(store: JobStore, rank: int) -> None:
    """Report that this rank has no daemon and will not come to the rendezvous."""
    store.set(f"hello/{rank}", _ABSENT)


def _is_absent(store: JobStore, key: str) -> bool:
    return store.check([key]) and store.get(key).decode() == _ABSENT
