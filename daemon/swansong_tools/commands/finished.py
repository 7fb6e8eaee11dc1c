# SPDX-License-Identifier: Apache-2.0
"""``swansong finished``: whether a run has ended, as an exit code for schedulers and units."""

from __future__ import annotations

import argparse

from swansong_bucket.errors import CorruptError
from swansong_bucket.runs import catalog
from swansong_bucket.runs.commit import newest_whole

from swansong_tools.commands.bucket_command import opened
from swansong_tools.commands.common import add_json, add_run, place, print_json

EXIT_UNFINISHED = 18

NOTES = "The run has ended if its newest whole commit is that of guard.finish(): see docs/trainers/checks.md."
EXAMPLES = {
    "Exit with 0 if the configured run has ended, and with 18 if not.": "swansong finished",
    "Print the newest step of another run as well.": "swansong finished --run my-run --json",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    with opened(args, may_be_new=True) as here:
        found = newest_whole(here.store, here.keys)
        newest = None if found is None else found.ref
        if found is not None and found.ref.is_final:
            try:
                catalog.load(here.store, here.keys, found)
            except CorruptError as error:  # a restore passes over it
                hint = "Repair it from the mirror: swansong verify --repair"
                raise CorruptError(f"{found.ref} is damaged: {error}", hint=hint) from error
    name, is_finished = here.keys.run, newest is not None and newest.is_final
    if args.json:
        print_json({"run": name, "finished": is_finished, **place(newest)})
    elif newest is None:
        print(f"run {name} is not finished: it has no whole commit")
    elif is_finished:
        print(f"run {name} is finished at step {newest.step} (generation {newest.generation})")
    else:
        print(f"run {name} is not finished: its newest commit is {newest}")
    return 0 if is_finished else EXIT_UNFINISHED
