# SPDX-License-Identifier: Apache-2.0
"""``swansong pin``: keep a commit under a name."""

from __future__ import annotations

import argparse
from contextlib import suppress

from swansong import bounds
from swansong_bucket.errors import ConfigError, Exists, NothingToRestore, StoreError
from swansong_bucket.format.keys import is_pin_name
from swansong_bucket.format.wall import utc_now
from swansong_bucket.runs import pins
from swansong_bucket.runs.catalog import Commit
from swansong_bucket.runs.pins import Pin
from swansong_bucket.transfer.restore import Selection, newest_usable, whole

from swansong_tools.commands.bucket_command import Opened, opened
from swansong_tools.commands.common import add_generation, add_run, note, of_generation, step

NOTES = "See docs/operations/retention.md."
EXAMPLES = {
    "Keep the newest commit of step 12000 under a name.": "swansong pin 12000 --name before-lr-drop",
    "Keep a commit of an older generation, with a note.": (
        'swansong pin 12000 --generation 3 --name paper --note "figure 2 of the paper"'
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("step", type=step, metavar="STEP", help="step of the commit to keep")
    parser.add_argument(
        "--name",
        type=name,
        required=True,
        metavar="N",
        help="name of the pin, unique in the run: letters, digits, dots, dashes and underscores",
    )
    parser.add_argument(
        "--note", type=_note, default="", metavar="TEXT", help="text that swansong ls shows"
    )
    add_generation(parser, "generation of the commit (default: the newest that has the step)")


def name(text: str) -> str:
    """Parse the name of a pin."""
    if not is_pin_name(text):
        raise argparse.ArgumentTypeError(
            f"{text!r:.120} is not a name; use up to 100 letters, digits, dots, dashes and underscores"
        )
    return text


def _note(text: str) -> str:
    try:
        return bounds.text(text, "the note", pins.NOTE_CHARS_MAX)
    except bounds.BoundsError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    with opened(args) as here:
        found = _commit(here, args.step, args.generation)
        pin = Pin(
            run=here.keys.run, name=args.name, ref=found.ref, note=args.note, created=utc_now()
        )
        try:
            pins.create(here.store, here.keys, pin)
        except Exists as error:
            fix = f"choose another name, or remove that pin with: swansong unpin {pin.name}"
            raise ConfigError([f"--name: {error} (got {pin.name!r}); {fix}"]) from None
        # A prune that had read the pins before may delete the commit at this moment.
        if not _is_there(here, found):
            with suppress(StoreError):  # without the right to delete, swansong ls shows the pin
                pins.remove(here.store, here.keys, pin.name)
            raise NothingToRestore(f"{found.ref} was deleted while it was pinned")
    print(f"pinned {found.ref} of run {here.keys.run} as {pin.name}")
    return 0


def _commit(here: Opened, wanted_step: int, wanted_generation: int | None) -> Commit:
    """The commit that ``swansong restore`` takes for this step and generation."""

    def read(commit: Commit) -> Commit:
        whole(here.store, here.keys, commit)
        return commit

    selection = Selection(
        step=wanted_step,
        accepts=of_generation(wanted_generation),
        skipped=lambda ref, reason: note(f"skipped {ref}: {reason}"),
    )
    return newest_usable(here.store, here.keys, selection, read, [])


def _is_there(here: Opened, found: Commit) -> bool:
    return all(here.store.head(key) is not None for key in found.manifest_keys.values())
