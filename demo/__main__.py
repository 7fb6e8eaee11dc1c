# SPDX-License-Identifier: Apache-2.0
"""The demo: a spot VM is lost, and another one resumes; ``make demo`` runs it.

``python -m demo --store auto|s3|gcs|file --cloud aws|gcp|azure --signal none|usr1``.  With ``--handover``
the other VM starts before the first one is lost; ``--mirror`` loses a region.

The exit code is 0 if all promises were kept, 1 if not, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
import sys

from demo.region import lose_region
from demo.scenario import CLOUDS, STORES, Broken, play
from demo.screen import Screen


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="Lose a spot VM during training and resume on another VM.",
    )
    parser.add_argument(
        "--store",
        choices=("auto", *STORES),
        default="auto",
        help="kind of store; auto: the store of the cloud",
    )
    parser.add_argument("--cloud", choices=tuple(CLOUDS), default="aws", help="emulated cloud")
    parser.add_argument(
        "--signal", choices=("none", "usr1"), default="none", help="usr1: a trainer without hooks"
    )
    parser.add_argument(
        "--mirror",
        action="store_true",
        help="lose the region of AWS, and resume on GCP from the mirror",
    )
    parser.add_argument(
        "--handover", action="store_true", help="start the second VM while the first one trains"
    )
    options = parser.parse_args()
    by_signal = options.signal == "usr1"
    others = (options.store, options.cloud, options.signal, options.handover)
    if options.mirror and others != ("auto", "aws", "none", False):
        parser.error("--mirror goes from S3 on AWS to GCS on GCP: remove the other options")
    if options.handover and by_signal:
        parser.error("--handover needs hooks: a trainer without them does not wait")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with Screen() as screen:
        try:
            if options.mirror:
                return int(not lose_region(screen))
            kept = play(
                screen,
                options.cloud,
                options.store,
                by_signal=by_signal,
                handover=options.handover,
            )
            return int(not kept)
        except Broken as broken:
            screen.fault(str(broken), broken.lines)
            return 1
        except KeyboardInterrupt:
            screen.fault("interrupted; all processes ended and all files were removed", [])
            return 130


if __name__ == "__main__":
    sys.exit(main())
