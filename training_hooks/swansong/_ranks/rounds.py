# SPDX-License-Identifier: Apache-2.0
"""Rounds: ranks on several VMs agree on the step at which all of them save.

Each daemon learns only of the termination of its own VM.  Its request therefore becomes a *round* in the
job's store.  All ranks take part in all rounds, in order.

1. A rank calls the round.
2. Every rank answers with the last step that it has completed, and begins no further step.
3. The rank that answers last decides on the greatest step plus one.  A rank that has waited too long decides
   to abort.  Only the first decision counts: it is one compare-and-set.
"""

from __future__ import annotations

import dataclasses
import threading
import time

from swansong import protocol
from swansong._log import log
from swansong._ranks.agreement import AGREEMENT_LIMIT_S, Agreement
from swansong._ranks.job_store import JobStore, first_line, wait_for_key
from swansong._ranks.rendezvous import Rendezvous

DECISION_PART = 0.8
"""Part of the agreement limit that a round may take.  The training loop needs the rest to get the target."""
_URGENT_POLL_S = 0.002
_URGENT_POLLS_PER_S = 20_000.0
"""Polls of a round by all ranks together: the job's store answers about 40,000 requests a second."""
_RETRY_S = 0.5


Decision = protocol.Target | protocol.Declined
"""The result of a round: the step at which all ranks save, or why no rank saves."""


def take_part(
    store: JobStore,
    key: str,
    request_id: str,
    *,
    rank: int,
    world_size: int,
    step: int,
    limit_s: float,
    stop: threading.Event,
) -> Decision:
    """Take one rank's part in a round.

    Args:
        store: connection of the calling thread.
        key: prefix of the round's keys.
        request_id: of the request that the round is for.
        rank: of this process.
        world_size: number of ranks.
        step: last step that this rank has completed.  It begins no other before this function returns.
        limit_s: longest wait for the other ranks, in seconds.
        stop: ends the wait.

    Returns:
        The decision, the same for every rank that receives one.

    Raises:
        Exception: the store failed, so the decision is unknown.
    """
    decision = f"{key}/decision"
    store.set(f"{key}/step/{rank}", str(step))
    if store.add(f"{key}/answers", 1) == world_size:
        steps = store.multi_get([f"{key}/step/{each}" for each in range(world_size)])
        own: Decision = protocol.Target(request_id, max(int(value) for value in steps) + 1)
    else:
        every_s = max(_URGENT_POLL_S, world_size / _URGENT_POLLS_PER_S)
        if wait_for_key(store, decision, stop, every_s=every_s, limit_s=limit_s):
            return _decision(store.get(decision))
        reason = f"rank {rank} waited {limit_s:.1f} s for the ranks of the other VMs"
        own = protocol.Declined(request_id, reason)
    return _decision(store.compare_set(decision, "", protocol.encode(own).decode()))


def _decision(data: bytes) -> Decision:
    found = protocol.decode(data)
    assert isinstance(found, protocol.Target | protocol.Declined)
    return found


def _call(data: bytes) -> protocol.Request:
    """Return the request that a round is for."""
    found = protocol.decode(data)
    assert isinstance(found, protocol.Request)
    return found


