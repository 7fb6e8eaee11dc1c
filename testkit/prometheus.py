# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus of Debian on loopback, which scrapes each second."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from testkit.rig import Lines

INTERVAL = "1s"


def check_metrics(exposition: bytes) -> None:
    """Expect that ``promtool check metrics`` prints nothing."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing: install the package prometheus")
    checked = subprocess.run(
        [promtool, "check", "metrics"],
        input=exposition,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


class Prometheus:
    """A Prometheus with one target for each job.

    Args:
        directory: an existing directory for its configuration and its data.
        targets: host and port by job; the label ``instance`` is the job with a number.
        rules: a file of rules.
    """

    def __init__(self, directory: Path, targets: Mapping[str, str], rules: Path) -> None:
        config = {
            "global": {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {
                    "job_name": job,
                    "honor_labels": True,
                    "scrape_timeout": INTERVAL,
                    "static_configs": [{"targets": [target], "labels": {"instance": f"{job}-1"}}],
                }
                for job, target in targets.items()
            ],
        }
        file = directory / "prometheus.json"
        file.write_text(json.dumps(config))  # JSON is valid YAML as well
        program = shutil.which("prometheus")
        assert program is not None, "apt-get install prometheus"
        reads, writes = os.pipe()
        with open(writes, "wb") as pipe:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={file}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    "--web.listen-address=127.0.0.1:0",
                    "--log.format=json",
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=pipe,
            )
        self.lines = Lines(reads)
        self.url = f"http://{self.lines.wait(msg='Listening on')['address']}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query.

        Raises:
            ValueError: Prometheus cannot parse or evaluate the expression.
        """
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def had(self, expression: str, *, within_s: float = 60.0) -> bool:
        """Whether an expression had a value at any time of the last seconds, as a graph shows it.

        Raises:
            ValueError: Prometheus cannot parse or evaluate the expression.
        """
        now_s = time.time()
        times = {"start": f"{now_s - within_s}", "end": f"{now_s}", "step": "1"}
        return bool(self._get("query_range", query=expression, **times)["result"])

    def firing(self) -> dict[str, dict[str, Any]]:
        """The labels and annotations of the alerts that fire, by name."""
        return {
            alert["labels"]["alertname"]: alert
            for alert in self._get("alerts")["alerts"]
            if alert["state"] == "firing"
        }

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode()) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self.lines.drained()
