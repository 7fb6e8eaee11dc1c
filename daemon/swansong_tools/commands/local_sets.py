# SPDX-License-Identifier: Apache-2.0
"""Sealed sets in staging, for commands that run without the daemon.

The restore unit must choose the same checkpoint as the daemon, so it uses the same scan, the same record of
starts and the same rule.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from swansong_bucket.errors import StagingError
from swansong_bucket.model import CommitRef, Staged
from swansongd.config.config import Config
from swansongd.core import machine, resume
from swansongd.core.state import CommitState, Settings, StartState, State
from swansongd.flush.claim_record import read_record
from swansongd.staging.scan import OWN_DIRECTORY
from swansongd.staging.seal import Scanner
from swansongd.trainers import users
from swansongd.util.boot import boot_id, booted_wall_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSets:
    """The sets in staging that concern a restore."""

    newest: Staged | None = None
    """The newest set; None if the newest whole commit is newer."""
    path: Path = Path()
    """Directory of that set."""
    unordered: str = ""
    """A set that may be newer, and why it is not taken; empty without one."""


def find(config: Config, store_url: str, newest: CommitRef | None) -> LocalSets:
    """The newest sealed set in staging, by the record of starts.

    Args:
        store_url: of the configured store.
        newest: the newest whole commit of the run.

    Raises:
        ConfigError: a user of ``trainer.users`` does not exist.
        StagingError: staging belongs to another user than that of this process, or cannot be read.
    """
    run_directory = config.staging.path / config.run.name
    own = run_directory / OWN_DIRECTORY
    try:
        if not run_directory.is_dir():
            return LocalSets()
        owner = own.stat().st_uid if own.is_dir() else os.geteuid()
        if owner != os.geteuid():
            raise StagingError(
                f"{own} belongs to user id {owner}",
                hint=f"Run the command as that user: sudo -u '#{owner}' swansong ...",
            )
        record = read_record(own, config.run.name, store_url)
        scanner = Scanner(
            run_directory,
            allowed_uids=users.may_connect(users.uids_of(config.trainer.users)),
            settle_s=0.0,  # one scan cannot observe whether files still grow
            monotonic=time.monotonic,
        )
        scanned = scanner.scan()
    except OSError as error:
        raise StagingError(f"{run_directory} cannot be read: {error.strerror}") from error
    settings = Settings(
        reserve_s=config.deadline.reserve_s,
        signals_trainer=False,
        boot_id=boot_id(),
        booted_wall_ns=booted_wall_ns(),
    )
    state = State(
        settings=settings,
        starts=StartState(known=record.known_starts(boot_id())),
        commits=CommitState(last_complete=newest),
    )
    state, _ = machine.step(state, scanned, time.monotonic())
    found = resume.newest_local(state, newest)
    return LocalSets(
        newest=found,
        path=run_directory / (found.directory if found is not None else ""),
        unordered=_unordered(state, newest if found is None else state.ref_of(found.id)),
    )


def _unordered(state: State, chosen: CommitRef | None) -> str:
    """The set of the greatest step above the chosen checkpoint whose order or state is unknown."""
    step = -1 if chosen is None else chosen.step
    unusable = state.staging.unusable
    doubtful = (s for s in state.staging.staged if s.id in unusable or state.ref_of(s.id) is None)
    found = max((s for s in doubtful if s.nodes == 1 and s.id.step > step), key=_step, default=None)
    if found is None:
        return ""
    reason = "the record of starts in staging does not name the start that wrote it"
    if max((file.mtime_ns for file in found.files), default=0) < state.settings.booted_wall_ns:
        reason = "it was written before this VM booted, and may be torn"
    return f"{found.directory} in staging is not restored, although it may be newer: {reason}"


def _step(staged: Staged) -> int:
    return staged.id.step
