# SPDX-License-Identifier: Apache-2.0
"""``python -m demo --store auto|s3|gcs|file --cloud aws|gcp --signal none|usr1``; ``make demo`` runs it.

Exit code 0 when all was as promised, 1 when it was not, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
import sys

from demo.scenario import CLOUDS, STORES, Broken, play
from demo.screen import Screen


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m demo", description="Lose a spot VM in the middle of training, and go on."
    )
    parser.add_argument("--store", choices=("auto", *STORES), default="auto", help="of the cloud")
    parser.add_argument("--cloud", choices=tuple(CLOUDS), default="aws")
    parser.add_argument("--signal", choices=("none", "usr1"), default="none", help="no hooks")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    by_signal = options.signal == "usr1"
    with Screen() as screen:
        try:
            return int(not play(screen, options.cloud, options.store, by_signal=by_signal))
        except Broken as broken:
            screen.fault(str(broken), broken.lines)
            return 1
        except KeyboardInterrupt:
            screen.fault("interrupted; every process is ended and nothing is left behind", [])
            return 130


if __name__ == "__main__":
    sys.exit(main())
