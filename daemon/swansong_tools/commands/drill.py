# SPDX-License-Identifier: Apache-2.0
"""``swansong drill``: rehearse an evacuation, or with ``--restore`` the loss of the store.

The notice of a drill is marked as a drill in the log and in the farewell.  ``--restore`` fetches the newest
commit from the mirror, verifies it, and reports how long that took.
"""

from __future__ import annotations

import argparse

from swansong_bucket.errors import ConfigError

from swansong_tools.commands import notify
from swansong_tools.commands.common import target

NOTES = notify.NOTES
EXAMPLES = {
    "Rehearse a notice of two minutes, as on AWS, and exit with the verdict.": (
        "sudo swansong drill --in 120s --wait"
    ),
    "Rehearse the 30 seconds of GCP and print the result as JSON.": (
        "sudo swansong drill --in 30s --wait --json"
    ),
    "End the drill and continue training.": "sudo swansong notify --withdraw",
    "Restore the newest commit from the mirror to a scratch directory, and report the time.": (
        "sudo swansong drill --restore"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    notify.add_notice(parser).add_argument(
        "--restore",
        action="store_true",
        help="restore the newest commit from the mirror, verify it, and report the time",
    )
    parser.add_argument(
        "--to",
        type=target,
        metavar="DIR",
        help="with --restore: keep the files in this directory, which must be empty or not exist "
        "(default: a scratch directory below /var/tmp, which is deleted)",
    )
    parser.set_defaults(run=None)


def run(args: argparse.Namespace) -> int:
    if not args.restore:
        if args.to is not None:
            raise ConfigError(["--to has an effect only with --restore"])
        return notify.give_notice(args, drill=True)
    if args.wait or args.reason:
        raise ConfigError(["--restore gives no notice: remove --wait and --reason"])
    from swansong_tools.commands import rehearse_restore  # noqa: PLC0415 - slow to import

    return rehearse_restore.run(args)
