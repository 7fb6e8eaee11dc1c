# SPDX-License-Identifier: Apache-2.0
"""The results file, and the tables made from it.

Every run appends one line of JSON.  So an interrupted benchmark continues, and subsets from different times
share one table.
"""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from bench.transfer.cases import Case, reference_of
from bench.transfer.contestants import CONTESTANTS, OURS

PAGES = Path(__file__).resolve().parents[2] / "docs" / "performance"
"""The pages about one benchmark each; ``performance.md`` next to it has the others."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One contestant's run of one case."""

    case: str
    contestant: str
    repeat: int
    wall_s: float
    size_bytes: int
    files: int
    cpu_s: float
    rss_bytes: int
    foreign_share: float
    """CPU time of all other processes, as a share of one core."""
    is_quiet: bool
    problem: str = ""
    """Why the run does not count; empty if it does."""
    whole_bytes_at_s: Mapping[str, int] = field(default_factory=dict)
    """Bytes in whole objects at the sink, by seconds since the start."""
    faults: Mapping[str, int] = field(default_factory=dict)

    @property
    def bytes_s(self) -> float:
        return self.size_bytes / self.wall_s

    @property
    def cpu_s_a_gb(self) -> float:
        return self.cpu_s / (self.size_bytes / 1e9)


Run = TypeVar("Run", bound=Any)


class ResultsFile(Generic[Run]):
    """All runs so far; threads append new ones to the file.

    Args:
        kind: the dataclass of a run.
    """

    def __init__(self, path: Path, kind: type[Run]) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.results: list[Run] = []
        if path.exists():
            for line in path.read_text().splitlines():
                self.results.append(kind(**json.loads(line)))

    def has(self, **fields: object) -> bool:
        """Whether a run has these values of its fields."""
        return any(
            all(getattr(result, name) == value for name, value in fields.items())
            for result in self.results
        )

    def add(self, result: Run) -> None:
        with self._lock:
            self.results.append(result)
            with open(self._path, "a") as file:
                file.write(json.dumps(asdict(result)) + "\n")


def median_and_spread(values: Sequence[float], form: str) -> str:
    """``2.10 (2.00-2.20)``, or ``2.10`` for a single value."""
    middle = format(statistics.median(values), form)
    if len(values) < 2:
        return middle
    return f"{middle} ({format(min(values), form)}-{format(max(values), form)})"


def of_case(results: Iterable[Result], case: Case) -> dict[str, list[Result]]:
    """Valid runs by contestant, the fastest first."""
    found: dict[str, list[Result]] = {}
    for result in results:
        if result.case == case.name and not result.problem:
            found.setdefault(result.contestant, []).append(result)
    return dict(
        sorted(
            found.items(),
            key=lambda item: -statistics.median(result.bytes_s for result in item[1]),
        )
    )


def ratios(runs: Mapping[str, Sequence[Result]], contestant: str, case: Case) -> list[float]:
    """Speeds relative to the reference in the same repetition."""
    reference = {result.repeat: result for result in runs.get(reference_of(case), ())}
    return [
        result.bytes_s / reference[result.repeat].bytes_s
        for result in runs[contestant]
        if result.repeat in reference
    ]


def markdown(results: Sequence[Result], cases: Sequence[Case]) -> str:
    """One table for each case with results."""
    lines: list[str] = []
    for case in cases:
        runs = of_case(results, case)
        if runs:
            is_faulty, has_tail = case.profile.share_503, case.profile.tail_s_max
            table = _faulty_table if is_faulty else _tail_table if has_tail else _table
            lines += table(runs, case)
        for result in results:
            if result.case == case.name and result.problem:
                lines.append(f"{result.contestant} failed: {result.problem}\n")
    return "\n".join(lines)


def _title(case: Case) -> str:
    profile = case.profile
    title = f"{case.operation.capitalize()} of {case.workload}"
    if profile.is_hashing:
        title += " to GCS, whose sink decrypts everything and returns its CRC32C"
    if profile.rate_bytes_s:
        latency_ms, rate = profile.latency_s * 1e3, profile.rate_bytes_s / 1e6
        per_request = (
            f"{latency_ms:g} ms"
            if not profile.tail_s_max
            else (f"{latency_ms:g} ms to {profile.tail_s_max:g} s (Pareto)")
        )
        title += f", {per_request} per request and {rate:g} MB/s per connection"
    if profile.link_bytes_s:
        title += f", over a link of {profile.link_bytes_s / 1e6:g} MB/s"
    if profile.share_503:
        title += (
            f", {profile.share_503:.1%} of the parts answered with 503,"
            f" {profile.share_stall:.1%} stalled, {profile.share_reset:.1%} reset"
        )
    return f"### {title}\n"


