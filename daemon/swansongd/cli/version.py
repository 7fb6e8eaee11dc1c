# SPDX-License-Identifier: Apache-2.0
"""``swansong version``: which version this is."""

from __future__ import annotations

import argparse

from swansongd import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run(args: argparse.Namespace) -> int:  # noqa: ARG001 - every command is called alike
    print(f"swansong {__version__}")
    return 0
