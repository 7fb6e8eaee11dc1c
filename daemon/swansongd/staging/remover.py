# SPDX-License-Identifier: Apache-2.0
"""Removes sets from staging in a thread, so that no slow disk delays the decision loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog
from swansong_bucket.errors import StagingError
from swansong_bucket.util.threads import Worker

from swansongd.core.events import Prune, SetAside
from swansongd.staging import scan

_REMOVALS_MAX = 16

_log = structlog.get_logger(__name__)


class Remover:
    """Carries out :class:`SetAside` and :class:`Prune` one after another.

    Args:
        run_fd: the staging directory of the run.
        rescan: called after each removal.
    """

    def __init__(self, run_fd: int, rescan: Callable[[], None]) -> None:
        self._run_fd = run_fd
        self._rescan = rescan
        self._worker = Worker("prune", tasks_max=_REMOVALS_MAX)

    def start(self) -> None:
        """Start the thread; its first task is to remove leftovers of an earlier daemon."""
        self._worker.start()
        self._worker.submit(partial(scan.remove_leftovers, self._run_fd))

    def submit(self, action: SetAside | Prune) -> None:
        """Queue the removal, and return.  A full queue drops it: the next commit orders it again."""
        if isinstance(action, SetAside):
            task = partial(self._set_aside, action.directories)
        else:
            task = partial(self._prune, action.directories, keeps_aside=action.keeps_aside)
        if not self._worker.submit(task):
            sets = len(action.directories)
            _log.warning("not_pruned", sets=sets, error="the queue of removals is full")

    def _set_aside(self, directories: tuple[str, ...]) -> None:
        for directory in directories:
            try:
                scan.set_aside(self._run_fd, directory)
            except StagingError as error:
                _log.warning("not_set_aside", directory=directory, error=error.line())
            else:
                _log.info("set_aside", directory=directory)
        self._rescan()

    def _prune(self, directories: tuple[str, ...], *, keeps_aside: bool = False) -> None:
        refused: list[tuple[str, str]] = []
        scan.remove_leftovers(self._run_fd)  # of a removal that an error of the disk has ended
        if not keeps_aside:
            scan.remove_set_aside(self._run_fd)
        for directory in directories:
            try:
                scan.remove_set(self._run_fd, directory)
            except StagingError as error:
                refused.append((directory, error.line()))
            else:
                _log.info("pruned", directory=directory)
        if refused:
            # One line for all sets: a trainer can write-protect its sets, and each commit prunes them again.
            first, reason = refused[0]
            _log.warning("not_pruned", directory=first, sets=len(refused), error=reason)
        self._rescan()
