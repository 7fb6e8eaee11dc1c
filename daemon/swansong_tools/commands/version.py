# SPDX-License-Identifier: Apache-2.0
"""``swansong version``: print the version."""

from __future__ import annotations

import argparse

from swansongd import __version__

EXAMPLES = {"Print the version.": "swansong version"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no options."""


def run(args: argparse.Namespace) -> int:  # noqa: ARG001 - all commands have the same signature
    print(f"swansong {__version__}")
    return 0
