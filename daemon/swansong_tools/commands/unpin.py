# SPDX-License-Identifier: Apache-2.0
"""``swansong unpin``: remove a pin."""

from __future__ import annotations

import argparse

from swansong_bucket.errors import ConfigError
from swansong_bucket.runs import pins
from swansong_bucket.runs.pins import Pins

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
        if not pins.remove(here.store, here.keys, args.name):
            names = ", ".join(stored.name for stored in Pins(here.store, here.keys).now()) or "none"
            problem = f"NAME: is not a pin of run {here.keys.run} (got {args.name!r})"
            raise ConfigError([f"{problem}; choose one of its pins: {names}"])
    print(f"removed the pin {args.name} of run {here.keys.run}")
    return 0
