# SPDX-License-Identifier: Apache-2.0
"""``swansong drill``: rehearse an evacuation, with a notice that the log and the farewell mark as a drill."""

from __future__ import annotations

import argparse

from swansongd.cli.notify import add_notice, give_notice

EXAMPLES = {
    "Rehearse a notice of two minutes, as on AWS, and exit with the verdict.": (
        "sudo swansong drill --in 120s --wait"
    ),
    "Rehearse the 30 seconds of GCP and print the result as JSON.": (
        "sudo swansong drill --in 30s --wait --json"
    ),
    "End the drill and continue training.": "sudo swansong notify --withdraw",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_notice(parser)


def run(args: argparse.Namespace) -> int:
    return give_notice(args, drill=True)
