# SPDX-License-Identifier: Apache-2.0
"""The entry point of ``swansong``.  Loading the commands takes a while, in which an interrupt may arrive."""

from __future__ import annotations

import sys

STOPPED = 9
"""As of :class:`swansong_bucket.errors.Stopped`, which may not be loaded yet."""


def main() -> int:
    """Run the command of ``sys.argv`` and return its exit code."""
    try:
        from swansong_tools.commands.main import main  # noqa: PLC0415 - see above

        return main()
    except KeyboardInterrupt:
        # Before the command handles signals, or in one that can lose nothing.
        print("swansong: stopped by SIGINT", file=sys.stderr)
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
