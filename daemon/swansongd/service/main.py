# SPDX-License-Identifier: Apache-2.0
"""The ``swansongd`` command: run the daemon, under systemd as a rule."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog
from swansong_bucket.errors import DAEMON_EXIT_CODES, EXIT_CODES, ConfigError, SwansongError
from swansong_bucket.util.standard_streams import replace_closed

import swansongd
from swansongd.config.config import DEFAULT_PATH, load
from swansongd.host import capabilities
from swansongd.observe import log
from swansongd.service import storage
from swansongd.service.service import Service
from swansongd.staging.scan import OWN_DIRECTORY
from swansongd.trainers import users

_EPILOG = """\
examples:
  # Start the daemon as a service.
  sudo systemctl start swansongd
  # Check a changed configuration, then continue with it.  A wrong one changes nothing.
  sudo systemctl reload swansongd
  # Run it in a terminal with another configuration.
  swansongd --config swansong.toml

exit codes:
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run until stopped, then exit immediately, even if a thread still blocks in a request."""
    replace_closed()
    parser = argparse.ArgumentParser(
        prog="swansongd",
        description="Upload the checkpoints of a training run before this VM is terminated.",
        epilog=_EPILOG + "\n".join(f"  {code:<3} {EXIT_CODES[code]}" for code in DAEMON_EXIT_CODES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=DEFAULT_PATH,
        metavar="FILE",
        help=f"configuration file (default {DEFAULT_PATH})",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only check the configuration, its users and the addresses of its stores",
    )
    parser.add_argument("--version", action="version", version=swansongd.__version__)
    args = parser.parse_args(argv)
    try:
        code = _check(args.config) if args.check else _run(args.config)
    except SwansongError as error:
        _complain(error)
        code = error.exit_code
    log.flush(1.0)
    sys.stdout.flush()
    os._exit(code)


def _check(path: Path) -> int:
    """Whether a daemon would start with this configuration; sends no request, and writes nothing."""
    config = load(path)
    users.uids_of(config.trainer.users)
    storage.open_stores(config, config.staging.path / config.run.name / OWN_DIRECTORY)
    print(f"{path} is valid")
    return 0


def _run(path: Path) -> int:
    capabilities.keep_from_children()
    config = load(path)
    log.configure(config.log.format, config.log.level)
    return Service(config).run()


def _complain(error: SwansongError) -> None:
    """Log one line per problem, also before logging is configured."""
    if not structlog.is_configured():
        log.configure("console", "info")
    logger = structlog.get_logger(__name__)
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    for problem in problems:
        logger.error("cannot_start", problem=problem)
    if error.hint:
        logger.error("cannot_start", hint=error.hint)


if __name__ == "__main__":
    main()
