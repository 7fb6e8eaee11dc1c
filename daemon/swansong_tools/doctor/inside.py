# SPDX-License-Identifier: Apache-2.0
"""Checks that must run as the daemon: environment, network, metadata, store, staging.

``python -m swansong_tools.doctor.inside`` prints one finding per line, as JSON.
:mod:`swansong_tools.doctor.sandbox` starts it as the daemon.  Another user could create files that the daemon
cannot change.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swansong_bucket.errors import ConfigError
from swansongd.config.config import Config, load
from swansongd.observe import log
from swansongd.sources.detect import detect_cloud

from swansong_tools.doctor import (
    configuration,
    fixes,
    metadata,
    metrics,
    mirror,
    network,
    notifications,
    staging,
    store,
)
from swansong_tools.doctor.accounts import own_account
from swansong_tools.doctor.findings import Check, examine
from swansong_tools.doctor.grace import grace_s


@dataclass(frozen=True, slots=True)
class Options:
    """Facts that the caller passes to these checks."""

    config: Path
    speed: bool
    """Measure the bandwidth to the store."""
    trial: bool
    """Report a store that is lost with the VM as a warning."""
    operator_file: Path | None
    """Credentials in an operator's home, which the daemon does not read."""
    environment_of: str
    """Owner of this process's environment, for messages."""
    send_notification: bool = False
    """Send a test notification."""

    def words(self) -> list[str]:
        """The arguments of the command line."""
        return [
            *("--config", str(self.config), "--environment-of", self.environment_of),
            *(["--speed"] if self.speed else []),
            *(["--trial"] if self.trial else []),
            *(["--send-notification"] if self.send_notification else []),
            *(["--operator-file", str(self.operator_file)] if self.operator_file else []),
        ]


def checks(config: Config, options: Options) -> Iterator[Check]:
    """The checks, causes before consequences."""
    configured = config.sources.cloud
    cloud = detect_cloud() if configured == "auto" else configured
    daemon, whose = own_account(), options.environment_of
    yield Check(
        family=configuration.FAMILY,
        name="environment",
        judge=lambda: configuration.judge_environment(os.environ, whose),
    )
    yield from network.checks(config, cloud)
    yield from metadata.checks(config, cloud)
    yield from store.checks(
        config,
        options.config,
        daemon,
        grace_s=grace_s(config, cloud),
        speed=options.speed,
        trial=options.trial,
        operator_file=options.operator_file,
    )
    yield from mirror.checks(config, options.config)
    yield from staging.checks(config, daemon)
    yield from metrics.textfile_checks(config)
    yield from notifications.checks(config, options.config, send=options.send_notification)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; the exit code is 0 unless the configuration is not valid."""
    parser = argparse.ArgumentParser(prog="swansong_tools.doctor.inside")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--trial", action="store_true")
    parser.add_argument("--send-notification", action="store_true")
    parser.add_argument("--operator-file", type=Path)
    parser.add_argument("--environment-of", required=True)
    options = Options(**vars(parser.parse_args(argv)))
    fixes.choose_unit(options.config)
    log.configure("console", "error")  # to standard error; standard output is for findings
    try:
        config = load(options.config)
    except ConfigError as error:
        print(f"{options.config}: {error}", file=sys.stderr)
        return error.exit_code
    for finding in examine(checks(config, options)):
        print(json.dumps(asdict(finding)), flush=True)
    sys.stdout.flush()
    os._exit(0)  # a check that timed out may have left a blocked thread


if __name__ == "__main__":
    sys.exit(main())
