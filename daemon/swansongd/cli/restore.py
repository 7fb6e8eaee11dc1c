# SPDX-License-Identifier: Apache-2.0
"""``swansong restore``: fetch the newest whole commit of a run to a directory.

After an interruption the fetched bytes stay on disk, and the same command resumes from there.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from swansongd.bucket.commit import newest_whole_commit
from swansongd.cli.common import (
    add_json,
    add_run,
    add_step,
    generation,
    human_bytes,
    note,
    print_json,
)
from swansongd.cli.opening import opened
from swansongd.cli.progress import ShownProgress
from swansongd.errors import ConfigError, NothingToRestore, StagingError
from swansongd.model import CommitRef, Staged
from swansongd.restore.local_sets import newest_local
from swansongd.restore.reader import ReadOptions
from swansongd.restore.restore import Selection, Wanted, healthy, restore
from swansongd.restore.target import RestoreTarget

EXAMPLES = {
    "Fetch the newest whole commit.": "swansong restore --to /mnt/resume",
    "Fetch the commit of one step, after a rollback for example.": (
        "swansong restore --to /mnt/resume --step 12000"
    ),
    "Start a trainer at boot, also in a run that has no commit yet.": (
        "swansong restore --to /mnt/resume --local --fresh-ok"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_step(parser)
    parser.add_argument(
        "--to",
        required=True,
        metavar="DIR",
        help="target directory; must be empty or not exist",
    )
    parser.add_argument(
        "--healthy",
        action="store_true",
        help="restore only a commit that is known to have a finite loss",
    )
    parser.add_argument(
        "--fresh-ok",
        action="store_true",
        help="exit with 0 instead of 17 if the run has no commit yet",
    )
    parser.add_argument(
        "--local",
        action="store_true",
        help="prefer a sealed checkpoint in this VM's staging directory if the store has no newer one; "
        "DIR becomes a link to it",
    )
    parser.add_argument(
        "--generation",
        type=generation,
        metavar="N",
        help="restore only a commit of this generation",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    # Links above the destination are resolved here.  From the destination on, no link is followed.
    absolute = os.path.abspath(args.to)
    destination = Path(os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute))
    skipped: list[dict[str, object]] = []

    def on_skipped(ref: CommitRef, reason: str) -> None:
        skipped.append({"generation": ref.generation, "step": ref.step, "reason": reason})
        note(f"skipped {ref}: {reason}")

    if args.local and (args.step is not None or args.generation is not None or args.healthy):
        raise ConfigError(
            [
                "--local always takes the newest checkpoint; remove --step, --generation and --healthy"
            ]
        )
    began_mono_s = time.monotonic()
    with opened(args) as here, ShownProgress("restore") as progress:
        run_name = here.keys.run
        if args.local and run_name == here.config.run.name:
            newest = newest_whole_commit(here.store, here.keys)
            local = newest_local(here.config, here.store.url, newest)
            if local is not None:
                return _linked(args, run_name, *local, destination)
        try:
            restored = restore(
                here.store,
                here.keys,
                RestoreTarget(destination),
                Selection(step=args.step, wanted=_wanted(args), skipped=on_skipped),
                ReadOptions(connections=here.connections, progress=progress, stop=here.stop),
            )
        except NothingToRestore as error:
            # Only a run that never committed is fresh.  Damaged or missing commits need an operator.
            is_any = args.step is None and args.generation is None and not args.healthy
            if not args.fresh_ok or skipped or not is_any or not error.is_fresh:
                raise
            restored = None
    seconds = time.monotonic() - began_mono_s
    facts = {"run": run_name, "skipped": skipped, "seconds": round(seconds, 3)}
    if restored is None:
        if args.json:
            print_json(
                {
                    **facts,
                    "generation": None,
                    "step": None,
                    "path": None,
                    "size_bytes": 0,
                    "reused_bytes": 0,
                }
            )
        else:
            print(f"nothing to restore: run {run_name} has no commit yet")
        return 0
    ref, size_bytes = restored.ref, restored.size_bytes
    if args.json:
        place = {"generation": ref.generation, "step": ref.step, "path": str(restored.path)}
        sizes = {"size_bytes": size_bytes, "reused_bytes": restored.reused_bytes}
        print_json({**facts, **place, **sizes})
    else:
        fetched_bytes = size_bytes - restored.reused_bytes
        reused = f" ({human_bytes(restored.reused_bytes)} were already on disk)"
        print(
            f"restored step {ref.step} of run {run_name} (generation {ref.generation}): "
            f"{human_bytes(size_bytes)}{reused if restored.reused_bytes else ''} "
            f"in {seconds:.1f} s, {fetched_bytes / seconds / 1e6:.0f} MB/s"
        )
    return 0


def _wanted(args: argparse.Namespace) -> Wanted | None:
    if args.generation is None:
        return healthy if args.healthy else None

    def wanted(ref: CommitRef, health: Mapping[str, float]) -> bool:
        return ref.generation == args.generation and (not args.healthy or healthy(ref, health))

    return wanted


def _linked(
    args: argparse.Namespace, run_name: str, staged: Staged, path: Path, destination: Path
) -> int:
    """Replace the destination by a link to a sealed set in staging."""
    try:
        with suppress(FileNotFoundError):
            os.rmdir(destination)  # an empty directory is replaced, as by a download
        os.symlink(path, destination)
    except OSError as error:
        raise StagingError(
            f"linking {destination} to {path} failed: {error.strerror}",
            hint="Name a directory that is empty or does not exist",
        ) from error
    if args.json:
        print_json(
            {
                "run": run_name,
                "skipped": [],
                "seconds": 0.0,
                "generation": None,
                "step": staged.id.step,
                "path": str(destination),
                "size_bytes": staged.size_bytes,
                "reused_bytes": staged.size_bytes,
            }
        )
    else:
        print(
            f"step {staged.id.step} of run {run_name} is in staging: {human_bytes(staged.size_bytes)}; "
            f"{destination} links to {path}"
        )
    return 0
