# SPDX-License-Identifier: Apache-2.0
"""What a SIGTERM means: the host goes down, or an operator stops the daemon.

systemd sends the same signal for both.  logind's state and systemd's own tell them apart.  Where systemd
is not in charge (a container, a plain process) whoever sends SIGTERM is about to take everything down,
so it is a notice; SIGINT is for people.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from swansongd.model import DeadlineQuality, Notice, Severity
from swansongd.sources import logind

NAME = "host"
SYSTEMD_DIRECTORY = Path("/run/systemd/system")
SYSTEMCTL = "/usr/bin/systemctl"
_TIMEOUT_S = 2.0


def is_host_stopping(
    bus: str = logind.SYSTEM_BUS,
    *,
    systemd_directory: Path = SYSTEMD_DIRECTORY,
    systemctl: str = SYSTEMCTL,
) -> bool:
    """Whether the whole host is on its way down; may take a few seconds.

    When systemd does not answer it is: an answer is what a healthy host would give.

    Args:
        bus: D-Bus address of the system bus.
        systemd_directory: exists where systemd is in charge.
        systemctl: the command.
    """
    if not systemd_directory.is_dir():
        return True
    try:
        if logind.is_preparing_for_shutdown(bus):
            return True
    except logind.LogindError:
        pass
    # Not every shutdown goes by way of logind.
    try:
        answer = subprocess.run(  # noqa: S603
            [systemctl, "is-system-running"],
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
