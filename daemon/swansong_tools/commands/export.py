# SPDX-License-Identifier: Apache-2.0
"""``swansong export``: write a commit as plain files, for evaluation and serving.

A directory is restored.  For a bucket, the files are restored in batches to a temporary directory, which
verifies them, and written from there.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swansong_bucket.errors import CorruptError
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CommitRef, StoredShard
from swansong_bucket.runs.catalog import Commit
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.transfer.reader import ReadOptions
from swansong_bucket.transfer.restore import (
    Selection,
    fetch,
    manifests_of,
    merged,
    newest_usable,
    nothing_found,
)
from swansong_bucket.transfer.target import RestoreTarget

from swansong_tools.commands import plain_files
from swansong_tools.commands.bucket_command import Opened, opened, perhaps_mirror
from swansong_tools.commands.common import (
    add_generation,
    add_output,
    add_run,
    note,
    of_generation,
    place,
    print_json,
    step,
    target,
)
from swansong_tools.commands.destination import resolved
from swansong_tools.commands.plain_files import PlainFiles
from swansong_tools.commands.progress import ProgressDisplay
from swansong_tools.commands.rehearse_restore import SCRATCH
from swansong_tools.units import counted, human_bytes

BATCH_BYTES = 2**30
"""Files that are restored together.  The temporary directory needs this room, or that of the largest file."""

NOTES = """\
A run's bucket has chunks, not files: this command is for evaluation and serving.
The files are verified before they are written.
boto3 and google-cloud-storage write them, with their own credentials and settings, such as AWS_ENDPOINT_URL.
On S3 the role needs s3:PutObject, s3:GetObject and s3:AbortMultipartUpload.
An interrupted export continues with what is missing, and other files stay.
A store without user metadata gets all files again.
A directory gets each file whole, and no link in it is followed.
For a bucket, /var/tmp needs room for the largest file, or 1 GiB."""
EXAMPLES = {
    "Write the newest commit for an evaluation.": "swansong export --to s3://models/run-7/newest",
    "Write the commit of one step to a directory.": "swansong export 12000 --to /srv/models/12000",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "step", type=step, nargs="?", metavar="STEP", help="step of the commit; default: the newest"
    )
    parser.add_argument(
        "--to",
        type=target,
        required=True,
        metavar="URL",
        help="s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or a directory; files of equal names are replaced",
    )
    add_generation(parser, "only a commit of this generation")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    to = plain_files.opened(args.to)
    with opened(args) as here:
        if to is not None:
            plain_files.expect_outside_of_stores(args.to, here.config, here.keys.run)
        mirror = perhaps_mirror(here)
        ref, manifests = _chosen(here, mirror, args.step, args.generation)
        shards = merged(manifests)
        missing = [shard for shard in shards if to is None or not to.has(shard.path, shard)]
        total_bytes = sum(shard.size_bytes for shard in missing)
        with ProgressDisplay("export", is_quiet=args.quiet or args.json) as progress:
            fetched = _Fetched(here, mirror, ref, manifests, progress, total_bytes)
            try:
                if to is None:
                    fetched.to(resolved(args.to, here.config), missing)
                else:
                    _write(fetched, missing, to)
            except CorruptError as error:
                raise nothing_found(here.keys, ref.step, [(ref, error.line())]) from None
    size_bytes = sum(shard.size_bytes for shard in shards)
    if args.json:
        facts = {"run": here.keys.run, **place(ref)}
        written = {"files_written": len(missing), "bytes_written": total_bytes}
        print_json(
            {**facts, "to": args.to, "files": len(shards), "size_bytes": size_bytes, **written}
        )
    else:
        print(
            f"exported step {ref.step} of run {here.keys.run} (generation {ref.generation}) to "
            f"{args.to}: {counted(len(shards), 'file')}, {human_bytes(size_bytes)}"
        )
        if len(missing) < len(shards):
            note(f"there already: {counted(len(shards) - len(missing), 'file')}")
    return 0


def _chosen(
    here: Opened,
    mirror: ObjectStore | None,
    wanted_step: int | None,
    wanted_generation: int | None,
) -> tuple[CommitRef, tuple[Manifest, ...]]:
    """The newest whole commit of this step and generation, and its manifests.

    Raises:
        NothingToRestore: there is none.
    """
    selection = Selection(step=wanted_step, accepts=of_generation(wanted_generation))

    def read(commit: Commit) -> tuple[CommitRef, tuple[Manifest, ...]]:
        return commit.ref, manifests_of(here.store, here.keys, commit, mirror)[0]

    return newest_usable(here.store, here.keys, selection, read, [])


@dataclass(slots=True)
class _Fetched:
    """Fetches files of one commit, and counts their bytes."""

    here: Opened
    mirror: ObjectStore | None
    ref: CommitRef
    manifests: Sequence[Manifest]
    progress: ProgressDisplay
    total_bytes: int
    done_bytes: int = 0

    def to(
        self, directory: Path, shards: Sequence[StoredShard], *, is_scratch: bool = False
    ) -> None:
        """Put these files into a directory, verified.  Each one appears whole; links are not followed."""
        before_bytes = self.done_bytes

        def moved(done_bytes: int, _total_bytes: int) -> None:
            self.progress(before_bytes + done_bytes, self.total_bytes)

        here = self.here
        options = ReadOptions(connections=here.connections, stop=here.stop, progress=moved)
        is_there = os.path.exists(directory)
        with RestoreTarget(directory, extends=is_there, is_scratch=is_scratch) as target:
            fetch(
                here.store,
                here.keys,
                self.ref,
                self.manifests,
                target,
                wanted=shards,
                options=options,
                mirror=self.mirror,
            )
        self.done_bytes += sum(shard.size_bytes for shard in shards)


def _write(fetched: _Fetched, shards: Sequence[StoredShard], to: PlainFiles) -> None:
    for batch in _batches(shards):
        with tempfile.TemporaryDirectory(prefix="swansong-export-", dir=SCRATCH) as scratch:
            copy = Path(os.path.realpath(scratch), "files")
            fetched.to(copy, batch, is_scratch=True)
            for shard in batch:
                to.write(shard.path, shard, copy / shard.path, stop=fetched.here.stop)


def _batches(shards: Sequence[StoredShard]) -> Iterator[list[StoredShard]]:
    batch: list[StoredShard] = []
    batch_bytes = 0
    for shard in shards:
        if batch and batch_bytes + shard.size_bytes > BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(shard)
        batch_bytes += shard.size_bytes
    if batch:
        yield batch
