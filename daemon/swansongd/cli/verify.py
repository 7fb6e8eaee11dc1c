# SPDX-License-Identifier: Apache-2.0
"""``swansong verify``: compare the stored bytes with the manifests."""

from __future__ import annotations

import argparse

from swansongd.cli.common import add_json, add_run, add_step, print_json
from swansongd.cli.opening import opened
from swansongd.cli.progress import ShownCount, ShownProgress
from swansongd.errors import CorruptError
from swansongd.restore.reader import ReadOptions
from swansongd.restore.restore import verify
from swansongd.util.printable import printable

EXAMPLES = {
    "Verify all commits of the configured run.": "swansong verify",
    "Verify one commit before restoring it.": "swansong verify --step 12000",
    "Verify another run and print the findings as JSON.": "swansong verify --run other-run --json",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_step(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    objects = shared = 0

    def on_sharing(count: int, shared_count: int) -> None:
        nonlocal objects, shared
        objects, shared = count, shared_count

    with (
        opened(args) as here,
        ShownCount("reading manifests", is_quiet=args.json) as manifests,
        ShownProgress("verify") as progress,
    ):
        run_name = here.keys.run
        findings = verify(
            here.store,
            here.keys,
            step=args.step,
            manifests=manifests,
            sharing=on_sharing,
            options=ReadOptions(connections=here.connections, progress=progress, stop=here.stop),
        )
    if args.json:
        print_json(
            [
                {
                    "generation": finding.ref.generation,
                    "step": finding.ref.step,
                    "problem": finding.problem,
                }
                for finding in findings
            ]
        )
        return CorruptError.exit_code if findings else 0
    for finding in findings:
        print(f"{finding.ref}: {printable(finding.problem)}")
    if findings:
        raise CorruptError(
            f"verifying run {run_name} failed: {len(findings)} objects are damaged or missing",
            hint="swansong restore skips the commits that reference them",
        )
    print(
        f"all stored bytes of run {run_name} match their manifests: {objects} objects read, "
        f"{shared} of them shared by several commits"
    )
    return 0
