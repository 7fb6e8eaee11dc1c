# SPDX-License-Identifier: Apache-2.0
"""Write the reference pages and the example configuration: ``python -m testkit.reference [--check]``.

With ``--check`` nothing is written, and the exit code is 1 if a file differs from the declarations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from testkit import REPOSITORY
from testkit.reference import (
    alerts,
    commands,
    configuration,
    doctor,
    faults,
    log_events,
    metrics,
    status,
)

FILES: dict[str, Callable[[], str]] = {
    "docs/reference/configuration.md": configuration.page,
    "docs/reference/metrics.md": metrics.page,
    "docs/reference/commands.md": commands.page,
    "docs/reference/alerts.md": alerts.page,
    "docs/reference/log-events.md": log_events.page,
    "docs/reference/doctor.md": doctor.page,
    "docs/reference/status.md": status.page,
    "docs/reliability.md": faults.page,
    "daemon/swansongd/swansong.example.toml": configuration.example,
}


def main(*, is_check: bool) -> int:
    stale = []
    for name, render in FILES.items():
        path, text = REPOSITORY / name, render()
        if is_check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            stale.append(name)
        elif not is_check:
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} differs from the declarations in the code; run make docs")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main(is_check="--check" in sys.argv[1:]))
