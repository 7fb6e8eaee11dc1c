# SPDX-License-Identifier: Apache-2.0
"""Ranks on several VMs agree on the step at which all of them save, by way of the job's own store.

Every daemon hears only of the end of its own VM, so its request goes around in *rounds*, which all ranks
take part in, in order.  Somebody calls the round; every rank answers with the last step that it has
completed, and begins no further one; whoever answers last decides on the greatest step plus one.  A rank
for which that takes too long decides on giving up.  Only the first decision counts, and all obey it: it
is one compare-and-set.  Nobody waits in a collective, and nothing is opened between the VMs.

Keys in the store, all below the session, which is a number that rank 0 has drawn for this start of the
job: what an earlier start has left in a store that outlived it means nothing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from swansong._ranks.agreement import AGREEMENT_LIMIT_S, Agreement, Ranks
from swansong._ranks.rounds import (
    POLL_S,
    Call,
    JobStore,
    await_key,
    greet,
    open_job_store,
    say_absent,
    take_part,
)
from swansong.protocol import (
    Agreed,
    Declined,
    Finish,
    JobStart,
    Message,
    PeerRequest,
    Request,
    Target,
)

DECISION_PART = 0.8
"""Of the time in which ranks must agree: the rest is left to the training loop, to hear of it."""
GREETING_LIMIT_S = 120.0
"""How long a restore waits for the ranks of the other VMs to come."""
FINISH_LIMIT_S = 100.0
"""How long a start waits for all daemons to commit what earlier ones have sealed; theirs is 90 s at most."""
COMING_LIMIT_S = 60.0
"""How long rank 0 waits for another rank to go back with it; each has ended the same step."""
_POLLS_PER_S = 2000.0
"""So often all ranks together look for the call of a round; in a large job each does so less often."""
_RETRY_S = 0.5
_INIT_FIRST = "call torch.distributed.init_process_group() first"
_BEAT_S = 1.0

log = logging.getLogger("swansong")


def advise_on_launcher(ranks: Ranks) -> None:
    """Warn, once for each VM, when this torchrun cannot take a VM back into the job.

    The agents of torch 2.13 share the store of their rendezvous with the ranks.  When the job has shrunk
    and a VM returns, the survivor's agent fails at that store, and the job ends.
    """
    is_elastic = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("", "0")
    shares = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if ranks.nodes > 1 and ranks.local_rank == 0 and is_elastic and shares:
        log.warning(
            "torchrun shares its store with the ranks: once the job has shrunk, no VM can join it again; set"
            " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun on every VM"
        )


class Assembly:
    """One rank's part in what all ranks do together; a thread, and one more while it calls a round.

    Args:
        ranks: which part of the job this process is.
        agreement: between this rank's training loop and us.
        send: says something to the daemon of this VM, without waiting.
        open_store: makes a new connection to the job's store.
    """

    def __init__(
        self,
        ranks: Ranks,
        agreement: Agreement,
        send: Callable[[Message], object],
        open_store: Callable[[], JobStore] = open_job_store,
    ) -> None:
        self._ranks = ranks
        self._agreement = agreement
        self._send = send
        self._poll_s = max(POLL_S, ranks.world_size / _POLLS_PER_S)
        self._open_store = open_store
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._met: str | None = None
        """The session, as soon as all ranks have met."""
        self._session: str | None = None
        """The same, once all daemons have finished what earlier starts have sealed."""
        self._finished: str | None = None
        """The session that the daemon of this VM would let begin."""
        self._job_start_id: str | None = None
        """The session, or what it became when the ranks went back together."""
        self._problem = f"they have not all come yet; {_INIT_FIRST}"
        self._is_hopeless = False
        """A rank has no daemon: nothing is gained by waiting."""
        self._number = 1
        """Of the round that this rank is in, or waits for."""
        self._under_way: Call | None = None
        self._heard: tuple[Call, float] | None = None
        """The last urgent call that the daemon of this VM has not made, and its deadline."""
        self._asked: set[str] = set()
        self._aliases: dict[str, list[str]] = {}
        """Requests that another one's round answers."""
        self._calling = threading.Lock()
        self._calls: JobStore | None = None
        """A connection for calling rounds; made before it is needed."""
        self._restores = 0
        self._telling: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="swansong-nodes", daemon=True)

    def start(self) -> None:
        """Meet the others, and listen; more than once does no harm."""
        if self._thread.ident is None:
            self._thread.start()

    def without_daemon(self) -> None:
        """This rank has no daemon: let the others know, if they can be reached; returns at once."""

        def tell() -> None:
            try:
                say_absent(self._open_store(), self._ranks.rank)
            except Exception as error:  # no store, or no torch: there is nobody to be told
                log.info("the other ranks cannot be told: %s", _first_line(error))

        self._telling = threading.Thread(target=tell, name="swansong-absent", daemon=True)
        self._telling.start()

    def close(self) -> None:
        """Take part in nothing any more; waits for the thread a moment."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        for thread in (self._thread, self._telling):
            is_begun = thread is not None and thread.ident is not None
            if thread is not None and is_begun and thread is not threading.current_thread():
                # A thread within torch at the very end of Python would take the process down with it.
                thread.join(1.0)

    def forked(self) -> None:
        """In the child of a fork, where the threads do not exist: be nothing."""
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._stop.set()

    # ------------------------------------------------------------ the daemon of this VM

    def asked(self, request: Request) -> None:
        """The daemon wants a checkpoint; returns at once."""
        with self._changed:
            is_news = request.id not in self._asked
            self._asked.add(request.id)
            under_way = self._under_way
            if under_way is not None and request.id in (under_way.id, *self._of(under_way.id)):
                is_news = False
        if self._agreement.say_again(request.id) or not is_news:
            return
        threading.Thread(
            target=self._call, args=(request,), name="swansong-call", daemon=True
        ).start()

    def connected(self) -> None:
        """There is a (new) connection to the daemon: say what it must know."""
        if self._job_start_id is not None:
            self._send(JobStart(self._job_start_id))
        elif self._met is not None:
            self._send(Finish(self._met))
        if self._heard is not None:
            call, deadline_mono_s = self._heard
            left_s = deadline_mono_s - time.monotonic()
            if left_s > 0:
                self._send(PeerRequest(call.id, call.reason, left_s))

    def finished(self, session: str) -> None:
        """The daemon of this VM has nothing more of earlier starts to commit."""
        with self._changed:
            self._finished = session
            self._changed.notify_all()

    def answer(self, message: Message) -> object:
        """Send the agreement's word to the daemon, also for the requests that it answers besides."""
        request_id = getattr(message, "request_id", "")
        for alias in self._of(request_id):
            self._send(dataclasses.replace(message, request_id=alias))  # type: ignore[call-arg]
        return self._send(message)

    def _of(self, request_id: str) -> list[str]:
        return self._aliases.get(request_id, [])

    # ------------------------------------------------------------ restore

    def restore(self, decide: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
        """What rank 0 has decided; the same for all ranks.

        Args:
            decide: called at rank 0 only, with the name of this start of the job.

        Raises:
            TimeoutError: the other ranks did not come, or rank 0 does not answer any more.
            Exception: the store failed.
        """
        session = self._session_within(GREETING_LIMIT_S, FINISH_LIMIT_S)
        self._restores += 1
        return self._decision(f"{session}/restore/{self._restores}", lambda _: decide(session))

    def go_back(
        self,
        number: int,
        at_step: int,
        before_step: int,
        decide: Callable[[int], dict[str, Any]],
    ) -> dict[str, Any]:
        """The ranks have come to go back together; what rank 0 has decided.  Nothing has begun yet.

        Args:
            number: how many-th time they do so.
            at_step: last step of this rank; all must have come after the same one.
            before_step: first step that this rank does not trust; the earliest one counts.
            decide: called at rank 0 only, with that.

        Raises:
            TimeoutError: the other ranks did not come, or rank 0 does not answer any more.
            Exception: the store failed.
        """
        key = f"{self._session_within(GREETING_LIMIT_S)}/back/{number}"
        everybody = [f"{key}/at/{rank}" for rank in range(self._ranks.world_size)]

        def decide_for_all(store: JobStore) -> dict[str, Any]:
            for name in everybody:
                if not await_key(store, name, self._stop, every_s=POLL_S, limit_s=COMING_LIMIT_S):
                    rank = name.rpartition("/")[2]
                    return {"error": f"rank {rank} has not called rollback() after step {at_step}"}
            said = [json.loads(value) for value in store.multi_get(everybody)]
            if len({step for step, _ in said}) > 1:
                steps = ", ".join(str(step) for step, _ in said)
                return {"error": f"the ranks have called rollback() after different steps: {steps}"}
            return decide(min(before for _, before in said))

        self._open_store().set(everybody[self._ranks.rank], json.dumps([at_step, before_step]))
        return self._decision(key, decide_for_all)

    def begin_anew(self, number: int) -> str:
        """The ranks have gone back so many times: the daemon goes on for another job start; its name."""
        self._job_start_id = f"{self._session}~{number}"
        self._send(JobStart(self._job_start_id))
        return self._job_start_id

    def _decision(self, key: str, decide: Callable[[JobStore], dict[str, Any]]) -> dict[str, Any]:
        store = self._open_store()
        if self._ranks.rank == 0:
            return self._decide(store, key, decide)
        heard_mono_s, beats = time.monotonic(), -1
        while not await_key(store, key, self._stop, every_s=POLL_S, limit_s=_BEAT_S):
            now_beats = store.add(f"{key}/beats", 0)
            if now_beats != beats:
                heard_mono_s, beats = time.monotonic(), now_beats
            elif time.monotonic() - heard_mono_s > GREETING_LIMIT_S:
                raise TimeoutError(f"rank 0 has not been heard of for {GREETING_LIMIT_S:.0f} s")
        return _object(store.get(key))

    def _decide(
        self, store: JobStore, key: str, decide: Callable[[JobStore], dict[str, Any]]
    ) -> dict[str, Any]:
        is_over = threading.Event()

        def beat() -> None:
            own = self._open_store()
            while not is_over.wait(_BEAT_S):
                own.add(f"{key}/beats", 1)

        threading.Thread(target=beat, name="swansong-beat", daemon=True).start()
        try:
            decision = decide(store)
        finally:
            is_over.set()
        store.set(key, json.dumps(decision))
        return decision

    def _session_within(self, limit_s: float, finish_limit_s: float = 0.0) -> str:
        """The session.

        Args:
            limit_s: longest wait for the other ranks.
            finish_limit_s: longest wait, after that, for the daemons of ranks that have met.
        """

        def is_over() -> bool:
            return bool(self._session) or self._is_hopeless or self._stop.is_set()

        give_up_mono_s = time.monotonic() + limit_s
        with self._changed:
            self._changed.wait_for(lambda: self._met or is_over(), limit_s)
            if self._met is not None:
                left_s = max(0.0, give_up_mono_s - time.monotonic())
                self._changed.wait_for(is_over, left_s + finish_limit_s)
            if self._session is None:
                raise TimeoutError(f"the ranks of the other VMs cannot be reached: {self._problem}")
            return self._session

    # ------------------------------------------------------------ calling a round

    def _call(self, request: Request) -> None:
        limit_s = min(AGREEMENT_LIMIT_S, max(0.0, request.seconds_left) / 10)
        asked_mono_s = time.monotonic()
        try:
            session = self._session_within(limit_s)
            with self._calling:
                if self._calls is None:
                    self._calls = self._open_store()
                self._call_round(self._calls, session, request, asked_mono_s)
        except Exception as error:  # a store that is away is a reason, whatever its type
            reason = f"the ranks of the other VMs cannot be asked: {_first_line(error)}"
            with self._changed:
                self._asked.discard(request.id)
            self._calls = None
            self._send(Declined(request.id, reason))

    def _call_round(
        self, store: JobStore, session: str, request: Request, asked_mono_s: float
    ) -> None:
        # All ranks of this VM are asked, and must mean the same round.
        wanted = store.compare_set(f"{session}/request/{request.id}", "", str(self._number))
        left_s = request.seconds_left - (time.monotonic() - asked_mono_s)
        call = Call(request.id, request.reason, left_s, request.urgency)
        text = json.dumps(dataclasses.asdict(call))
        number, made = int(wanted), None
        # A checkpoint without hurry does not do for an emergency.
        while made is None or request.urgency not in (made.urgency, "drain"):
            key = f"{session}/round/{number}/call"
            made = Call.decode(store.compare_set(key, "", text))
            number += 1
        if made.id != request.id:
            with self._changed:
                self._aliases.setdefault(made.id, []).append(request.id)
            self._agreement.say_again(made.id)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                store = self._open_store()
                if self._session is None:
                    self._meet(store)
                while not self._stop.is_set():
                    self._next_round(store)
            except Exception as error:
                problem = _first_line(error)
                self._problem = f"{problem}; {_INIT_FIRST}"
                log.info("the store of the job fails (%s); trying again", problem)
                self._stop.wait(_RETRY_S)

    def _meet(self, store: JobStore) -> None:
        if self._met is None:
            met = greet(
                store,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                nonce=secrets.token_hex(8),
                stop=self._stop,
                absent=self._without_daemon,
            )
            with self._changed:
                self._met, self._is_hopeless = met, False
                self._changed.notify_all()
        if self._met is None:
            return
        self._calls = self._open_store()
        self._finish(store, self._met)
        with self._changed:
            self._session = self._job_start_id = self._met
            self._changed.notify_all()
        self._send(JobStart(self._met))

    def _without_daemon(self, ranks: list[int]) -> None:
        with self._changed:
            self._problem = (
                f"the VMs of ranks {ranks} have no daemon that answers: start swansongd there, and then the"
                " job; without it those ranks would begin at step 0"
            )
            self._is_hopeless = True
            self._changed.notify_all()

    def _finish(self, store: JobStore, session: str) -> None:
        """Wait until no VM has anything of an earlier start to commit: the next claim fences it off."""
        give_up_mono_s = time.monotonic() + FINISH_LIMIT_S
        self._problem = "their daemons still commit what an earlier start has sealed"
        self._send(Finish(session))
        with self._changed:
            self._changed.wait_for(
                lambda: self._finished == session or self._stop.is_set(), FINISH_LIMIT_S
            )
        everybody = f"{session}/finished/all"
        if store.add(f"{session}/finished", 1) == self._ranks.world_size:
            store.set(everybody, "")
        limit_s = give_up_mono_s - time.monotonic()
        await_key(store, everybody, self._stop, every_s=self._poll_s, limit_s=limit_s)

    def _next_round(self, store: JobStore) -> None:
        key = f"{self._session}/round/{self._number}"
        if not await_key(store, f"{key}/call", self._stop, every_s=self._poll_s):
            return
        call = Call.decode(store.get(f"{key}/call"))
        heard_mono_s = time.monotonic()
        with self._changed:
            self._under_way = call
            is_ours = call.id in self._asked
        try:
            if not is_ours and call.urgency == "emergency":
                self._heard = (call, heard_mono_s + call.seconds_left)
                self._send(PeerRequest(call.id, call.reason, call.seconds_left))
            self._save_together(store, key, call)
        finally:
            with self._changed:
                self._under_way = None
                self._number += 1

    def _save_together(self, store: JobStore, key: str, call: Call) -> None:
        agreement = self._agreement
        step = agreement.request(Request(call.id, call.reason, call.seconds_left, call.urgency))
        limit_s = DECISION_PART * min(AGREEMENT_LIMIT_S, call.seconds_left / 10)
        try:
            decision = take_part(
                store,
                key,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                step=step,
                limit_s=limit_s,
                stop=self._stop,
            )
        except Exception as error:
            agreement.abort(call.id, f"the store of the job failed: {_first_line(error)}")
            raise
        if decision.target is None:
            agreement.abort(call.id, decision.reason)
            return
        self.answer(Agreed(call.id, decision.target))
        agreement.target(Target(call.id, decision.target))
        # The next round must not take this one's place.
        agreement.wait_over(call.id, call.seconds_left)


def _object(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data)
    return found


def _first_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:300]
