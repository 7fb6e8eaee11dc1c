# SPDX-License-Identifier: Apache-2.0
"""The jobs of this VM: each has its own daemon, and its own configuration in ``/etc/swansong``."""

from __future__ import annotations

import os
from pathlib import Path

from swansongd.config.config import DEFAULT_PATH

from swansong_tools.paths import exists


def other_jobs(config: Path) -> list[Path]:
    """The configurations of the other jobs; empty for a configuration in another place.

    Args:
        config: of the job that the command is for; it need not exist.
    """
    jobs = sorted(DEFAULT_PATH.parent.glob(f"*/{DEFAULT_PATH.name}"))
    own = Path(os.path.abspath(config))
    if own == DEFAULT_PATH:
        return jobs
    first = [DEFAULT_PATH] if exists(DEFAULT_PATH) else []
    return [*first, *(job for job in jobs if job != own)] if own in jobs else []
