# SPDX-License-Identifier: Apache-2.0
"""``swansong restore``: bring the newest whole commit of a run to a directory.

Ended by a signal or by the store, it keeps what it has fetched, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from swansongd.cli.common import (
    ShownProgress,
    add_json,
    add_run,
    add_step,
    human_bytes,
    note,
    opened,
    print_json,
)
from swansongd.errors import NothingToRestore
from swansongd.model import CommitRef
from swansongd.restore import healthy, restore

HELP = "bring the newest whole commit of a run to a directory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_step(parser)
    parser.add_argument(
        "--to",
        required=True,
        metavar="DIR",
        help="where to; must not exist, or be an empty directory",
    )
    parser.add_argument(
        "--healthy",
        action="store_true",
        help="only a commit whose loss was finite; one of unknown health will not do",
    )
    parser.add_argument(
        "--fresh-ok",
        action="store_true",
        help="success when the run has no commit at all yet (exit code 0 instead of 17)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    # The parent may be reached through links; from there on none is followed.
    absolute = os.path.abspath(args.to)
    destination = Path(os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute))
    skipped: list[dict[str, object]] = []

    def on_skipped(ref: CommitRef, reason: str) -> None:
        skipped.append({"generation": ref.generation, "step": ref.step, "reason": reason})
        note(f"skipped {ref}: {reason}")

    began_mono_s = time.monotonic()
    with opened(args) as here, ShownProgress("restore") as progress:
        run_name = here.keys.run
        try:
            restored = restore(
                here.store,
                here.keys,
                destination,
                step=args.step,
                wanted=healthy if args.healthy else None,
                progress=progress,
                skipped=on_skipped,
                stop=here.stop,
            )
        except NothingToRestore:
            # Only a run that never committed is fresh: damaged commits want a person's eye.
            if not args.fresh_ok or skipped or args.step is not None or args.healthy:
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
        already = f" ({human_bytes(restored.reused_bytes)} of it were here already)"
        print(
            f"restored step {ref.step} of run {run_name} (generation {ref.generation}): "
            f"{human_bytes(size_bytes)}{already if restored.reused_bytes else ''} "
            f"in {seconds:.1f} s, {fetched_bytes / seconds / 1e6:.0f} MB/s"
        )
    return 0
