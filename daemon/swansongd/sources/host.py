# SPDX-License-Identifier: Apache-2.0
"""What a SIGTERM means: the host goes down, or an operator stops the daemon.

systemd sends the same signal for both.  Its own state tells them apart.  Where systemd is not in charge
(a container, a plain process) whoever sends SIGTERM is about to take everything down, so it is a
notice; SIGINT is for people.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from swansongd.model import DeadlineQuality, Notice, Severity

NAME = "host"
_SYSTEMD = Path("/run/systemd/system")
_TIMEOUT_S = 2.0


def is_host_stopping() -> bool:
    """Whether the whole host is on its way down; may take two seconds.

    When systemd does not answer it is: an answer is what a healthy host would give.
    """
    if not _SYSTEMD.is_dir():
        return True
    try:
        answer = subprocess.run(
            ["/usr/bin/systemctl", "is-system-running"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    return answer.stdout.strip() in ("stopping", "offline", "")


def shutdown_notice(*, now_mono_s: float, grace_s: float) -> Notice:
    """The notice that a SIGTERM from the host is.

    Args:
        grace_s: how long the stop may take, by ``deadline.sigterm_grace_s``.
    """
    return Notice(
        source=NAME,
        kind="os-shutdown",
        identity=f"{NAME}:sigterm",
        severity=Severity.SHUTTING_DOWN,
        deadline_mono_s=now_mono_s + grace_s,
        deadline_quality=DeadlineQuality.ASSUMED,
        detail="SIGTERM",
    )
