# SPDX-License-Identifier: Apache-2.0
"""Sealed sets in staging as the daemon sees them, for a command that runs beside it or before it.

The restore unit runs before the trainer, and so before the daemon.  It must choose the checkpoint that the
daemon would choose: the same scan, the same record of what was abandoned, the same rule.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from swansongd.config.config import Config
from swansongd.core import machine, resume
from swansongd.core.state import Settings, State
from swansongd.errors import StagingError
from swansongd.flush.claim_record import read_record
from swansongd.model import CommitRef, Staged
from swansongd.staging.scan import OWN_DIRECTORY, booted_wall_ns
from swansongd.staging.seal import Scanner
from swansongd.trainers import users


def newest_local(
    config: Config, store_url: str, newest: CommitRef | None
) -> tuple[Staged, Path] | None:
    """The sealed set in staging that is as new as the newest whole commit, or newer, and its path.

    Args:
        store_url: of the configured store.
        newest: the newest whole commit of the run.

    Raises:
        ConfigError: a user of ``trainer.users`` does not exist.
        StagingError: staging belongs to another user than the one that asks, or cannot be read.
    """
    run_directory = config.staging.path / config.run.name
    if config.run.several_vms or not run_directory.is_dir():
        return None  # a part of a checkpoint is not enough
    own = run_directory / OWN_DIRECTORY
    try:
        owner = own.stat().st_uid if own.is_dir() else os.geteuid()
        if owner != os.geteuid():
            raise StagingError(
                f"{own} belongs to user id {owner}",
                hint=f"Run the command as that user: sudo -u '#{owner}' swansong ...",
            )
        record = read_record(own, config.run.name, store_url)
        scanner = Scanner(
            run_directory,
            allowed_uids=users.may_speak(users.uids_of(config.trainer.users)),
            settle_s=0.0,  # the daemon is not here to see it grow
            monotonic=time.monotonic,
        )
        scanned = scanner.scan()
    except OSError as error:
        raise StagingError(f"{run_directory} cannot be read: {error.strerror}") from error
    abandoned = frozenset(record.abandoned)
    settings = Settings(
        reserve_s=config.deadline.reserve_s,
        signals_trainer=False,
        sealed_under=record.generation or None,
        booted_wall_ns=booted_wall_ns(),
    )
    state = State(settings=settings, abandoned=abandoned, unusable=abandoned, last_commit=newest)
    state, _ = machine.step(state, scanned, time.monotonic())
    found = resume.newest_local(state, newest)
    return None if found is None else (found, run_directory / found.directory)
