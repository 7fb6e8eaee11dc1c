# SPDX-License-Identifier: Apache-2.0
"""``swansong mirror``: copy commits to the mirror, or promote the mirror after the loss of the store."""

from __future__ import annotations

import argparse
import platform
from dataclasses import dataclass, field

from swansong_bucket.errors import ConfigError, CorruptError, MissingError, StoreError
from swansong_bucket.mirror.copier import Copier
from swansong_bucket.mirror.fence import promote
from swansong_bucket.model import CommitRef
from swansong_bucket.runs.catalog import Commit
from swansong_bucket.runs.commit import newest_whole_commit
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.wrappers.throttle import Throttled
from swansong_bucket.util.printable import printable

from swansong_tools.commands.bucket_command import Opened, mirror_of, opened
from swansong_tools.commands.common import (
    add_flag,
    add_output,
    add_run,
    note,
    place,
    print_json,
)
from swansong_tools.commands.progress import ProgressDisplay
from swansong_tools.units import counted, human_bytes

NOTES = "See docs/operations/mirror.md."
EXAMPLES = {
    "Show the commits that the mirror lacks.": "swansong mirror --dry-run",
    "Copy all commits of the configured run.": "swansong mirror",
    "Continue the run in the mirror, after the store was lost.": "swansong mirror --promote",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    kind = parser.add_mutually_exclusive_group()
    add_flag(kind, "--dry-run", "print what would be copied, and copy nothing")
    add_flag(
        kind,
        "--promote",
        "claim a generation in the mirror, so that the run continues there; VMs that use the store "
        "stop committing at their next contact with the mirror",
    )
    add_flag(parser, "--force", "with --promote: give up the commits that the mirror lacks")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    if args.force and not args.promote:
        raise ConfigError(["--force has an effect only with --promote"])
    with opened(args, may_be_new=args.promote) as here:
        mirror = mirror_of(here)
        return _promote(args, here, mirror) if args.promote else _copy_all(args, here, mirror)


# ---------------------------------------------------------------- copies


@dataclass(slots=True)
class _Totals:
    """Results of the command."""

    copied: list[dict[str, object]] = field(default_factory=list)
    failed: list[dict[str, object]] = field(default_factory=list)
    size_bytes: int = 0


def _copy_all(args: argparse.Namespace, here: Opened, mirror: ObjectStore) -> int:
    limit = here.config.mirror.background_bytes_per_s
    totals = _Totals()
    with ProgressDisplay("mirror", is_quiet=args.quiet or args.json) as progress:
        copier = Copier(
            here.store,
            Throttled(mirror, lambda: limit, limits_reads=True),
            here.keys,
            here.stop,
            connections=here.config.mirror.connections,
            copied=progress.add,
        )
        copier.check_fence()
        absent = copier.absent()
        whole = [commit for commit in absent if commit.is_complete]
        for place, commit in enumerate(whole, start=1):
            progress.detail = f"commit {place} of {len(whole)}"
            try:
                size_bytes = _one(copier, commit, progress, is_dry=args.dry_run)
            except MissingError:
                continue
            except CorruptError as error:
                totals.failed.append({**_place(commit.ref), "reason": error.line()})
                note(f"{commit.ref} was not copied: {error.line()}")
                continue
            totals.copied.append({**_place(commit.ref), "size_bytes": size_bytes})
            totals.size_bytes += size_bytes
            if not args.json:
                verb = "would copy" if args.dry_run else "copied"
                print(f"{verb} {commit.ref}: {human_bytes(size_bytes)}", flush=True)
        records = 0 if args.dry_run else copier.copy_records()
    _report(args, here, mirror, totals, records=records, partial=len(absent) - len(whole))
    return CorruptError.exit_code if totals.failed else 0


def _one(copier: Copier, commit: Commit, progress: ProgressDisplay, *, is_dry: bool) -> int:
    """Copy a commit, or count its bytes; returns the bytes."""
    size_bytes = 0
    for node in sorted(commit.manifest_keys):
        place = commit.place(node)
        if is_dry:
            size_bytes += sum(chunk.size_bytes for chunk in copier.absent_of(place))
        else:
            size_bytes += copier.copy(place, progress.begin).size_bytes
    return size_bytes


def _report(
    args: argparse.Namespace,
    here: Opened,
    mirror: ObjectStore,
    totals: _Totals,
    *,
    records: int,
    partial: int,
) -> None:
    if args.json:
        print_json(
            {
                "run": here.keys.run,
                "mirror": mirror.url,
                "dry_run": args.dry_run,
                "copied": totals.copied,
                "size_bytes": totals.size_bytes,
                "records": records,
                "failed": totals.failed,
                "incomplete": partial,
            }
        )
        return
    verb = "lacks" if args.dry_run else "received"
    incomplete = f"; {counted(partial, 'checkpoint')} not whole, not copied" if partial else ""
    print(
        f"{printable(mirror.url)} {verb} {counted(len(totals.copied), 'commit')} of run {here.keys.run}, "
        f"{human_bytes(totals.size_bytes)}{incomplete}"
    )


def _place(ref: CommitRef) -> dict[str, object]:
    return {**place(ref), "is_final": ref.is_final}


# ---------------------------------------------------------------- promotion


def _promote(args: argparse.Namespace, here: Opened, mirror: ObjectStore) -> int:
    if not args.force:
        _expect_nothing_lost(here, mirror)
    promotion = promote(mirror, here.keys, host=platform.node(), force=args.force)
    ref, generation = promotion.newest, promotion.generation
    if args.json:
        print_json(
            {
                "run": here.keys.run,
                "mirror": mirror.url,
                "promoted_generation": generation,
                "is_new": promotion.is_new,
                "newest": _place(ref),
            }
        )
        return 0
    done = "is promoted" if promotion.is_new else "was promoted before"
    print(
        f"{printable(mirror.url)} {done}: run {here.keys.run} continues after {ref}, above generation "
        f"{generation}. Set store.url to it on each VM that continues the run"
    )
    return 0


def _expect_nothing_lost(here: Opened, mirror: ObjectStore) -> None:
    """Refuse the promotion if the store can be reached, and has newer commits than the mirror.

    Raises:
        ConfigError: it has.
    """
    try:
        newest = newest_whole_commit(here.store, here.keys)
    except StoreError as error:
        note(f"the store cannot be reached: {error.line()}")
        return
    copied = newest_whole_commit(mirror, here.keys)
    if newest is not None and (copied is None or copied < newest):
        raise ConfigError(
            [f"the store has {newest}, and the mirror only {copied or 'older ones'}"],
            hint="Copy it first with swansong mirror, or give it up with --promote --force",
        )
