# SPDX-License-Identifier: Apache-2.0
"""The directory that a command writes to, or that becomes a link to a checkpoint on this VM."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from swansong_bucket.config.values import directory_of
from swansong_bucket.errors import StagingError
from swansongd.config.config import Config, look_up

from swansong_tools.commands.common import print_json
from swansong_tools.units import human_bytes


def resolved(directory: str, config: Config) -> Path:
    """The path of ``--to``: links above it are resolved, and from it on no link is followed.

    Raises:
        StagingError: it lies in a directory of the store, or in the one where trainers save.
    """
    absolute = os.path.abspath(directory)
    path = Path(os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute))
    for key, place in (
        ("store.url", directory_of(config.store.url)),
        ("mirror.url", directory_of(config.mirror.url)),
        ("staging.path", config.staging.path / config.run.name),
    ):
        if place is not None and path.is_relative_to(look_up(place)[0]):
            raise StagingError(
                f"--to: {path} lies in {place}, a directory of {key}",
                hint="Choose a directory outside it",
            )
    return path


def link(destination: Path, path: Path, facts: dict[str, object], *, as_json: bool) -> None:
    """Replace the destination by a link to a checkpoint on this VM, and report it."""
    try:
        with suppress(FileNotFoundError):
            os.rmdir(destination)  # an empty directory is replaced, as by a download
        os.symlink(path, destination)
        size_bytes = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    except OSError as error:
        raise StagingError(
            f"linking {destination} to {path} failed: {error.strerror}",
            hint="Name a directory that is empty or does not exist",
        ) from error
    if as_json:
        sizes = {"size_bytes": size_bytes, "reused_bytes": size_bytes}
        print_json({"skipped": [], **facts, "path": str(destination), **sizes})
    else:
        print(
            f"step {facts['step']} of run {facts['run']} is on this VM: {human_bytes(size_bytes)}; "
            f"{destination} links to {path}"
        )


def report_fresh(facts: dict[str, object], *, as_json: bool) -> None:
    """Report that the run has no commit yet."""
    if as_json:
        nothing = {"generation": None, "step": None, "path": None}
        print_json({"skipped": [], **facts, **nothing, "size_bytes": 0, "reused_bytes": 0})
    else:
        print(f"nothing to restore: run {facts['run']} has no commit yet")
