# SPDX-License-Identifier: Apache-2.0
"""``swansong restore`` without the daemon: fetch a commit in this process.

After an interruption the fetched bytes stay on disk, and the same command resumes from there.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from swansong_bucket.errors import NothingToRestore, Transient
from swansong_bucket.model import CommitRef
from swansong_bucket.runs.commit import newest_whole_commit
from swansong_bucket.transfer.reader import ReadOptions
from swansong_bucket.transfer.restore import RestoreResult, Selection, restore
from swansong_bucket.transfer.target import RestoreTarget

from swansong_tools.commands import local_sets
from swansong_tools.commands.bucket_command import opened, perhaps_mirror
from swansong_tools.commands.common import note, of_generation, place, print_json
from swansong_tools.commands.destination import link, report_fresh
from swansong_tools.commands.progress import ProgressDisplay
from swansong_tools.units import human_bytes


def run(args: argparse.Namespace, destination: Path) -> int:
    """Restore to the destination; with ``--local`` the newest sealed set in staging may be newer."""
    skipped: list[dict[str, object]] = []

    def on_skipped(ref: CommitRef, reason: str) -> None:
        skipped.append({**place(ref), "reason": reason})
        note(f"skipped {ref}: {reason}")

    began_mono_s = time.monotonic()
    restored: RestoreResult | None = None
    source = ""
    is_quiet = args.quiet or args.json
    with (
        opened(args, may_be_new=True) as here,
        ProgressDisplay("restore", is_quiet=is_quiet) as progress,
    ):
        run_name = here.keys.run
        if args.local and run_name == here.config.run.name:
            newest = newest_whole_commit(here.store, here.keys)
            local = local_sets.find(here.config, here.store.url, newest)
            if local.unordered:
                hint = "to use it, check it and start the training from its directory"
                note(f"{local.unordered}; {hint}")
            if local.newest is not None:
                facts = {
                    "run": run_name,
                    "seconds": 0.0,
                    "generation": None,
                    "step": local.newest.id.step,
                }
                link(destination, local.path, facts, as_json=args.json)
                return 0
        selection = Selection(
            step=args.step,
            accepts=of_generation(args.generation),
            is_healthy=args.healthy,
            skipped=on_skipped,
        )
        options = ReadOptions(
            connections=here.connections,
            progress=progress,
            stop=here.stop,
            found=_Found(progress).add,
        )
        mirror = perhaps_mirror(here)
        try:
            try:
                target = RestoreTarget(destination)
                restored = restore(here.store, here.keys, target, selection, options, mirror=mirror)
            except Transient as error:
                # For a trainer that starts by itself, an older state must never be chosen silently.
                if mirror is None or args.local:
                    raise
                source = mirror.url
                note(f"the store cannot be reached: {error.line()}")
                note(f"restoring from the mirror {source}, which may lack the newest commits")
                target = RestoreTarget(destination)
                restored = restore(mirror, here.keys, target, selection, options)
        except NothingToRestore as error:
            # Only a run that never committed is fresh.  Damaged or missing commits need an operator, and a
            # mirror without a commit proves nothing about the store.
            is_any = args.step is None and args.generation is None and not args.healthy
            if not args.fresh_ok or skipped or source or not is_any or not error.is_fresh:
                raise
    seconds = time.monotonic() - began_mono_s
    found: dict[str, object] = {"run": run_name, "skipped": skipped, "seconds": round(seconds, 3)}
    if source:
        found["mirror"] = source
    if restored is None:
        report_fresh(found, as_json=args.json)
    else:
        _report(restored, found, seconds, as_json=args.json)
    return 0


class _Found:
    """Adds the bytes that were on this machine to the progress."""

    def __init__(self, progress: ProgressDisplay) -> None:
        self._progress = progress
        self._size_bytes = 0

    def add(self, size_bytes: int) -> None:
        self._size_bytes += size_bytes
        self._progress.detail = f"{human_bytes(self._size_bytes)} from this VM"


def _report(
    restored: RestoreResult, found: dict[str, object], seconds: float, *, as_json: bool
) -> None:
    ref, size_bytes = restored.ref, restored.size_bytes
    if as_json:
        found |= {**place(ref), "path": str(restored.path)}
        sizes = {"size_bytes": size_bytes, "reused_bytes": restored.reused_bytes}
        print_json({**found, **sizes, "from_mirror": list(restored.from_mirror)})
        return
    for what in restored.from_mirror:
        note(f"{what} was read from the mirror: the store has lost or damaged it")
    fetched_bytes = size_bytes - restored.reused_bytes
    reused = f" ({human_bytes(restored.reused_bytes)} were already on disk)"
    print(
        f"restored step {ref.step} of run {found['run']} (generation {ref.generation}): "
        f"{human_bytes(size_bytes)}{reused if restored.reused_bytes else ''} "
        f"in {seconds:.1f} s, {fetched_bytes / seconds / 1e6:.0f} MB/s"
    )
