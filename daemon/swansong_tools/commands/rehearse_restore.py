# SPDX-License-Identifier: Apache-2.0
"""``swansong drill --restore``: restore the newest commit of the mirror, as after the loss of the store."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swansong_bucket.errors import CorruptError, StoreError
from swansong_bucket.model import CommitRef
from swansong_bucket.runs.commit import newest_whole_commit
from swansong_bucket.transfer.reader import ReadOptions
from swansong_bucket.transfer.restore import RestoreResult, Selection, restore
from swansong_bucket.transfer.target import RestoreTarget
from swansong_bucket.util.printable import printable
from swansongd.config.config import Config

from swansong_tools.commands.bucket_command import Opened, mirror_of, opened
from swansong_tools.commands.common import note, place, print_json
from swansong_tools.commands.destination import resolved
from swansong_tools.commands.progress import ProgressDisplay
from swansong_tools.units import counted, human_bytes

SCRATCH = Path("/var/tmp")  # noqa: S108 - mkdtemp makes a private directory in it


def run(args: argparse.Namespace) -> int:
    """Restore, and report the recovery time (RTO) and the commits that the mirror lacks (RPO).

    Raises:
        CorruptError: the newest commit of the mirror cannot be restored.
        NothingToRestore: the mirror has no whole commit.
        StoreError: the mirror cannot be read.
    """
    began_mono_s = time.monotonic()
    with (
        opened(args, may_be_new=True) as here,
        _destination(args.to, here.config) as destination,
    ):
        mirror = mirror_of(here)
        with ProgressDisplay("restore", is_quiet=args.json) as progress:
            restored = restore(
                mirror,
                here.keys,
                RestoreTarget(destination, is_scratch=args.to is None),
                Selection(skipped=lambda ref, reason: note(f"skipped {ref}: {reason}")),
                ReadOptions(connections=here.connections, progress=progress, stop=here.stop),
            )
        seconds = time.monotonic() - began_mono_s
        newest = _newest_of_store(here)
    _report(args, here, mirror.url, restored, seconds, newest=newest)
    if restored.skipped:
        ref, reason = restored.skipped[0]
        raise CorruptError(
            f"the drill failed: the newest commit of the mirror, {ref}, cannot be restored: {reason}",
            hint="See: swansong verify, with store.url set to the mirror",
        )
    return 0


@contextmanager
def _destination(to: str | None, config: Config) -> Iterator[Path]:
    if to is not None:
        yield resolved(to, config)
        return
    with tempfile.TemporaryDirectory(prefix="swansong-drill-", dir=SCRATCH) as scratch:
        yield Path(os.path.realpath(scratch), "checkpoint")


def _newest_of_store(here: Opened) -> CommitRef | None:
    try:
        return newest_whole_commit(here.store, here.keys)
    except (StoreError, CorruptError) as error:
        note(f"the store cannot be read, so the lag of the mirror is unknown: {error.line()}")
        return None


def _report(
    args: argparse.Namespace,
    here: Opened,
    url: str,
    restored: RestoreResult,
    seconds: float,
    *,
    newest: CommitRef | None,
) -> None:
    ref, size_bytes = restored.ref, restored.size_bytes
    behind = None if newest is None else max(0, newest.step - ref.step)
    if args.json:
        print_json(
            {
                "run": here.keys.run,
                "mirror": url,
                **place(ref),
                "size_bytes": size_bytes,
                "seconds": round(seconds, 3),
                "bytes_per_s": round(size_bytes / seconds),
                "steps_behind": behind,
                "skipped": [{**place(each), "reason": reason} for each, reason in restored.skipped],
            }
        )
        return
    lag = "" if behind is None else f"; the store is {counted(behind, 'step')} ahead of it"
    print(
        f"restored {ref} of run {here.keys.run} from {printable(url)} and verified it: "
        f"{human_bytes(size_bytes)} in {seconds:.1f} s, {human_bytes(size_bytes / seconds)}/s{lag}"
    )
