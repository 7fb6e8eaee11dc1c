# SPDX-License-Identifier: Apache-2.0
"""``swansong takeover``: end the wait for the VM that this one replaces."""

from __future__ import annotations

import argparse

from swansong.protocol import Noted, TakeOver
from swansongd.config.config import load
from swansongd.observe.phase import Phase

from swansong_tools.commands.daemon_client import DaemonClient

NOTES = """\
The caller must be root or the daemon's user.
With run.handover, the daemon waits for a VM that has a notice, or had one that was withdrawn. This command
ends the wait: the trainer here resumes from the newest commit, and the other VM commits nothing any more."""
EXAMPLES = {
    "The other VM hangs, or is not needed any more: continue here.": "sudo swansong takeover"
}
_WAITING = (Phase.AWAITING_HANDOVER, Phase.STANDING_BY)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    with DaemonClient(load(args.config).trainer.socket) as daemon:
        if daemon.status().state not in _WAITING:
            print("this VM waits for no other one: nothing to do")
            return 0
        daemon.request(TakeOver(), Noted)
        daemon.until(lambda status: status.state not in _WAITING)
    print("took the run over")
    return 0
