# SPDX-License-Identifier: Apache-2.0
"""``swansong unpin``: remove a pin."""

from __future__ import annotations

import argparse

from swansong_bucket.runs import pins

from swansong_tools.commands.bucket_command import opened
from swansong_tools.commands.common import add_run
from swansong_tools.commands.pin import name

EXAMPLES = {
    "Remove a pin; the rules decide about its commit again.": "swansong unpin before-lr-drop",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("name", type=name, metavar="NAME", help="name of the pin")


def run(args: argparse.Namespace) -> int:
    with opened(args) as here:
        pins.remove(here.store, here.keys, args.name)
    print(f"removed the pin {args.name} of run {here.keys.run}")
    return 0
