# SPDX-License-Identifier: Apache-2.0
"""Asks the daemon for a checkpoint, together with the other ranks of the job."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from swansong import protocol
from swansong._checkpoint.load import RestoreError, lacks
from swansong._log import log
from swansong._ranks.choice import Choice, Outcome, RestoreChoice
from swansong._ranks.start import TrainingStart
from swansong.rank_files import Arrivals

PATIENCE_S = 120.0
"""Longest time of a restore without any progress, and of its wait for the id of the start."""

CONFIRM_EVERY_S = 0.02
"""Shortest time between two confirmations of shards; the daemon refuses peers that send too many messages."""

REPORT_EVERY_S = 5.0
"""Time between two lines about the progress of a restore."""


class DamagedError(RestoreError):
    """The checkpoint that rank 0 has chosen is damaged; an older one may be whole."""


class RestoreClient:
    """Asks the daemon for one checkpoint at a time: the training loop waits, the channel's thread answers.

    Args:
        send: sends a message to the daemon, without blocking.
        start: that this rank belongs to; a rollback begins the next one.
        choice: of the ranks of a job over several VMs, which all load what rank 0 has chosen; None on one VM.
    """

    def __init__(
        self,
        send: Callable[[protocol.Message], object],
        start: TrainingStart,
        choice: RestoreChoice | None = None,
    ) -> None:
        self._send = send
        self._start = start
        self._choice = choice
        self._changed = threading.Condition()
        self._query: protocol.RestoreQuery | None = None
        self._answer: protocol.Restored | None = None
        self._bytes_done = -1
        self._waits_for = ""
        self._progress_mono_s = self._reported_mono_s = 0.0
        self._arrived: deque[tuple[protocol.ShardVerified, int]] = deque()

    def find_newest(
        self, arrivals: Arrivals | None = None, owners: Collection[int] | None = None
    ) -> protocol.Restored:
        """Return the newest whole checkpoint; its ``path`` is empty for a fresh run.

        A job over several VMs gets the files that its VM reads.  If that is not enough, for example because
        another number of ranks saved the checkpoint, this asks again, for all files of the same checkpoint.

        Args:
            arrivals: loads files of the checkpoint while the daemon fetches the others.
            owners: user ids that the directory and its files may belong to.

        Raises:
            RestoreError: the ranks cannot agree, rank 0 is not connected, or the daemon cannot restore,
                refuses or makes no progress.
        """
        if self._choice is None:
            self._wait_for_start()
            return self._completed(self._ask(arrivals), arrivals, owners)
        found = protocol.Restored("")  # a fresh run

        def choose(refused: Choice | None) -> Choice:
            nonlocal found
            try:
                found = self._ask_first(arrivals, **(refused or {}))
            except RestoreError as error:
                return {"error": f"rank 0: {error}"}
            return _named(found)

        def fetch(choice: Choice) -> Outcome:
            nonlocal found
            try:
                if _named(found) != choice:
                    found = self._ask_first(arrivals, **choice)
                found = self._completed(found, arrivals, owners)
            except DamagedError as error:
                return {"damaged": str(error)}
            except RestoreError as error:
                return {"error": str(error)}
            return {}

        _agreed(partial(self._choice.for_resume, choose, fetch))
        return found

    def _ask_first(self, arrivals: Arrivals | None, **query: Any) -> protocol.Restored:
        """Ask, and forget the files of a checkpoint that the ranks have refused."""
        if arrivals is not None:
            arrivals.clear()
        return self._ask(arrivals, **query)

    def _completed(
        self, answer: protocol.Restored, arrivals: Arrivals | None, owners: Collection[int] | None
    ) -> protocol.Restored:
        """Ask for all files of the same checkpoint if this rank reads others than it has named."""
        if (
            arrivals is None
            or not answer.path
            or not lacks(answer.path, answer.step, arrivals, owners)
        ):
            return answer
        is_whole = self._choice is None or not arrivals.prefixes
        arrivals.read_all()
        if is_whole:
            return answer
        log.info("restoring: this rank reads the files of all ranks")
        return self._ask(arrivals, **_named(answer))

    def find_healthy(self, *, at_step: int, before_step: int) -> protocol.Restored:
        """Return the newest healthy checkpoint, and begin the start that is to load it.

        Args:
            at_step: last step of this rank.
            before_step: first step that this rank does not trust.

        Raises:
            RestoreError: no checkpoint is healthy, or as for :meth:`find_newest`.
        """
        number = self._start.count()
        if self._choice is None:
            self._wait_for_start()
            self._start.begin(number)
            return _healthy(self._ask(rollback=number, before_step=before_step))

        def choose(before_step: int) -> Choice:
            try:
                found = _healthy(self._ask(rollback=number, before_step=before_step))
            except RestoreError as error:
                return {"error": f"rank 0: {error}"}
            return _named(found)

        rolled_back = partial(self._choice.for_rollback, number, at_step, before_step, choose)
        choice = _agreed(rolled_back)
        # Each daemon drops its work on the later steps before it answers for the new start.
        self._start.begin(number)
        return _healthy(self._ask(**choice))

    def resend(self) -> None:
        """Repeat the query after a reconnect."""
        with self._changed:
            if self._query is not None:
                self._send(self._query)

    def receive(self, message: protocol.Restoring | protocol.Restored | protocol.Refused) -> None:
        """Take an answer, or a report of progress, from the daemon."""
        with self._changed:
            if self._query is None:
                return
            if isinstance(message, protocol.Refused):
                self._answer = protocol.Restored(self._query.query_id, error=message.reason)
            elif message.query_id != self._query.query_id:
                return
            elif isinstance(message, protocol.Restored):
                self._answer = message
            elif message.waits_for or message.bytes_done != self._bytes_done:
                self._bytes_done = message.bytes_done
                self._progress_mono_s = time.monotonic()
                self._report(message)
            self._changed.notify_all()

    def receive_shard(self, message: protocol.ShardVerified, fd: int) -> None:
        """Take a file that the daemon has verified, and its descriptor; the training loop loads it."""
        with self._changed:
            if self._query is not None and message.query_id == self._query.query_id:
                self._arrived.append((message, fd))
                self._progress_mono_s = time.monotonic()
                self._changed.notify_all()
            elif fd >= 0:
                os.close(fd)

    def _report(self, message: protocol.Restoring) -> None:
        if message.waits_for:
            if message.waits_for != self._waits_for:  # once: it may last for hours
                self._waits_for = message.waits_for
                log.warning("restore waits for %s", message.waits_for)
        elif self._progress_mono_s - self._reported_mono_s >= REPORT_EVERY_S:
            self._reported_mono_s = self._progress_mono_s
            log.info(
                "restoring: the daemon has fetched %.1f of %.1f GB",
                message.bytes_done / 1e9,
                message.bytes_total / 1e9,
            )

    def _ask(self, arrivals: Arrivals | None = None, **fields: Any) -> protocol.Restored:
        """Send a :class:`swansong.protocol.RestoreQuery` with these fields, and wait for the answer."""
        query = protocol.RestoreQuery(
            secrets.token_hex(8),
            **fields,
            start_id=self._start.id,
            prefixes=[] if arrivals is None or self._choice is None else list(arrivals.prefixes),
            takes_shards=arrivals is not None,
        )
        with self._changed:
            self._answer = None
            self._query = query
            self._progress_mono_s = self._reported_mono_s = time.monotonic()
            self._send(query)
        try:
            answer, download = self._wait(query.query_id, arrivals)
        finally:
            with self._changed:
                self._query = None
            while self._arrived:
                _, fd = self._arrived.popleft()
                if fd >= 0:
                    os.close(fd)
        if answer.error:
            kind = DamagedError if answer.is_damaged else RestoreError
            raise kind(f"the daemon cannot restore: {answer.error}")
        if arrivals is not None and download and answer.download != download:
            arrivals.clear()
            if not answer.path:
                raise RestoreError(
                    "restore failed: the daemon reports a fresh run after it has sent a checkpoint"
                )
        return answer

    def _wait(self, query_id: str, arrivals: Arrivals | None) -> tuple[protocol.Restored, str]:
        """Return the answer, and the download whose files were loaded meanwhile; empty without one."""
        download, taken, confirmed_mono_s = "", 0, 0.0
        while True:
            with self._changed:
                if self._answer is not None:
                    return self._answer, download
                if not self._arrived:
                    self._wait_for_news()
                    continue
            while self._arrived and self._answer is None and arrivals is not None:
                message, fd = self._arrived.popleft()
                if message.download != download:
                    if download:
                        arrivals.clear()
                    download, taken = message.download, 0
                arrivals.take(message.path, fd)
                taken += 1
            time.sleep(max(0.0, confirmed_mono_s + CONFIRM_EVERY_S - time.monotonic()))
            confirmed_mono_s = time.monotonic()
            self._send(protocol.ShardsTaken(query_id, download, taken))

    def _wait_for_start(self) -> None:
        try:
            self._start.wait(PATIENCE_S)
        except TimeoutError as error:
            raise RestoreError(f"restore failed: {error}") from error

    def _wait_for_news(self) -> None:
        left_s = self._progress_mono_s + PATIENCE_S - time.monotonic()
        if left_s <= 0:
            raise RestoreError(
                f"restore failed: the daemon made no progress for {PATIENCE_S:.0f} s; see"
                " swansong status"
            )
        self._changed.wait(left_s)


def _named(answer: protocol.Restored) -> Choice:
    return {"generation": answer.generation, "step": answer.step}


def _healthy(answer: protocol.Restored) -> protocol.Restored:
    if not answer.path:
        raise RestoreError("rollback failed: the run has no healthy checkpoint")
    return answer


def _agreed(ask: Callable[[], Choice]) -> Choice:
    try:
        choice = ask()
    except Exception as error:  # the job's store raises errors of many types
        raise RestoreError(f"the ranks cannot agree on a checkpoint: {error}") from error
    if "error" in choice:
        raise RestoreError(choice["error"])
    return choice
