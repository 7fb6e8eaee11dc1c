# SPDX-License-Identifier: Apache-2.0
"""The glue around a trainer without Swansong: polls for the notice, and uploads the checkpoints.

The poll is the one of AWS: ``spot/instance-action`` every 5 s, with a token.  See
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html.

At the notice the trainer gets its signal.  Uploads run at a fixed interval, and at once when the trainer has
saved for the notice.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

POLL_S = 5.0
SYNC_EVERY_S = 30.0
_LOOK_S = 0.2


def _has_notice(url: str) -> bool:
    """Whether the metadata service has an interruption notice."""
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
    request = urllib.request.Request(f"{url}/latest/api/token", headers=ttl, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            token = {"X-aws-ec2-metadata-token": answer.read().decode()}
        address = f"{url}/latest/meta-data/spot/instance-action"
        with urllib.request.urlopen(urllib.request.Request(address, headers=token), timeout=2):
            return True
    except OSError:  # 404: no notice
        return False


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _poll(url: str, pid: int, number: signal.Signals) -> None:
    while not _has_notice(url):
        time.sleep(POLL_S)
    if not _has_ended(pid):
        os.kill(pid, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--metadata", required=True)
    parser.add_argument("--pid", type=int, required=True, help="process id of the trainer")
    parser.add_argument("--signal", help="signal at the notice, such as SIGTERM")
    parser.add_argument("--saved", type=Path, help="exists once the trainer has saved")
    parser.add_argument("sync", nargs="*", help="command that uploads the checkpoints")
    options = parser.parse_args()
    if options.signal:
        number = signal.Signals[options.signal]
        poller = threading.Thread(target=_poll, args=(options.metadata, options.pid, number))
        poller.start()
    is_saved = False
    while options.sync:
        subprocess.run(options.sync, check=False)
        next_mono_s = time.monotonic() + SYNC_EVERY_S
        while time.monotonic() < next_mono_s:
            if options.signal and not is_saved:
                is_saved = _has_ended(options.pid) or (
                    options.saved is not None and options.saved.exists()
                )
                if is_saved:
                    break
            time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()
