# SPDX-License-Identifier: Apache-2.0
"""The rules for Prometheus: promtool accepts and tests them, and operators find each alert in the docs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from swansong_bucket.errors import ConfigError
from swansong_tools.exporter import readings

from testkit import REPOSITORY
from testkit.reference.alerts import RULES

from .tables import LABELS_OF_ALL, OF_OTHERS, PROMETHEUS, metrics_of, promtool, selectors, tables

TESTS = sorted(PROMETHEUS.glob("*_test.yml"))
FINDINGS = runpy.run_path(str(REPOSITORY / "tests/check_prose.py"))["findings"]


def groups() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
    return found


def rules(kind: str) -> dict[str, dict[str, Any]]:
    """All rules of a kind, ``alert`` or ``record``, by name."""
    found = [rule for group in groups() for rule in group["rules"] if kind in rule]
    assert len({rule[kind] for rule in found}) == len(found)
    return {rule[kind]: rule for rule in found}


ALERTS = rules("alert")


def test_promtool_accepts_the_rules_and_the_example() -> None:
    """Neither an error nor a rule that prometheus would refuse."""
    promtool("check", "rules", RULES.name)
    promtool("check", "config", "scrape.example.yml")


@pytest.mark.fault("OM05", "OM06")
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_promtool_passes_the_tests_of_the_rules(path: Path) -> None:
    """Each alert fires when it should, with its texts, and at no other time."""
    promtool("test", "rules", path.name)


def test_each_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    """A rule that always fires fails a test, and so does a rule that never fires."""
    cases = [
        (case["alertname"], bool(case.get("exp_alerts")))
        for path in TESTS
        for each in yaml.safe_load(path.read_text())["tests"]
        for case in each["alert_rule_test"]
    ]
    assert set(cases) == {(name, fires) for name in ALERTS for fires in (True, False)}


def test_each_metric_of_a_rule_is_in_the_tables() -> None:
    """No rule waits for a series that nothing exports, or for a label that it does not have."""
    known = tables()
    recorded = set(rules("record"))
    for name, rule in (ALERTS | rules("record")).items():
        used = metrics_of(rule["expr"])
        assert used, name
        assert used <= known.names | recorded | OF_OTHERS, name
        for metric, labels in selectors(rule["expr"]):
            assert labels <= known.labels.get(metric, frozenset()) | LABELS_OF_ALL, name


def test_each_alert_has_a_severity_a_first_command_and_its_page() -> None:
    """At 3 a.m. a person reads the consequence, types the command and opens the page."""
    for name, alert in ALERTS.items():
        assert alert["labels"].keys() == {"severity"}
        texts = alert["annotations"]
        assert texts["runbook_url"] == f"docs/reference/alerts.md#{name.lower()}"
        assert "First command" in texts["description"], name
        assert "$labels" in texts["summary"], name
        assert not texts["summary"].endswith("."), name


@pytest.mark.parametrize(
    ("page", "files"),
    [
        ("docs/operations/monitoring.md", ["swansong.prom", "swansong-exporter.prom"]),
        ("daemon/swansongd/swansong.example.toml", ["swansong.prom"]),
    ],
)
def test_the_alerts_on_the_textfile_watch_the_file_of_the_daemon_only(
    page: str, files: list[str]
) -> None:
    """The file of a timer is often older than a minute, and must not page."""
    text = (REPOSITORY / page).read_text()
    written = re.findall(r'^(?:# )?textfile = "(.*?)"|\bmv \S+ (\S+\.prom)$', text, re.MULTILINE)
    paths = ["".join(groups) for groups in written]
    assert [path.rpartition("/")[2] for path in paths] == files
    for alert in ("SwansongTextfileOld", "SwansongTextfileGone"):
        patterns = re.findall(r'file=~"(.*?)"', ALERTS[alert]["expr"])
        assert patterns
        for pattern in patterns:
            for path, file in zip(paths, files, strict=True):
                is_watched = re.fullmatch(pattern.replace(r"\\", "\\"), path) is not None
                assert is_watched == (file == "swansong.prom")


def test_the_docs_name_the_alert_of_a_daemon_that_refuses_its_configuration() -> None:
    """Such a daemon has no textfile, so its age tells nothing."""
    text = (REPOSITORY / "docs/operations/monitoring.md").read_text()
    (line,) = re.findall(r"^A daemon that ends by itself.*$", text, re.MULTILINE)
    assert f"exit code {ConfigError.exit_code} " in line
    assert "SwansongTextfileGone" in line


@pytest.mark.parametrize("name", ["SwansongEvacuationLost", "SwansongEvacuationPartial"])
def test_the_exporter_reads_an_idle_run_twice_while_an_alert_looks_back(name: str) -> None:
    """A run that was idle for days ends in an evacuation: its alert must not be over at the reading."""
    window = re.search(
        r"time\(\) - swansong_run_last_evacuation_timestamp_seconds\{[^}]*\}\) < (\d+)",
        ALERTS[name]["expr"],
    )
    assert window
    assert int(window[1]) >= 2 * readings.IDLE_S_MAX


def test_the_texts_of_the_alerts_are_plain_english() -> None:
    """The rules of the docs hold for texts that people read at night."""
    for name, alert in ALERTS.items():
        for text in alert["annotations"].values():
            plain = re.sub(r"\{\{.*?\}\}", "X", text)
            assert not list(FINDINGS("alert.md", f"{plain}\n")), name
