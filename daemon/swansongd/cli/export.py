# SPDX-License-Identifier: Apache-2.0
"""``swansong export``: write a commit as plain files, for evaluation and serving.

The files are restored in batches to a temporary directory, which verifies them, and written from there.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from swansongd.bucket import catalog
from swansongd.bucket.commit import newest_whole_commit
from swansongd.cli import plain_files
from swansongd.cli.common import add_json, add_quiet, add_run, generation, note, print_json, step
from swansongd.cli.opening import Opened, opened, perhaps_mirror
from swansongd.cli.plain_files import PlainFiles
from swansongd.cli.progress import Progress
from swansongd.errors import NothingToRestore
from swansongd.model import CommitRef, StoredShard
from swansongd.restore.reader import ReadOptions
from swansongd.restore.restore import Selection, merged, nothing_found, restore, whole
from swansongd.restore.target import RestoreTarget
from swansongd.util.units import human_bytes

BATCH_BYTES = 2**30
"""Files that are restored together.  The temporary directory needs this room, or that of the largest file."""

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
        required=True,
        metavar="URL",
        help="s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or a directory; files of equal names are replaced",
    )
    parser.add_argument(
        "--generation", type=generation, metavar="N", help="only a commit of this generation"
    )
    add_quiet(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    to = plain_files.opened(args.to)
    with opened(args) as here:
        commit = _chosen(here, args.step, args.generation)
        shards = merged(whole(here.store, here.keys, commit))
        missing = [shard for shard in shards if not to.has(shard.path, shard)]
        total_bytes = sum(shard.size_bytes for shard in missing)
        with Progress("export", is_quiet=args.quiet or args.json) as progress:
            done_bytes = 0
            for batch in _batches(missing):
                _export(here, commit.ref, batch, to)
                done_bytes += sum(shard.size_bytes for shard in batch)
                progress(done_bytes, total_bytes)
    size_bytes = sum(shard.size_bytes for shard in shards)
    facts = {"run": here.keys.run, "generation": commit.ref.generation, "step": commit.ref.step}
    if args.json:
        written = {"files_written": len(missing), "bytes_written": total_bytes}
        print_json(
            {**facts, "to": args.to, "files": len(shards), "size_bytes": size_bytes, **written}
        )
    else:
        print(
            f"exported step {commit.ref.step} of run {here.keys.run} (generation {commit.ref.generation}) to "
            f"{args.to}: {len(shards)} files, {human_bytes(size_bytes)}"
        )
        if len(missing) < len(shards):
            note(f"{len(shards) - len(missing)} files were there already")
    return 0


def _chosen(here: Opened, wanted_step: int | None, wanted_generation: int | None) -> catalog.Commit:
    """The commit to export.

    Raises:
        NothingToRestore: there is no such whole commit.
    """
    ref = newest_whole_commit(here.store, here.keys)
    is_newest = wanted_step is None and wanted_generation is None
    for found in catalog.newest_commits(here.store, here.keys):
        is_wanted = (
            found.ref == ref
            if is_newest
            else wanted_step in (None, found.ref.step)
            and wanted_generation in (None, found.ref.generation)
        )
        if is_wanted and found.is_complete:
            return found
    raise nothing_found(here.keys, wanted_step, [])


def _batches(shards: Sequence[StoredShard]) -> Iterator[list[StoredShard]]:
    batch: list[StoredShard] = []
    for shard in shards:
        if batch and sum(s.size_bytes for s in batch) + shard.size_bytes > BATCH_BYTES:
            yield batch
            batch = []
        batch.append(shard)
    if batch:
        yield batch


def _export(here: Opened, ref: CommitRef, batch: Sequence[StoredShard], to: PlainFiles) -> None:
    paths = {shard.path for shard in batch}
    selection = Selection(
        step=ref.step,
        near=ref.generation,
        wanted=lambda found, _health: found == ref,
        files=lambda shard: shard.path in paths,
    )
    options = ReadOptions(connections=here.connections, stop=here.stop)
    with tempfile.TemporaryDirectory(prefix="swansong-export-") as scratch:
        copy = Path(scratch) / "files"
        try:
            mirror = perhaps_mirror(here)
            restore(here.store, here.keys, RestoreTarget(copy), selection, options, mirror=mirror)
        except NothingToRestore as error:
            raise NothingToRestore(
                f"{ref} cannot be exported: {error}", hint="See: swansong verify"
            ) from None
        for shard in batch:
            to.write(shard.path, shard, copy / shard.path)