class RoundRunner:
    """A thread that brings this rank to the rendezvous, and then through all rounds.

    Each call of a round runs in one more thread, which ends with the call.

    Args:
        rendezvous: of this rank.
        agreement: between this rank's training loop and its background thread.
    """

    def __init__(self, rendezvous: Rendezvous, agreement: Agreement) -> None:
        self._rendezvous = rendezvous
        self._agreement = agreement
        self._lock = threading.Lock()
        self._number = 1
        """Number of the round that this rank takes part in, or waits for."""
        self._in_progress: protocol.Request | None = None
        self._peer_call: tuple[protocol.Request, float] | None = None
        """The last urgent call from another VM, and its deadline in seconds of ``time.monotonic()``."""
        self._requested: set[str] = set()
        """Ids of the requests of this VM's daemon."""
        self._aliases: dict[str, list[str]] = {}
        """By the id of a call: further requests that its round answers."""
        self._has_called = threading.Event()
        """Set when this rank has called a round, and when it leaves the job."""
        self._calling = threading.Lock()
        self._calls: JobStore | None = None
        """Connection for calling rounds, opened before it is needed."""
        self._thread = threading.Thread(target=self._run, name="swansong-rounds", daemon=True)

    def start(self) -> None:
        """Start the thread; a second call does nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Leave the job; blocks for at most 1 s until the thread has ended."""
        self._rendezvous.close()
        self._has_called.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            # A thread inside torch at interpreter shutdown would crash the process.
            self._thread.join(1.0)

    # ------------------------------------------------------------ the daemon of this VM

    def request(self, request: protocol.Request) -> None:
        """Call a round for a request of the daemon; returns immediately."""
        with self._lock:
            is_new = request.id not in self._requested
            self._requested.add(request.id)
            call = self._in_progress
            if call is not None and request.id in (call.id, *self._aliases_of(call.id)):
                is_new = False
        if self._agreement.repeat_answer(request.id) or not is_new:
            return
        threading.Thread(
            target=self._call, args=(request,), name="swansong-call", daemon=True
        ).start()

    def resend(self) -> None:
        """Repeat to the daemon, after a reconnect, what it must know."""
        self._rendezvous.resend()
        if self._peer_call is not None:
            call, deadline_mono_s = self._peer_call
            left_s = deadline_mono_s - time.monotonic()
            if left_s > 0:
                self._rendezvous.send(protocol.PeerRequest(call.id, call.reason, left_s))

    def answer(self, message: protocol.Message) -> object:
        """Send an answer to the daemon, once for each request that the same round answers."""
        request_id = getattr(message, "request_id", "")
        for alias in self._aliases_of(request_id):
            self._rendezvous.send(dataclasses.replace(message, request_id=alias))  # type: ignore[call-arg]
        return self._rendezvous.send(message)

    def _aliases_of(self, request_id: str) -> list[str]:
        return self._aliases.get(request_id, [])

    # ------------------------------------------------------------ calling a round

    def _call(self, request: protocol.Request) -> None:
        limit_s = min(AGREEMENT_LIMIT_S, max(0.0, request.seconds_left) / 10)
        requested_mono_s = time.monotonic()
        try:
            rendezvous_id = self._rendezvous.wait(limit_s)
            with self._calling:
                if self._calls is None:
                    self._calls = self._rendezvous.open_store()
                self._call_round(self._calls, rendezvous_id, request, requested_mono_s)
        except Exception as error:  # any failure of the store is a reason to decline
            with self._lock:
                self._requested.discard(request.id)
            self._calls = None
            reason = f"cannot reach the ranks of the other VMs: {first_line(error)}"
            self._rendezvous.send(protocol.Declined(request.id, reason))

    def _call_round(
        self,
        store: JobStore,
        rendezvous_id: str,
        request: protocol.Request,
        requested_mono_s: float,
    ) -> None:
        # All ranks of this VM get the request, and must call the same round.
        wanted = store.compare_set(f"{rendezvous_id}/request/{request.id}", "", str(self._number))
        left_s = request.seconds_left - (time.monotonic() - requested_mono_s)
        own = protocol.encode(dataclasses.replace(request, seconds_left=left_s)).decode()
        number, made = int(wanted), None
        # A round without urgency does not answer an emergency: call the next one.
        while made is None or request.urgency not in (made.urgency, "drain"):
            key = f"{rendezvous_id}/round/{number}/call"
            made = _call(store.compare_set(key, "", own))
            number += 1
        self._has_called.set()
        if made.id != request.id:
            with self._lock:
                self._aliases.setdefault(made.id, []).append(request.id)
            self._agreement.repeat_answer(made.id)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        rendezvous = self._rendezvous
        while not rendezvous.closed.is_set():
            try:
                store = rendezvous.open_store()
                if self._calls is None:
                    self._calls = rendezvous.open_store()
                rendezvous_id = rendezvous.meet(store)
                while not rendezvous.closed.is_set():
                    self._next_round(store, f"{rendezvous_id}/round/{self._number}")
            except Exception as error:
                reason = first_line(error)
                rendezvous.store_failed(reason)
                log.info("the store of the job failed: %s; retrying in %s s", reason, _RETRY_S)
                rendezvous.closed.wait(_RETRY_S)

    def _next_round(self, store: JobStore, key: str) -> None:
        while not store.check([f"{key}/call"]):
            self._has_called.wait(self._rendezvous.call_poll_s)
            self._has_called.clear()
            if self._rendezvous.closed.is_set():
                return
        call = _call(store.get(f"{key}/call"))
        received_mono_s = time.monotonic()
        with self._lock:
            self._in_progress = call
            is_of_this_vm = call.id in self._requested
        try:
            if not is_of_this_vm and call.urgency == "emergency":
                self._peer_call = (call, received_mono_s + call.seconds_left)
                self._rendezvous.send(protocol.PeerRequest(call.id, call.reason, call.seconds_left))
            self._save_together(store, key, call)
        finally:
            with self._lock:
                self._in_progress = None
                self._number += 1

    def _save_together(self, store: JobStore, key: str, call: protocol.Request) -> None:
        agreement, ranks = self._agreement, self._rendezvous.ranks
        step = agreement.request(call)
        try:
            decision = take_part(
                store,
                key,
                call.id,
                rank=ranks.rank,
                world_size=ranks.world_size,
                step=step,
                limit_s=DECISION_PART * min(AGREEMENT_LIMIT_S, call.seconds_left / 10),
                stop=self._rendezvous.closed,
            )
        except Exception as error:
            agreement.abort(call.id, f"the store of the job failed: {first_line(error)}")
            raise
        if isinstance(decision, protocol.Declined):
            agreement.abort(call.id, decision.reason)
            return
        self.answer(protocol.Agreed(call.id, decision.step))
        agreement.target(decision)
        # The next round's request would replace this one in the agreement.
        agreement.wait_finished(call.id, call.seconds_left)
