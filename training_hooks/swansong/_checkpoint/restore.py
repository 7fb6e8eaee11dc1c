# SPDX-License-Identifier: Apache-2.0
"""Asks the daemon for the newest whole checkpoint, and loads one rank's part of it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from swansong import openat, protocol
from swansong._checkpoint.staging import rank_directory
from swansong._daemon.trust import open_directory
from swansong._ranks.agreement import Ranks
from swansong._ranks.assembly import Assembly
from swansong.protocol import Message, RankManifest, Refused, Restored, RestoreQuery, Restoring
from swansong.state import Snapshots

PATIENCE_S = 120.0
"""How long a restore may go without any progress."""

log = logging.getLogger("swansong")


class RestoreError(Exception):
    """There is a checkpoint, but it cannot be restored.  To start from scratch would be worse."""


class RestoreClient:
    """One question at a time; the training loop waits for the answer, the thread brings it.

    Args:
        send: says something to the daemon, without waiting.
    """

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._query: RestoreQuery | None = None
        self._answer: Restored | None = None
        self._bytes_done = -1
        self._moved_mono_s = 0.0

    def ask(
        self,
        *,
        rollback: int = 0,
        before_step: int = -1,
        generation: int = -1,
        step: int = -1,
        job_start_id: str = "",
    ) -> Restored:
        """The daemon's answer; its ``path`` is empty for a fresh run.

        Args:
            rollback, before_step, generation, step, job_start_id: see
                :class:`swansong.protocol.RestoreQuery`.

        Raises:
            RestoreError: the daemon cannot restore, refuses us, or makes no progress any more.
        """
        with self._changed:
            self._answer = None
            self._query = RestoreQuery(
                secrets.token_hex(8), rollback, before_step, generation, step, job_start_id
            )
            self._moved_mono_s = time.monotonic()
            self._send(self._query)
            while self._answer is None:
                left_s = self._moved_mono_s + PATIENCE_S - time.monotonic()
                if left_s <= 0:
                    raise RestoreError(
                        f"the daemon has made no progress with the restore for {PATIENCE_S:.0f} s;"
                        " see: swansong status"
                    )
                self._changed.wait(left_s)
            self._query = None
        if self._answer.error:
            raise RestoreError(f"the daemon cannot restore: {self._answer.error}")
        return self._answer

    def remind(self) -> None:
        """Ask again after a reconnect."""
        with self._changed:
            if self._query is not None:
                self._send(self._query)

    def heard(self, message: Restoring | Restored | Refused) -> None:
        """What the daemon says to it."""
        with self._changed:
            if self._query is None:
                return
            if isinstance(message, Refused):
                self._answer = Restored(self._query.query_id, error=message.reason)
            elif message.query_id != self._query.query_id:
                return
            elif isinstance(message, Restored):
                self._answer = message
            elif message.bytes_done != self._bytes_done:
                self._bytes_done = message.bytes_done
                self._moved_mono_s = time.monotonic()
            self._changed.notify_all()


def where_to_go_on(client: RestoreClient, assembly: Assembly | None) -> Restored:
    """What the daemon of this VM has for us; over several VMs, what that of rank 0 has chosen for all.

    Raises:
        RestoreError: the ranks, or their daemons, cannot say it.
    """
    if assembly is None:
        return client.ask()
    chosen: list[Restored] = []

    def choose(session: str) -> dict[str, Any]:
        try:
            chosen.append(client.ask(job_start_id=session))
        except RestoreError as error:
            return {"error": f"rank 0: {error}"}
        return {"generation": chosen[0].generation, "step": chosen[0].step}

    choice = _agreed(lambda: assembly.restore(choose))
    if chosen:
        return chosen[0]
    if choice["generation"] < 0:
        return Restored("")  # a fresh run
    return client.ask(generation=choice["generation"], step=choice["step"])


def where_to_go_back(
    client: RestoreClient,
    assembly: Assembly | None,
    *,
    number: int,
    at_step: int,
    before_step: int,
) -> Restored:
    """The newest healthy checkpoint; over several VMs, the one that the daemon of rank 0 has chosen.

    Args:
        number: how many-th time this process goes back.
        at_step: last step of this rank.
        before_step: first step that it does not trust.

    Raises:
        RestoreError: there is none, or the ranks, or their daemons, cannot say it.
    """
    if assembly is None:
        return _found(client.ask(rollback=number, before_step=before_step))

    def choose(before_step: int) -> dict[str, Any]:
        try:
            found = _found(client.ask(rollback=number, before_step=before_step))
        except RestoreError as error:
            return {"error": f"rank 0: {error}"}
        return {"generation": found.generation, "step": found.step}

    choice = _agreed(lambda: assembly.go_back(number, at_step, before_step, choose))
    # Each daemon ends what it did for the steps that count no more before it answers.
    job_start_id = assembly.begin_anew(number)
    return _found(
        client.ask(generation=choice["generation"], step=choice["step"], job_start_id=job_start_id)
    )


def _found(answer: Restored) -> Restored:
    if not answer.path:
        raise RestoreError("the run has no healthy checkpoint to go back to")
    return answer


def _agreed(choice: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        made = choice()
    except Exception as error:  # of the job's store, whatever its type
        raise RestoreError(f"the ranks cannot agree on a checkpoint: {error}") from error
    if "error" in made:
        raise RestoreError(made["error"])
    return made


def load_checkpoint(
    directory: str,
    ranks: Ranks,
    state: Snapshots,
    *,
    wanted_step: int | None = None,
    owners: Collection[int] | None = None,
) -> int:
    """Load this rank's part of a checkpoint.

    Args:
        directory: as it lay in staging: with a manifest for each rank.
        ranks: the job as it is now; must be as large as the one that saved, unless ``state`` reads
            whole sets.
        state: loads it.
        wanted_step: the step that it must be of, if that is known.
        owners: of a directory that the daemon named: user ids that all of it must belong to, and links are
            refused.  None for one that the trainer's user chose.

    Returns:
        Its number of completed steps.

    Raises:
        RestoreError: whatever is wrong, naming the directory.
    """
    try:
        with _opened(directory, owners) as directory_fd:
            if state.reads_whole_set:
                manifest = _check_part(directory_fd, 0, wanted_step, owners)
                for rank in range(1, manifest.world_size):
                    _check_part(directory_fd, rank, manifest.step, owners)
                part = Path(directory)
            else:
                manifest = _check_part(directory_fd, ranks.rank, wanted_step, owners)
                if manifest.world_size != ranks.world_size:
                    raise ValueError(
                        f"{manifest.world_size} ranks saved it, and {ranks.world_size} are here now"
                    )
                part = Path(directory, rank_directory(ranks.rank))
        state.load(part)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise RestoreError(
            f"cannot restore rank {ranks.rank} from {directory}: {reason}"
        ) from error
    log.info("restored step %s from %s", manifest.step, directory)
    return manifest.step


def _check_part(
    directory_fd: int, rank: int, wanted_step: int | None, owners: Collection[int] | None
) -> RankManifest:
    name = protocol.rank_manifest_name(rank)
    with _opened_file(directory_fd, name, owners) as file:
        manifest = RankManifest.decode(file.read(protocol.RANK_MANIFEST_MAX_BYTES + 1))
    if wanted_step not in (None, manifest.step):
        raise ValueError(f"{name} is of step {manifest.step}, not of step {wanted_step}")
    for entry in manifest.files:
        with _opened_file(directory_fd, entry.path, owners) as file:
            size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != entry.size_bytes:
            raise ValueError(f"{entry.path} has {size_bytes} bytes, not {entry.size_bytes}")
    return manifest


@contextlib.contextmanager
def _opened(directory: str, owners: Collection[int] | None) -> Iterator[int]:
    if owners is None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    else:
        fd = open_directory(directory, owners)
    try:
        yield fd
    finally:
        os.close(fd)


def _opened_file(directory_fd: int, path: str, owners: Collection[int] | None) -> BinaryIO:
    """Open a file of a checkpoint; with ``owners`` one component at a time, following no link."""
    if owners is None:
        fd = os.open(path, openat.FILE & ~os.O_NOFOLLOW, dir_fd=directory_fd)
        return os.fdopen(fd, "rb")
    *parents, name = path.split("/")
    with contextlib.ExitStack() as stack:
        for parent in parents:
            directory_fd = openat.open_directory(parent, dir_fd=directory_fd, owners=owners)
            stack.callback(os.close, directory_fd)
        return os.fdopen(openat.open_file(name, dir_fd=directory_fd, owners=owners), "rb")
