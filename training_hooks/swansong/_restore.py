# SPDX-License-Identifier: Apache-2.0
"""Asks the daemon for the newest whole checkpoint, and loads one rank's part of it."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from swansong import protocol
from swansong._agree import Ranks
from swansong._staging import rank_directory
from swansong.protocol import Message, RankManifest, Refused, Restored, RestoreQuery, Restoring

PATIENCE_S = 120.0
"""How long a restore may go without any progress."""

log = logging.getLogger("swansong")


class RestoreError(Exception):
    """There is a checkpoint, but it cannot be restored.  To start from scratch would be worse."""


class RestoreDialogue:
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

    def ask(self) -> Restored:
        """The daemon's answer; its ``path`` is empty for a fresh run.

        Raises:
            RestoreError: the daemon cannot restore, refuses us, or makes no progress any more.
        """
        with self._changed:
            self._answer = None
            self._query = RestoreQuery(secrets.token_hex(8))
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


def load_checkpoint(
    directory: str, ranks: Ranks, load: Callable[[Path], object], *, wanted_step: int | None = None
) -> int:
    """Load this rank's part of a checkpoint.

    Args:
        directory: as it lay in staging: with a manifest for each rank.
        ranks: the job as it is now; must be as large as the one that saved.
        load: reads the rank's files from the directory given.
        wanted_step: the step that it must be of, if that is known.

    Returns:
        Its number of completed steps.

    Raises:
        RestoreError: whatever is wrong, naming the directory.
    """
    try:
        name = protocol.rank_manifest_name(ranks.rank)
        manifest = RankManifest.decode(Path(directory, name).read_bytes())
        if manifest.world_size != ranks.world_size:
            raise ValueError(
                f"{manifest.world_size} ranks saved it, and {ranks.world_size} are here now"
            )
        if wanted_step not in (None, manifest.step):
            raise ValueError(f"it is of step {manifest.step}, not of step {wanted_step}")
        for file in manifest.files:
            size_bytes = Path(directory, file.path).stat().st_size
            if size_bytes != file.size_bytes:
                raise ValueError(f"{file.path} has {size_bytes} bytes, not {file.size_bytes}")
        load(Path(directory, rank_directory(ranks.rank)))
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise RestoreError(
            f"cannot restore rank {ranks.rank} from {directory}: {reason}"
        ) from error
    log.info("restored step %s from %s", manifest.step, directory)
    return manifest.step