def _table(runs: Mapping[str, Sequence[Result]], case: Case) -> list[str]:
    in_files = case.workload.count >= 100
    unit = "files/s" if in_files else "GB/s"
    lines = [
        _title(case),
        f"| {_repeats(runs)} | {unit} | of {reference_of(case)} | CPU s/GB | RSS, MB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, of_one in runs.items():
        speeds = [r.files / r.wall_s if in_files else r.bytes_s / 1e9 for r in of_one]
        of_reference = ratios(runs, name, case)
        rss_mb = max(r.rss_bytes for r in of_one) / 1e6
        cells = [
            _shown(name, of_one),
            median_and_spread(speeds, ",.0f" if in_files else ".2f"),
            f"{statistics.median(of_reference):.2f}" if of_reference else "",
            f"{statistics.median(r.cpu_s_a_gb for r in of_one):.2f}",
            f"{rss_mb:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _tail_table(runs: Mapping[str, Sequence[Result]], case: Case) -> list[str]:
    lines = [
        _title(case),
        f"| {_repeats(runs)} | p50, s | p90, s | p99, s | longest, s | stored bytes |",
        "| --- " * 6 + "|",
    ]
    for name, of_one in runs.items():
        taken = sorted(result.wall_s for result in of_one)
        cuts = statistics.quantiles(taken, n=100, method="inclusive") if len(taken) > 1 else taken
        sent = statistics.mean(r.size_bytes for r in of_one) / case.workload.total_bytes
        cells = [_shown(name, of_one)]
        cells += [f"{cuts[min(n, len(cuts)) - 1]:.2f}" for n in (50, 90, 99)]
        lines.append(f"| {' | '.join([*cells, f'{taken[-1]:.2f}', f'{sent:.2f}'])} |")
    return [*lines, ""]


def _faulty_table(runs: Mapping[str, Sequence[Result]], case: Case) -> list[str]:
    times = [*next(iter(runs.values()))[0].whole_bytes_at_s]
    heads = [f"GB in whole objects at {time} s" for time in times]
    total_gb = case.workload.total_bytes / 1e9
    lines = [
        _title(case),
        f"| of {total_gb:.1f} GB, {_repeats(runs)} | {' | '.join(heads)} | all stored after | faults |",
        "| --- " * (len(heads) + 3) + "|",
    ]
    for name, of_one in runs.items():
        stored = [statistics.median(r.whole_bytes_at_s[time] for r in of_one) for time in times]
        ends = [r.wall_s for r in of_one if r.size_bytes == case.workload.total_bytes]
        end = f"{median_and_spread(ends, '.0f')} s" if ends else "not within the limit"
        if not ends and of_one[-1].wall_s < float(times[-1]):
            end = f"gave up after {of_one[-1].wall_s:.0f} s"
        met = ", ".join(f"{count} {kind}" for kind, count in of_one[-1].faults.items())
        cells = [
            _shown(name, of_one),
            *(f"{count / 1e9:.1f}" for count in stored),
            end,
            met,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _repeats(runs: Mapping[str, Sequence[Result]]) -> str:
    """``n=3``, or ``n=1-3`` if some contestants have fewer runs."""
    counts = sorted({len(of_one) for of_one in runs.values()})
    return "n=" + "-".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))


def _shown(name: str, of_one: Sequence[Result]) -> str:
    """The name for a table, with the number of runs on a machine that was not idle."""
    noisy = sum(not result.is_quiet for result in of_one)
    shown = f"**{name}**" if name.startswith(OURS) else name
    return f"{shown} ({noisy} noisy)" if noisy else shown


def write_page(name: str, text: str) -> None:
    """Replace the text between the marks of this name, on the page that has them."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    for page in (PAGES.with_suffix(".md"), *PAGES.glob("*.md")):
        before, _, rest = page.read_text().partition(begin)
        _, is_marked, after = rest.partition(end)
        if is_marked:
            page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
            return
    raise SystemExit(f"no page of {PAGES} has the marks {begin} and {end}")


def settings_table(results: Sequence[Result]) -> str:
    """The settings of each contestant."""
    present = {result.contestant for result in results}
    lines = ["| contestant | settings |", "| --- | --- |"]
    lines += [f"| {c.name} | {c.settings} |" for c in CONTESTANTS.values() if c.name in present]
    return "\n".join(lines)
