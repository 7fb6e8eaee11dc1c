# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus watches a daemon that is killed after its verdict, with the rules that we ship."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testkit.fake_nvml import has_compiler
from testkit.waiting import until
from testkit.warm import python_of
from testkit.watched_run import watched_run

from .tables import tool


def test_an_alert_about_a_verdict_survives_the_daemon(tmp_path: Path) -> None:
    """After SIGKILL and a restart it fires on: no verdict yet is not the same as another verdict."""
    tool("prometheus")
    if not has_compiler():
        pytest.skip("no C compiler: apt-get install gcc libc6-dev")
    warm = python_of(os.environ["SWANSONG_TEST_WARM"], "swansongd")
    with watched_run(tmp_path, warm=warm) as watched:
        prometheus = watched.prometheus
        watched.evacuate_during_an_outage()
        until(lambda: prometheus.firing().get("SwansongEvacuationPartial"), what="the alert")
        (before,) = prometheus.query("swansong_start_timestamp_seconds")
        watched.aws.withdraw()
        watched.kill_the_daemon()
        is_next = f"swansong_start_timestamp_seconds > {before['value'][1]}"
        several = f"count_over_time(({is_next})[1m:1s]) > 10"
        until(lambda: prometheus.query(several), what="several scrapes of the next daemon")
        assert not prometheus.query("swansong_last_verdict")
        assert "SwansongEvacuationPartial" in prometheus.firing()
