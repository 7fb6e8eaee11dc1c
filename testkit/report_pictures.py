# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/operations/report.md: ``python -m testkit.report_pictures``.  Needs chromium."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from swansong_bucket.format.keys import RunKeys
from swansong_bucket.runs import history
from swansong_bucket.runs.run import Run
from swansong_tools.report import page, run_report

from testkit import REPOSITORY, past_run
from testkit.memory_store import MemoryStore

EVACUATION_TOP = 1825
"""Top of the picture of the older evacuation on the page, in pixels."""
TARGET = REPOSITORY / "docs" / "operations" / "pictures"
VIEW = """<!DOCTYPE html><body style="margin: 0; overflow: hidden">
<iframe src="report.html" style="border: 0; width: {width}px; height: 6000px; margin-top: -{top}px">
</iframe></body>"""


def main() -> None:
    """Write both pictures."""
    store = MemoryStore()
    past_run.write(store)
    found = history.read(Run.listed(store, RunKeys(past_run.RUN)))
    made = run_report.report(
        found,
        run=past_run.RUN,
        store_url="s3://bucket/runs",
        written_wall_s=past_run.BEGUN_S + 50000,
    )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "report.html").write_text(page.html(made))
        _shoot(directory, "evacuation", width=760, top=EVACUATION_TOP, height=715)
        _shoot(directory, "phone", width=360, top=1050, height=760, is_dark=True)


def _shoot(
    directory: Path, name: str, *, width: int, top: int, height: int, is_dark: bool = False
) -> None:
    view = directory / f"{name}.html"
    view.write_text(VIEW.format(width=width, top=top))
    scheme = 0 if is_dark else 1
    # Chromium opens no window narrower than 500 pixels.
    subprocess.run(
        [
            "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--blink-settings=preferredColorScheme={scheme}", f"--user-data-dir={directory}/profile",
            f"--window-size={width},{height}", f"--screenshot={TARGET / name}.png", view.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )  # fmt: skip


if __name__ == "__main__":
    main()
