# SPDX-License-Identifier: Apache-2.0
"""The metrics of the daemon and of the exporter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from swansong_tools.exporter import run_metrics as exporter
from swansongd.observe import daemon_families as daemon
from swansongd.observe.families import Family

from testkit.reference.markup import filled, table


def of_exporter() -> Iterator[Family]:
    """The families of the exporter, with the labels that many share."""
    for shared, families in (
        (("run", "store"), exporter.OF_RUNS),
        (("store",), exporter.OF_STORES),
    ):
        for each in families:
            yield replace(each, labels=(*shared, *each.labels))
    yield exporter.BUILD_INFO


def page() -> str:
    """docs/reference/metrics.md."""
    families = list(of_exporter())[len(exporter.OF_RUNS) :]
    return filled(
        "metrics.md",
        daemon="\n\n".join(
            f"### {title}\n\n{_families(each)}" for title, each in daemon.SUBJECTS.items()
        ),
        daemon_labels=_labels(daemon.LABELS),
        runs=_families(exporter.OF_RUNS),
        exporter=_families(families),
        exporter_labels=_labels(exporter.LABELS),
    )


def _families(families: Iterable[Family]) -> str:
    rows = (
        (f"`{each.name}`", each.kind, ", ".join(f"`{label}`" for label in each.labels), each.help)
        for each in families
    )
    return table(("name", "type", "labels", "meaning"), rows)


def _labels(labels: Mapping[str, str]) -> str:
    return table(
        ("label", "meaning"), ((f"`{label}`", meaning) for label, meaning in labels.items())
    )
