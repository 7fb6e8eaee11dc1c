# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus watches a VM that stops to answer, and then a daemon that is killed after its verdict."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from testkit.fake_nvml import has_compiler
from testkit.waiting import until
from testkit.warm import python_of
from testkit.watched_run import RUN, watched_run

from .tables import tool


def test_the_alerts_of_a_vm_that_ends_without_a_notice_and_of_a_killed_daemon(
    tmp_path: Path,
) -> None:
    """The first names the command within a minute.  The alert about a verdict survives SIGKILL and a restart.

    No verdict yet is not the same as another verdict.
    """
    tool("prometheus")
    if not has_compiler():
        pytest.skip("no C compiler: apt-get install gcc libc6-dev")
    warm = python_of(os.environ["SWANSONG_TEST_WARM"], "swansongd")
    with watched_run(tmp_path, warm=warm) as watched:
        prometheus = watched.prometheus
        until(lambda: prometheus.query("swansong_trainers_connected == 1"), what="the trainer")
        os.kill(watched.daemon.pid, signal.SIGSTOP)
        dead = until(lambda: prometheus.firing().get("SwansongVmDead"), what="the alert")
        os.kill(watched.daemon.pid, signal.SIGCONT)
        assert (dead["labels"]["run"], dead["labels"]["instance"]) == (RUN, "swansong-1")
        assert "--instance-id swansong-1" in dead["annotations"]["description"]
        until(lambda: "SwansongVmDead" not in prometheus.firing(), what="the end of the alert")

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
