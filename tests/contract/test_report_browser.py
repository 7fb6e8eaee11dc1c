# SPDX-License-Identifier: Apache-2.0
"""The page of ``swansong report`` in a real browser: it fits a phone, requests nothing, and runs nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.runs import history
from swansong_bucket.runs.run import Run
from swansong_tools.report import page, run_report

from testkit import past_run
from testkit.memory_store import MemoryStore

CHROMIUM = shutil.which("chromium")
PHONES_PIXELS = (345, 360)
HARNESS = """<!DOCTYPE html><link rel="icon" href="data:,"><body>
<iframe id="f" src="/report" style="width: %d px; height: 800px; border: 0"></iframe>
<pre id="found"></pre>
<script>
document.getElementById("f").style.width = "%dpx";
document.getElementById("f").onload = function () {
  const page = this.contentDocument, root = page.documentElement;
  const style = this.contentWindow.getComputedStyle(page.body);
  const bars = [...page.querySelectorAll("article svg rect")].map(bar => bar.getBoundingClientRect());
  document.getElementById("found").textContent = JSON.stringify({
    width: root.clientWidth, scroll_width: root.scrollWidth, title: page.title,
    back: style.backgroundColor, text: style.color, pictures: page.querySelectorAll("svg[role=img]").length,
    images: page.images.length, scripts: page.scripts.length,
    outside: bars.filter(bar => bar.left < -1 || bar.right > root.clientWidth + 1).length,
    bars: bars.length,
    texts: page.querySelectorAll("svg text").length,
    clipped: [...page.querySelectorAll("svg text")].filter(text => {
      const box = text.getBoundingClientRect(), svg = text.ownerSVGElement.getBoundingClientRect();
      return box.left < svg.left - 1 || box.right > svg.right + 1
        || box.top < svg.top - 1 || box.bottom > svg.bottom + 1;
    }).map(text => text.textContent),
  });
};
</script></body>"""


@dataclass
class Site:
    """Serves the report and the page that measures it, and notes each request."""

    report: str = ""
    requests: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def site() -> Iterator[Site]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    served = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.requests.append(self.path)
            pages = {"/report": served.report}
            pages |= {f"/harness{width}": HARNESS % (width, width) for width in PHONES_PIXELS}
            body = pages.get(self.path, "").encode()
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    store = MemoryStore()
    past_run.write(store)
    served.report = page.html(
        run_report.report(
            history.read(Run.listed(store, RunKeys(past_run.RUN))),
            run=f'"><img src={served.url}/leak onerror=fetch("/ran")><script>fetch("/ran")</script>',
            store_url=f"s3://bucket/<iframe src={served.url}/frame>",
            written_wall_s=past_run.BEGUN_S + 50000,
        )
    )
    yield served
    server.shutdown()
    server.server_close()


def browse(profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    return subprocess.run(
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--disable-background-networking",
            "--enable-logging=stderr",
            f"--user-data-dir={profile}",
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def measured(site: Site, profile: Path, scheme: str, width: int) -> dict[str, Any]:
    """Measures of the page on a phone."""
    preferred = {"dark": 0, "light": 1}[scheme]
    done = browse(
        profile,
        f"--blink-settings=preferredColorScheme={preferred}",
        "--virtual-time-budget=5000",
        "--dump-dom",
        f"{site.url}/harness{width}",
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    match = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stdout
    found: dict[str, Any] = json.loads(match[1].replace("&lt;", "<").replace("&gt;", ">"))
    return found


def luminance(colour: str) -> float:
    """Relative luminance of a colour such as ``rgb(20, 23, 28)``, by WCAG."""
    channels = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.fault("O41")
def test_the_page_on_a_phone(site: Site, tmp_path: Path) -> None:
    """No horizontal scroll, clipped text, request or script; light and dark differ, and both are legible."""
    light, dark = (
        measured(site, tmp_path, scheme, width)
        for scheme, width in zip(("light", "dark"), PHONES_PIXELS, strict=True)
    )
    for found, width in zip((light, dark), PHONES_PIXELS, strict=True):
        assert found["scroll_width"] <= found["width"] == width
        assert (found["clipped"], found["texts"] > 50) == ([], True)
        assert (found["images"], found["scripts"], found["outside"]) == (0, 0, 0)
        assert (found["pictures"], found["bars"] > 50) == (5, True)
        assert "<script>" in found["title"]  # the run name is a text
        values = sorted((luminance(found["back"]), luminance(found["text"])))
        assert (values[1] + 0.05) / (values[0] + 0.05) > 7
    assert luminance(light["back"]) > 0.9
    assert luminance(dark["back"]) < 0.1
    assert set(site.requests) == {*(f"/harness{width}" for width in PHONES_PIXELS), "/report"}


def test_the_page_on_paper(site: Site, tmp_path: Path) -> None:
    """The browser prints it on a few pages."""
    paper = tmp_path / "report.pdf"
    browse(tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={paper}", f"{site.url}/report")
    data = paper.read_bytes()
    assert data.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 6


CONTRASTS = [
    (text, back)
    for text in ("text", "muted", "safe", "partial", "lost", "link")
    for back in ("back", "panel")
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(scheme: str) -> None:
    """4.5 to 1 on both backgrounds, as WCAG AA asks."""
    style = (Path(page.__file__).parent / "style.css.j2").read_text()
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    block = light if scheme == "light" else dark.split("@media")[0]
    colours = dict(re.findall(r"--(\w+): #([0-9a-f]{6})", block))
    for text, back in CONTRASTS:
        values = sorted(
            luminance(" ".join(str(int(colours[name][i : i + 2], 16)) for i in (0, 2, 4)))
            for name in (text, back)
        )
        assert (values[1] + 0.05) / (values[0] + 0.05) >= 4.5, (text, back)
