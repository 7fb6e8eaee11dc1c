# SPDX-License-Identifier: Apache-2.0
"""The metrics that the code declares, and those that an expression names."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from swansongd.observe.daemon_families import FAMILIES

from testkit import REPOSITORY
from testkit.reference.metrics import of_exporter

MONITORING = REPOSITORY / "monitoring"
PROMETHEUS = MONITORING / "prometheus"
OF_OTHERS = {"up", "ALERTS", "node_textfile_mtime_seconds"}
"""Metrics of Prometheus itself and of node_exporter."""
LABELS_OF_ALL = {"run", "store", "job", "instance", "le", "alertname", "alertstate", "file"}
_WORD = re.compile(r"[a-zA-Z_:][\w:]*")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")


@dataclass(frozen=True)
class Table:
    """All metrics of the daemon and of the exporter."""

    names: frozenset[str]
    """As queries use them: a histogram has three."""
    labels: dict[str, frozenset[str]]


def tables() -> Table:
    """The declared metrics."""
    labels: dict[str, frozenset[str]] = {}
    for each in (*FAMILIES, *of_exporter()):
        suffixes = ("_bucket", "_sum", "_count") if each.kind == "histogram" else ("",)
        for suffix in suffixes:
            labels[each.name + suffix] = frozenset(each.labels)
    return Table(frozenset(labels), labels)


def metrics_of(expression: str) -> set[str]:
    """The names of metrics in an expression, also those that were recorded."""
    bare = re.sub(r'"[^"]*"', "", expression)
    return {
        word
        for word in _WORD.findall(bare)
        if word.startswith("swansong_") or ":swansong_" in word or word in OF_OTHERS
    }


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric that is selected by labels, and these labels."""
    for name, inner in _SELECTOR.findall(expression):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inner))


def tool(name: str, package: str = "prometheus") -> str:
    """Path of a program of a package of Debian."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: apt-get install {package}")
    return path


def promtool(*arguments: str) -> None:
    """Expect that promtool succeeds, in the directory of the rules."""
    command = [tool("promtool"), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=PROMETHEUS, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
