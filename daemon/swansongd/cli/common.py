# SPDX-License-Identifier: Apache-2.0
"""Shared code of the commands: options, output, units."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TextIO

from swansong import bounds

from swansongd.config.values import InvalidValue, run_name
from swansongd.util.printable import printable


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run", type=_run, metavar="RUN", help="name of the run (default: the configured run)"
    )


def add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=step, metavar="N", help="consider only commits of this step")


def add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _run(text: str) -> str:
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


def human_bytes(size_bytes: float) -> str:
    """Format bytes as ``1.2 GB``: up to three digits, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.4g} TB"


def human_age(seconds: float) -> str:
    """Format an age as ``45 s ago``, ``3.2 h ago`` or ``12 d ago``."""
    amount, unit = human_s(seconds).split()
    short = f"{float(amount):.0f}" if float(amount) >= 10 else f"{float(amount):.2g}"
    return f"{short} {unit} ago"


def human_s(seconds: float) -> str:
    """Format a duration as ``4.2 s``, ``12 min``, ``3.5 h`` or ``2 d``."""
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.3g} {unit}"
    return f"{seconds:.3g} s"
