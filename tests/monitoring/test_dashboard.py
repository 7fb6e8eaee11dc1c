# SPDX-License-Identifier: Apache-2.0
"""The dashboard: Grafana's own schema accepts it, and each panel explains figures that exist.

No registry has a Grafana to load it into.  The models of grafana-foundation-sdk are generated from the schema
of Grafana, and a key that Grafana would ignore does not survive them.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit import REPOSITORY

from .tables import LABELS_OF_ALL, MONITORING, OF_OTHERS, metrics_of, promtool, selectors, tables

DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana/swansong.json").read_text())
PANELS: list[dict[str, Any]] = [each for each in DASHBOARD["panels"] if each["type"] != "row"]
FINDINGS = runpy.run_path(str(REPOSITORY / "tests/check_prose.py"))["findings"]
WIDTH = 24


def expressions() -> Iterator[tuple[str, str]]:
    """The title and the expression of each query."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


def lost(written: Any, read: Any, path: str = "") -> Iterator[str]:
    """Each value that did not survive."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            if key in read:
                yield from lost(value, read[key], f"{path}/{key}")
            else:
                yield f"{path}/{key}"
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for number, (one, other) in enumerate(zip(written, read, strict=True)):
            yield from lost(one, other, f"{path}/{number}")
    elif written != read:
        yield f"{path}: {written} became {read}"


def through_grafanas_models(dashboard: dict[str, Any]) -> Any:
    """The dashboard as the models of Grafana 11 read and write it."""
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(json.loads(json.dumps(dashboard)))))


def test_grafanas_schema_has_each_key_of_the_dashboard() -> None:
    """A misspelt option would be ignored, and the panel would look wrong."""
    assert list(lost(DASHBOARD, through_grafanas_models(DASHBOARD))) == []


def test_each_panel_has_a_title_a_description_and_a_unit() -> None:
    """A reader at 3 a.m. sees the meaning of a figure in the panel itself."""
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(set(titles)) == len(titles)
    for panel in PANELS:
        text = panel["description"]
        assert text.endswith("."), panel["title"]
        assert not list(FINDINGS("panel.md", f"{text}\n")), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_panels_have_their_own_ids_and_places() -> None:
    """Grafana moves panels that overlap."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                other = taken.setdefault((x, y), panel["title"])
                assert other == panel["title"], f"{panel['title']} covers {other}"


def test_each_metric_of_a_panel_is_in_the_tables() -> None:
    """No panel stays empty because nothing exports its series, or its label."""
    known = tables()
    for title, expression in expressions():
        used = metrics_of(expression)
        assert used, title
        assert used <= known.names | OF_OTHERS, title
        for metric, labels in selectors(expression):
            assert labels <= known.labels.get(metric, frozenset()) | LABELS_OF_ALL, title


def test_the_colours_fit_a_light_and_a_dark_page() -> None:
    """Grafana's named colours differ between its themes; a colour by number would not."""
    text = json.dumps(DASHBOARD)
    assert not re.search(r'"#[0-9a-fA-F]{3,8}"|rgba?\(', text)


def test_no_panel_counts_drills_as_evacuations() -> None:
    """A drill each day would hide the share of the evacuations that ended PARTIAL or LOST."""
    known = tables()
    seen = set()
    for title, expression in expressions():
        for metric in metrics_of(expression):
            if "drill" in known.labels.get(metric, ()):
                seen.add(title)
                count = len(re.findall(rf"\b{metric}\b", expression))
                assert count == len(
                    re.findall(rf'\b{metric}\{{[^}}]*drill="no"[^}}]*\}}', expression)
                ), title
    assert seen == {"Runs", "Verdicts", "Newest verdict"}


@pytest.mark.parametrize(
    ("finished", "last_step_s", "counts"),
    [(0, 86_000, True), (1, 86_000, False), (0, 79_000, False)],
    ids=["in training", "finished", "abandoned"],
)
def test_the_lowest_ettr_is_that_of_a_run_in_training(
    tmp_path: Path, finished: int, last_step_s: int, counts: bool
) -> None:
    """Neither a finished run nor an abandoned one sets the tile for months."""
    names = ("ettr_last_hour_ratio", "finished", "last_step_timestamp_seconds")
    series = [
        {"series": f'swansong_run_{name}{{run="{run}", store="s"}}', "values": f"{value}x1440"}
        for run, values in (("a", (0.98, 0, 86_300)), ("b", (0.25, finished, last_step_s)))
        for name, value in zip(names, values, strict=True)
    ]
    expression = dict(expressions())["ETTR of the last hour"].replace("$run", ".*")
    sample = {"labels": "{}", "value": 0.25 if counts else 0.98}
    query = {"expr": expression, "eval_time": "1d", "exp_samples": [sample]}
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [query]}
    path = tmp_path / "ettr_test.yml"
    path.write_text(json.dumps({"tests": [test]}))
    promtool("test", "rules", str(path))


def test_all_panels_follow_the_variables() -> None:
    """Except for alerts and for the exporter itself, each query selects the chosen runs and VMs."""
    for title, expression in expressions():
        of_runs = {name for name in metrics_of(expression) if not name.startswith("swansong_exp")}
        for metric in of_runs - OF_OTHERS:
            count = len(re.findall(rf"\b{metric}\b", expression))
            chosen = len(re.findall(rf'\b{metric}\{{run=~"\$run"', expression))
            assert count == chosen, f"{title}: {metric}"
            if not metric.startswith("swansong_run_") and 'instance=~"$instance"' not in expression:
                assert "instance" not in expression, title
