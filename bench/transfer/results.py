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
from bench.transfer.contestants import OURS
from bench.transfer.sink import FAULTY, TAIL

PAGES = Path(__file__).resolve().parents[2] / "docs" / "performance"
"""The pages about one benchmark each; ``performance.md`` next to it has the others."""
FILES_MIN = 100
"""The speed of a workload with that many files is in files a second."""


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
    """One table of speeds for each workload, and one for each case with faults or late answers."""
    known = [(case, runs) for case in cases if (runs := of_case(results, case))]
    special = {FAULTY.name: _faulty_table, TAIL.name: _tail_table}
    plain = [(case, runs) for case, runs in known if case.profile.name not in special]
    lines = []
    for workload in dict.fromkeys(str(case.workload) for case, _ in plain):
        of_workload = [(case, runs) for case, runs in plain if str(case.workload) == workload]
        unit = "files/s" if of_workload[0][0].workload.count >= FILES_MIN else "GB/s"
        lines += [f"### {workload}, {unit}\n", *by_contestant(_columns(of_workload))]
    for case, runs in known:
        if table := special.get(case.profile.name):
            lines += table(runs, case)
    for result in results:
        if result.problem:
            lines.append(f"{result.contestant} in `{result.case}` failed: {result.problem}\n")
    return "\n".join(lines)


def _title(case: Case) -> str:
    return f"{case.operation.capitalize()} of {case.workload}, `{case.profile.name}`"


def _columns(
    known: Iterable[tuple[Case, Mapping[str, Sequence[Result]]]],
) -> dict[str, dict[str, str]]:
    """The speed and its ratio to the reference, by head and contestant."""
    columns = {}
    for case, runs in known:
        in_files = case.workload.count >= FILES_MIN
        cells = columns[f"{case.operation}, `{case.profile.name}`, {repeats(runs)}"] = {}
        for name, of_one in runs.items():
            speeds = [r.files / r.wall_s if in_files else r.bytes_s / 1e9 for r in of_one]
            shown = median_and_spread(speeds, ",.0f" if in_files else ".2f")
            if of_reference := ratios(runs, name, case):
                shown += f", {statistics.median(of_reference):.2f}"
            cells[name.removesuffix(" to GCS")] = shown + _noise(of_one)
    return columns


def by_contestant(columns: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A table of cells by head and contestant, in the order of the first column."""
    lines = [f"| | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    for name in dict.fromkeys(name for cells in columns.values() for name in cells):
        cells = [column.get(name, "") for column in columns.values()]
        lines.append(f"| {_shown(name)} | {' | '.join(cells)} |")
    return [*lines, ""]


def _tail_table(runs: Mapping[str, Sequence[Result]], case: Case) -> list[str]:
    lines = [
        f"### {_title(case)}\n",
        f"| {repeats(runs)} | p50, s | p90, s | p99, s | longest, s | stored bytes |",
        "| --- " * 6 + "|",
    ]
    for name, of_one in runs.items():
        taken = sorted(result.wall_s for result in of_one)
        cuts = statistics.quantiles(taken, n=100, method="inclusive") if len(taken) > 1 else taken
        sent = statistics.mean(r.size_bytes for r in of_one) / case.workload.total_bytes
        cells = [f"{_shown(name)}{_noise(of_one)}"]
        cells += [f"{cuts[min(n, len(cuts)) - 1]:.2f}" for n in (50, 90, 99)]
        lines.append(f"| {' | '.join([*cells, f'{taken[-1]:.2f}', f'{sent:.2f}'])} |")
    return [*lines, ""]


def _faulty_table(runs: Mapping[str, Sequence[Result]], case: Case) -> list[str]:
    times = [*next(iter(runs.values()))[0].whole_bytes_at_s]
    heads = [f"GB in whole objects at {time} s" for time in times]
    total_gb = case.workload.total_bytes / 1e9
    lines = [
        f"### {_title(case)}\n",
        f"| of {total_gb:.1f} GB, {repeats(runs)} | {' | '.join(heads)} | all stored after | faults |",
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
            f"{_shown(name)}{_noise(of_one)}",
            *(f"{count / 1e9:.1f}" for count in stored),
            end,
            met,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def repeats(runs: Mapping[str, Sequence[Any]]) -> str:
    """``n=3``, or ``n=1-3`` if some contestants have fewer runs."""
    counts = sorted({len(of_one) for of_one in runs.values()})
    return "n=" + "-".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))


def _shown(name: str) -> str:
    return f"**{name}**" if name.startswith(OURS) else name


def _noise(of_one: Sequence[Result]) -> str:
    """The number of runs on a machine that was not idle."""
    noisy = sum(not result.is_quiet for result in of_one)
    return f" ({noisy} noisy)" if noisy else ""


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
