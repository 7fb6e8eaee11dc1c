# SPDX-License-Identifier: Apache-2.0
"""``swansong verify``: compare the stored bytes with their names, and repair what is damaged."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from swansong_bucket.config.values import rate
from swansong_bucket.errors import CorruptError
from swansong_bucket.model import Chunk
from swansong_bucket.runs.pins import Pins, StoredPin
from swansong_bucket.stores.wrappers.throttle import Throttled
from swansong_bucket.transfer.reader import ReadOptions
from swansong_bucket.util.printable import printable
from swansongd.restore.local_files import sets_in

from swansong_tools.commands.bucket_command import opened, perhaps_mirror
from swansong_tools.commands.common import (
    add_flag,
    add_output,
    add_run,
    add_step,
    argument,
    place,
    print_json,
)
from swansong_tools.commands.progress import ProgressDisplay
from swansong_tools.units import counted, human_bytes
from swansong_tools.upkeep.repair import RepairOutcome, repair, repair_manifests, repair_pins
from swansong_tools.upkeep.verify import Defect, Findings, verify

NOTES = "See docs/operations/verify.md."
EXAMPLES = {
    "Verify all commits of the configured run.": "swansong verify",
    "Verify one commit before restoring it.": "swansong verify --step 12000",
    "Read a random twentieth of the bytes, slowly.": "swansong verify --sample 5% --rate 50MB/s",
    "Replace damaged objects by intact copies.": "swansong verify --repair",
    "Verify another run and print the findings as JSON.": "swansong verify --run other-run --json",
}

_ORIGINS = {
    "object": "the object itself",
    "run": "another object of the run",
    "staging": "staging",
    "mirror": "the mirror",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_step(parser)
    parser.add_argument(
        "--sample",
        type=_share,
        default=1.0,
        metavar="SHARE",
        help="read a random share of the bytes, such as 5%%; the sizes of all objects are compared",
    )
    parser.add_argument(
        "--rate", type=_rate, metavar="RATE", help="limit of the bytes per second, such as 50MB/s"
    )
    add_flag(parser, "--repair", "replace damaged and missing objects by intact copies")
    add_output(parser)


def _share(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%", text)
    if not match or not 0 < float(match[1]) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a share, such as 5%")
    return float(match[1]) / 100


def _rate(text: str) -> float | None:
    limit: float | None = argument(rate)(text.removesuffix("/s"))
    return limit


def run(args: argparse.Namespace) -> int:
    outcomes: list[RepairOutcome] = []
    is_quiet = args.quiet or args.json
    with opened(args) as here:
        limit = args.rate
        store = here.store
        if limit is not None:
            # After a stop no thread waits any longer.
            allowed = lambda: None if here.stop.is_set() else limit  # noqa: E731
            store = Throttled(store, allowed, limits_reads=True)
        options = ReadOptions(connections=here.connections, stop=here.stop)
        run_name = here.keys.run
        mirror = perhaps_mirror(here) if args.repair else None
        if mirror is not None:
            with ProgressDisplay("repairing manifests", "commits", is_quiet=is_quiet) as progress:
                outcomes += repair_manifests(store, here.keys, mirror, options, progress=progress)
            outcomes += repair_pins(store, here.keys, mirror)
        with (
            ProgressDisplay("reading manifests", "commits", is_quiet=is_quiet) as manifests,
            ProgressDisplay("verify", is_quiet=is_quiet) as progress,
        ):
            findings = verify(
                store,
                here.keys,
                step=args.step,
                sample=args.sample,
                manifests=manifests,
                options=replace(options, progress=progress),
            )
        damaged_pins = [each for each in Pins(store, here.keys).now() if each.pin is None]
        if args.repair and findings.damaged:
            with (
                sets_in(here.config.staging.path / run_name) as local,
                ProgressDisplay("repair", is_quiet=is_quiet) as progress,
            ):
                outcomes += repair(
                    store,
                    here.keys,
                    findings.damaged,
                    mirror=mirror,
                    local=local,
                    options=replace(options, progress=progress),
                )
    defects = remaining(findings.defects, outcomes)
    if args.json:
        report = _report(args.sample, findings, defects, damaged_pins, outcomes)
        print_json({"run": run_name, **report})
        return CorruptError.exit_code if defects or damaged_pins else 0
    _print(defects, damaged_pins, outcomes)
    if defects or damaged_pins:
        what = counted(len(defects), "damaged or missing object")
        what += f", {counted(len(damaged_pins), 'damaged pin')}" if damaged_pins else ""
        raise CorruptError(
            f"verifying run {run_name} failed: {what}",
            hint="swansong restore skips the commits that reference them"
            if args.repair
            else "swansong restore skips the commits that reference them; see: swansong verify --repair",
        )
    what = "all stored bytes" if args.sample >= 1 else f"{human_bytes(findings.read_bytes)}"
    print(
        f"{what} of run {run_name} match their names: {counted(findings.objects, 'object')} "
        f"{'read' if args.sample >= 1 else 'counted'}, {findings.shared} of them shared by several commits"
    )
    return 0


def remaining(defects: Sequence[Defect], outcomes: Sequence[RepairOutcome]) -> list[Defect]:
    """The defects that the repair did not remove."""
    whole = {Chunk(outcome.key, outcome.size_bytes) for outcome in outcomes if not outcome.problem}
    return [defect for defect in defects if not defect.chunks or not defect.chunks <= whole]


def _print(
    defects: Sequence[Defect], damaged_pins: Sequence[StoredPin], outcomes: Sequence[RepairOutcome]
) -> None:
    for outcome in outcomes:
        if outcome.problem:
            names = ", ".join(str(ref) for ref in outcome.commits)
            print(
                f"not repaired: {printable(outcome.key)}: {printable(outcome.problem)}; of {names}"
            )
        else:
            size = human_bytes(outcome.size_bytes)
            print(f"repaired: {printable(outcome.key)}: {size} from {_ORIGINS[outcome.origin]}")
    for defect in defects:
        print(f"{defect.ref}: {printable(defect.problem)}")
    for pin in damaged_pins:
        print(f"pin {pin.name}: {printable(pin.problem)}")


def _report(
    sample: float,
    findings: Findings,
    defects: Sequence[Defect],
    damaged_pins: Sequence[StoredPin],
    outcomes: Sequence[RepairOutcome],
) -> dict[str, Any]:
    return {
        "sample": sample,
        "commits": findings.commits,
        "objects": findings.objects,
        "objects_shared": findings.shared,
        "bytes": findings.size_bytes,
        "bytes_read": findings.read_bytes,
        "defects": [{**place(defect.ref), "problem": defect.problem} for defect in defects],
        "damaged_pins": [{"name": pin.name, "problem": pin.problem} for pin in damaged_pins],
        "repairs": [
            {
                "key": outcome.key,
                "size_bytes": outcome.size_bytes,
                "repaired": not outcome.problem,
                "problem": outcome.problem or None,
                "origin": outcome.origin or None,
                "commits": [place(ref) for ref in outcome.commits],
            }
            for outcome in outcomes
        ],
    }
