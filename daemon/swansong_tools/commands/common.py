# SPDX-License-Identifier: Apache-2.0
"""Shared code of the commands: options, output, units."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TextIO

from swansong import bounds
from swansong_bucket.config.values import InvalidValue, run_name
from swansong_bucket.util.printable import printable


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run",
        type=run_argument,
        metavar="RUN",
        help="name of the run (default: the configured run)",
    )


def add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=step, metavar="N", help="consider only commits of this step")


def add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run_argument(text: str) -> str:
    try:
        return str(run_name(text))
    except InvalidValue as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error.problem}; {error.remedy}") from None


def generation(text: str) -> int:
    """Parse the argument of ``--generation``."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= bounds.GENERATION_MAX):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a generation; list them with swansong ls"
        )
    return int(text)


def step(text: str) -> int:
    """Parse the argument of ``--step``."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a step; list them with swansong ls")
    return int(text)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="print no progress")


def is_screen(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def note(line: str) -> None:
    """Print one line for people on standard error."""
    print(f"swansong: {printable(line)}", file=sys.stderr, flush=True)
