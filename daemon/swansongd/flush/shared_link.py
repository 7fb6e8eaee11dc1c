# SPDX-License-Identifier: Apache-2.0
"""The link of a VM with several daemons: bytes that a verdict waits for go first.

Each job of a VM has its own daemon.  The daemons never talk to each other, but share two kinds of lock files:

- A daemon locks ``link.lock`` while a verdict waits for bytes that it sends.  The others then yield, see
  :attr:`swansongd.core.state.State.must_yield`.  If several daemons need the link for a verdict, one of them
  holds the lock, none of them yields, and TCP shares the link.
- A daemon locks its run, from its start to its end.

The kernel releases the locks of a process that ends.  Only the daemons' user can open the files.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from swansong_bucket.errors import ConfigError
from swansong_bucket.util.threads import lasting_thread

from swansongd.core.events import Event, LinkShared
from swansongd.core.state import State
from swansongd.flush import limits

YIELD_S_MAX = 300.0
"""A lock that is held longer is ignored until its release: longer than the flushes before a verdict take."""
_LOOK_INTERVAL_S = 0.2
_LINGER_S = 1.0
"""A lock is held this much longer: files of a checkpoint that is being saved come one by one."""
_RETRY_S = 60.0
_LINK = "link.lock"

_log = structlog.get_logger(__name__)


def lock_run(directory: Path, run: str, store_url: str) -> None:
    """Lock a run of a store for this daemon, until the process ends.

    Raises:
        ConfigError: another daemon of this VM serves the run.
        OSError: the file cannot be created.
    """
    name = hashlib.sha256(f"{store_url}\n{run}".encode()).hexdigest()[:16]
    fd = _opened(directory / f"run-{name}.lock")
    if not _locks(fd, fcntl.LOCK_EX):
        os.close(fd)
        raise ConfigError(
            [f"run.name: another daemon of this VM serves this run in {store_url} (got {run!r})"],
            hint="stop that daemon, or choose another run.name",
        )


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _locks(fd: int, operation: int) -> bool:
    """Whether the lock could be taken without waiting."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class SharedLink:
    """Holds the lock of the link, and reports when another daemon holds it.

    Args:
        directory: the runtime directory of all daemons.
        state: returns the newest state of the decision loop.
        post: receives LinkShared.
        stop: ends the thread.
        monotonic: the clock.

    Raises:
        OSError: the lock file cannot be created.
    """

    def __init__(
        self,
        directory: Path,
        *,
        state: Callable[[], State],
        post: Callable[[Event], None],
        stop: threading.Event,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own_fd = _opened(directory / _LINK)
        # A look through the same descriptor would convert the lock.
        self._look_fd = _opened(directory / _LINK)
        self._state = state
        self._post = post
        self._stop = stop
        self._monotonic = monotonic
        self._holds = False
        self._needed_mono_s = -math.inf
        """When this daemon needed the link last."""
        self._taken_mono_s: float | None = None
        """Since when another daemon holds the lock."""
        self._yields = False

    def start(self) -> None:
        """Start the thread.  Returns immediately."""
        lasting_thread("shared-link", self._run).start()

    def look(self) -> None:
        """Take or release the lock, and post a change of the others' need.  Never blocks."""
        state, now_mono_s = self._state(), self._monotonic()
        if limits.needs_link(state):
            self._needed_mono_s = now_mono_s
        wants = now_mono_s - self._needed_mono_s < _LINGER_S
        if wants and not self._holds:
            # Another daemon holds it, or is just looking: the next look tries again.
            self._holds = _locks(self._own_fd, fcntl.LOCK_EX)
        elif self._holds and not wants:
            fcntl.flock(self._own_fd, fcntl.LOCK_UN)
            self._holds = False
        yields = not self._holds and not state.is_deciding and self._is_taken(now_mono_s)
        if yields is not self._yields:
            self._yields = yields
            _log.info("uploads_yield" if yields else "uploads_resume")
            self._post(LinkShared(yields))

    def _is_taken(self, now_mono_s: float) -> bool:
        """Whether another daemon holds the lock, and not for too long."""
        if _locks(self._look_fd, fcntl.LOCK_SH):
            fcntl.flock(self._look_fd, fcntl.LOCK_UN)
            self._taken_mono_s = None
            return False
        if self._taken_mono_s is None:
            self._taken_mono_s = now_mono_s
        return now_mono_s - self._taken_mono_s < YIELD_S_MAX

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_INTERVAL_S):
            try:
                self.look()
            except OSError as error:
                _log.warning("link_not_shared", reason=error.strerror)
                self._yields = False
                self._post(LinkShared(is_needed=False))
                self._stop.wait(_RETRY_S)
