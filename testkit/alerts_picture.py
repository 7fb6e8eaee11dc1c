# SPDX-License-Identifier: Apache-2.0
"""The picture of Prometheus' alerts in the docs: ``python -m testkit.alerts_picture``.

The page is that of a real Prometheus after an evacuation that ended PARTIAL.  A script opens the active
alerts and hides the others, as a person would do, and headless Chromium takes the picture.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path

from PIL import Image

from testkit import REPOSITORY
from testkit.prometheus import Prometheus
from testkit.waiting import until
from testkit.watched_run import RULES, watched_run

FILE = REPOSITORY / "docs/operations/pictures/alerts.png"
SIZE = "1000,1150"
COLOURS = 48
_SCRIPT = """
<style>pre, tr:has(> td > b) i { display: none !important }</style>
<script>
localStorage.hideInactiveAlerts = "true";
$(() => {
  $(".alert_header:not(.alert-success)").click();
  $("div.show-annotations").click();
  const groups = $("#alertsTable > tbody > tr:not(.alert_header):not(.alert_details)");
  groups.each((_, row) => $(row).toggle($(row).next().is(":visible")));
});
</script></body>"""


def wait_for_the_alerts(prometheus: Prometheus) -> None:
    """Wait until one alert fires and the alert of the failed store is active."""
    until(lambda: prometheus.firing().get("SwansongEvacuationPartial"), what="the alert")
    active = 'ALERTS{alertname="SwansongStoreDown"}'
    until(lambda: prometheus.query(active), what="the alert of the store")


def take(prometheus: Prometheus, file: Path) -> None:
    """Write the picture of the active alerts."""
    with urllib.request.urlopen(f"{prometheus.url}/classic/alerts", timeout=30) as answer:
        page = answer.read().decode()
    page = page.replace("<head>", f'<head><base href="{prometheus.url}/">', 1)
    page = page.replace(f"{RULES.parent}/", "").replace("</body>", _SCRIPT)
    chromium = shutil.which("chromium")
    assert chromium is not None, "apt-get install chromium"
    with tempfile.TemporaryDirectory() as directory:
        saved = Path(directory) / "alerts.html"
        saved.write_text(page)
        options = (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--disable-lcd-text",
        )
        places = (f"--user-data-dir={directory}/profile", f"--screenshot={file}")
        subprocess.run(
            [chromium, *options, *places, f"--window-size={SIZE}", f"file://{saved}"],
            check=True,
            capture_output=True,
            timeout=120,
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, watched_run(Path(directory)) as run:
        run.evacuate_during_an_outage()
        wait_for_the_alerts(run.prometheus)
        FILE.parent.mkdir(exist_ok=True)
        take(run.prometheus, FILE)
    with Image.open(FILE) as picture:
        picture.quantize(COLOURS, dither=Image.Dither.NONE).save(FILE, optimize=True)


if __name__ == "__main__":
    main()
