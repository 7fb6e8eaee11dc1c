# SPDX-License-Identifier: Apache-2.0
"""Loads this rank's part of a checkpoint from a local directory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from swansong import layout, openat
from swansong._log import log
from swansong._ranks.agreement import Ranks
from swansong._ranks.position import own_process
from swansong.layout import RankManifest
from swansong.rank_files import Arrivals, Snapshots


class RestoreError(Exception):
    """A checkpoint exists but cannot be restored.  Training must not start from step 0 instead."""


def load_checkpoint(
    directory: str,
    ranks: Ranks,
    state: Snapshots,
    *,
    wanted_step: int | None = None,
    owners: Collection[int] | None = None,
    reads: Collection[int] = (),
    fetch_s: float = 0.0,
    age_s: float | None = None,
) -> RankManifest:
    """Load this rank's part of a checkpoint.

    Args:
        directory: of the checkpoint, with a rank manifest for each rank.
        ranks: position of this process.  The job must have as many ranks as the one that saved, unless
            ``state`` reads whole sets.
        state: the objects to load.
        wanted_step: step that the checkpoint must have; None accepts any step.
        owners: user ids that the directory and its files may belong to; links are refused.  None for a
            directory that the trainer's user named, without these checks.
        reads: the only ranks whose files ``state`` reads; empty: all, if it reads whole sets.
        fetch_s: time that the daemon took to provide the directory, for the log.
        age_s: time since the checkpoint was saved, for the log; None if it is unknown.

    Returns:
        Manifest of one of the parts that were read.

    Raises:
        RestoreError: the checkpoint is incomplete, does not fit, or cannot be read; names the directory.
    """
    begun_mono_s = time.monotonic()
    try:
        with openat.held(_open(directory, owners)) as directory_fd:
            if state.reads_whole_set:
                first, *others = sorted(reads) or [0]
                manifest = _check_part(directory_fd, first, wanted_step, owners)
                for rank in others if reads else range(1, manifest.world_size):
                    _check_part(directory_fd, rank, manifest.step, owners)
                part = Path(directory)
            else:
                manifest = _check_part(directory_fd, ranks.rank, wanted_step, owners)
                if manifest.world_size != ranks.world_size:
                    raise ValueError(
                        f"{manifest.world_size} ranks saved it, and this job has {ranks.world_size}"
                    )
                part = Path(directory, layout.rank_directory(ranks.rank))
        state.load(part)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise RestoreError(
            f"cannot restore rank {ranks.rank} from {directory}: {reason}"
        ) from error
    load_s = time.monotonic() - begun_mono_s
    shares = [("fetch", fetch_s)] if fetch_s else []
    if state.read_s:
        read_s = min(state.read_s, load_s)
        shares += [("read and verify", read_s)]
        load_s -= read_s
    shares += [("load", load_s)]
    process_s = _process_s()
    # A warning, because lower levels are not shown by default: it says whether training was resumed.
    log.warning(
        "restored step %s (%.1f MB%s) from %s in %.1f s: %s%s",
        manifest.step,
        sum(entry.size_bytes for entry in manifest.files) / 1e6,
        "" if age_s is None else f", {age_s:.0f} s old",
        directory,
        sum(seconds for _, seconds in shares),
        ", ".join(f"{name} {seconds:.1f} s" for name, seconds in shares),
        "" if process_s is None else f"; this process started {process_s:.1f} s ago",
    )
    return manifest


def _process_s() -> float | None:
    """Return the time since this process started; None if the system does not report it."""
    try:
        started_s = int(own_process()["began_ticks"]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError, ValueError, KeyError):
        return None


def lacks(directory: str, step: int, arrivals: Arrivals, owners: Collection[int] | None) -> bool:
    """Whether a rank must read files of other ranks than it has named."""
    if not arrivals.reads:
        return False
    try:
        with openat.held(_open(directory, owners)) as directory_fd:
            for rank in arrivals.reads:
                _check_part(directory_fd, rank, step, owners)
        return arrivals.lacks(Path(directory))
    except Exception as error:  # the load from all files raises it again
        log.debug("%s lacks files: %s: %s", directory, type(error).__name__, error)
        return True


def _check_part(
    directory_fd: int, rank: int, wanted_step: int | None, owners: Collection[int] | None
) -> RankManifest:
    name = layout.rank_manifest_name(rank)
    with _opened_file(directory_fd, name, owners) as file:
        manifest = RankManifest.decode(file.read(layout.RANK_MANIFEST_MAX_BYTES + 1))
    if manifest.rank != rank:
        raise ValueError(f"{name} is of rank {manifest.rank}")
    if wanted_step not in (None, manifest.step):
        raise ValueError(f"{name} is of step {manifest.step}, not of step {wanted_step}")
    for entry in manifest.files:
        with _opened_file(directory_fd, entry.path, owners) as file:
            size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != entry.size_bytes:
            raise ValueError(f"{entry.path} has {size_bytes} bytes, not {entry.size_bytes}")
    return manifest


def _open(directory: str, owners: Collection[int] | None) -> int:
    if owners is None:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return openat.open_absolute(directory, owners=owners)


def _opened_file(directory_fd: int, path: str, owners: Collection[int] | None) -> BinaryIO:
    """Open a file of a checkpoint; with ``owners`` component by component, without following links."""
    if owners is None:
        fd = os.open(path, openat.FILE & ~os.O_NOFOLLOW, dir_fd=directory_fd)
        return os.fdopen(fd, "rb")
    *parents, name = path.split("/")
    with contextlib.ExitStack() as stack:
        for parent in parents:
            parent_fd = openat.open_directory(parent, dir_fd=directory_fd, owners=owners)
            directory_fd = stack.enter_context(openat.held(parent_fd))
        return os.fdopen(openat.open_file(name, dir_fd=directory_fd, owners=owners), "rb")
