# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML file without scripts, which loads nothing.

All texts go through the escaping of the template engine: run names, reasons and phases come from the bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from swansong_bucket.format.farewell import Fact
from swansong_bucket.model import Verdict

from swansong_tools.report import drawing, run_report
from swansong_tools.report.lanes import RESUMING
from swansong_tools.report.run_report import RunReport
from swansong_tools.units import counted, human_bytes, human_s, human_span, minute, second

COMMITS_SHOWN = 12
"""Commits in the table; the picture has more."""
FACTS_CHARS_MAX = 400
ENTRIES_SHOWN = 100
"""Entries of a timeline in the table."""


def html(report: RunReport) -> str:
    """The page."""
    verdicts = Counter(story.recorded.verdict for story in report.stories)
    return _template().render(
        report=report,
        verdicts={verdict: verdicts[verdict] for verdict in Verdict if verdict in verdicts},
        run_report=run_report,
        drawing=drawing,
        part_names=PART_NAMES,
        commits_shown=COMMITS_SHOWN,
        entries_shown=ENTRIES_SHOWN,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("swansong_tools.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": human_bytes,
        "counted": counted,
        "span": human_span,
        "short": human_s,
        "minute": minute,
        "second": second,
        "pct": _percentage,
        "ratio": _ratio,
        "facts": _facts,
    }
    return environment.get_template("page.html.j2")


def _facts(facts: Mapping[str, Fact]) -> str:
    """Facts of a timeline, cut to a length that no writer of the bucket can exceed."""
    text = ", ".join(f"{name}={value}" for name, value in facts.items())
    return text if len(text) <= FACTS_CHARS_MAX else f"{text[:FACTS_CHARS_MAX]}..."


def _ratio(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2%}"


def _percentage(share: float) -> str:
    """A position of a picture."""
    return f"{100 * share:.3f}%"


PART_NAMES = {
    "stall": ("Stall", "Training stood still for the checkpoints of the evacuation."),
    "redone": ("Redone", "Training time of steps that had to be done again."),
    **RESUMING,
    "unknown": ("Unknown", "The resume was not recorded."),
}
