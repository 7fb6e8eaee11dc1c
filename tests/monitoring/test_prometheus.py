# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus scrapes a real daemon through two evacuations, with the rules and panels that we ship."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from testkit.fake_nvml import has_compiler
from testkit.prometheus import Prometheus
from testkit.waiting import until
from testkit.warm import python_of
from testkit.watched_run import RUN, WatchedRun, watched_run

from .tables import MONITORING, tool

VARIABLES = {"$run": ".*", "$instance": ".*", "$__rate_interval": "5s", "$__range": "1m"}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedRun]:
    """A run after an evacuation that ended SAFE and one that ended PARTIAL."""
    tool("prometheus")
    if not has_compiler():
        pytest.skip("no C compiler: apt-get install gcc libc6-dev")
    warm = python_of(os.environ["SWANSONG_TEST_WARM"], "swansongd")
    with watched_run(tmp_path_factory.mktemp("watched"), warm=warm) as run:
        one(run.prometheus, 'swansong_evacuation_margin_seconds{notice="aws.spot"} > 0')
        run.evacuate()
        one(run.prometheus, 'swansong_last_verdict{verdict="SAFE"} == 1')
        one(run.prometheus, 'swansong_run_evacuations_total{verdict="SAFE"} == 1')
        run.evacuate_during_an_outage()
        yield run


def one(prometheus: Prometheus, expression: str) -> dict[str, Any]:
    """The only series of an expression; waits for it."""
    (series,) = until(lambda: prometheus.query(expression), what=expression, every_s=0.2)
    return series


def test_the_alert_of_a_partial_evacuation_fires_with_its_texts(watched: WatchedRun) -> None:
    """Within seconds of the verdict a person has the run, the consequence and the first command."""
    found = until(
        lambda: watched.prometheus.firing().get("SwansongEvacuationPartial"), what="the alert"
    )
    assert found["labels"]["run"] == RUN
    assert found["labels"]["severity"] == "ticket"
    assert found["annotations"]["summary"] == f"Run {RUN}: an evacuation ended PARTIAL"
    assert "First command" in found["annotations"]["description"]
    assert "SwansongEvacuationLost" not in watched.prometheus.firing()


def test_the_recorded_series_exist(watched: WatchedRun) -> None:
    """Each recording rule has a value; a run without a resumption has a loss of 0."""
    for name in (
        "run:swansong_trainers_connected:sum",
        "run:swansong_replication_lag_seconds:min",
        "run:swansong_commit_limit_seconds:max",
        "run:swansong_preemption_loss_gpu_seconds:last1h",
    ):
        one(watched.prometheus, f'{name}{{run="{RUN}"}}')


PANELS = {
    panel["title"]: [target["expr"] for target in panel["targets"]]
    for panel in json.loads((MONITORING / "grafana/swansong.json").read_text())["panels"]
    if panel["type"] != "row"
}


def with_values(expression: str) -> str:
    """The expression with values in place of the variables of the dashboard."""
    for name, value in VARIABLES.items():
        expression = re.sub(re.escape(name) + r"\b", value, expression)
    assert "$" not in expression
    return expression


def test_prometheus_evaluates_each_panel_and_finds_data(watched: WatchedRun) -> None:
    """No expression has an error, and no panel is empty, also for mirror, GPU, notifications and prune."""
    watched.nvml.xid(31)
    one(watched.prometheus, 'swansong_gpu_xid_errors_total{class="application"} == 1')
    empty = []
    for title, expressions in PANELS.items():
        had = [watched.prometheus.had(with_values(expression)) for expression in expressions]
        if not any(had):
            empty.append(title)
    assert empty == []
