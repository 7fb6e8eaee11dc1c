# SPDX-License-Identifier: Apache-2.0
"""The meaning of SIGTERM: the host shuts down, or an operator stops the daemon.

systemd sends the same signal for both; the states of logind and systemd distinguish them.  Without systemd
(in a container, for example) SIGTERM usually means that the whole container ends, so it is a notice.
SIGINT never is.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from swansong_bucket.model import DeadlineQuality, Notice, Severity

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
    """Whether the host shuts down; may take a few seconds.  True if systemd does not respond.

    Args:
        bus: D-Bus address of the system bus.
        systemd_directory: exists if systemd is the init system.
        systemctl: path of the command.
    """
    if not systemd_directory.is_dir():
        return True
    try:
        if logind.is_preparing_for_shutdown(bus):
            return True
    except logind.LogindError:
        pass
    # logind does not know of each shutdown.
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
    """The notice for a SIGTERM at the shutdown of the host.

    Args:
        grace_s: time until SIGKILL, ``deadline.sigterm_grace_s``.
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
