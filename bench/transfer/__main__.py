# SPDX-License-Identifier: Apache-2.0
"""Measures uploads and downloads of Swansong and of other clients: ``make bench``.

bench/README.md describes the method.  In each repetition of a case its contestants run in random order,
each as its own process with a new sink.  Speeds are compared with the bare reference of the same repetition.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from bench.transfer import measure, results, sink
from bench.transfer.cases import (
    FAULT_TIMES_S,
    QUICK_FAULT_TIMES_S,
    Case,
    Workload,
    cases,
    make_files,
    sink_objects,
)
from bench.transfer.contestants import (
    BUCKET,
    CONTESTANTS,
    OURS,
    PREFIX,
    REFERENCE,
    RUN,
    Where,
    interpreter,
    trusting,
)
from bench.transfer.results import Result, ResultsFile

REPOSITORY = Path(__file__).resolve().parents[2]
PLOT = REPOSITORY / "docs" / "performance" / "transfer.svg"

FOREIGN_SHARE_MAX = 0.16
ATTEMPTS_MAX = 4
LIMIT_S = 150.0


def job_file(
    data: Path,
    name: str,
    *,
    operation: str,
    workload: Workload,
    directory: Path,
    endpoint: str,
) -> Path:
    """Write the job of a Python client into a file; :mod:`job` reads it."""
    path = data / "job.json"
    job = {
        "operation": operation,
        "directory": str(directory),
        "files": workload.files,
        "bucket": BUCKET,
        "prefix": RUN if name.startswith(OURS) else PREFIX,
        "endpoint": endpoint,
        "ca": str(data / "ca.pem"),
    }
    path.write_text(json.dumps(job))
    return path


def environment(data: Path) -> dict[str, str]:
    """Environment of every contestant: fake credentials, trust in the sink, and no proxy."""
    ca = str(data / "ca.pem")
    inherited = {key: os.environ[key] for key in ("PATH", "PYTHONPATH") if key in os.environ}
    return {
        **inherited,
        "HOME": str(data),
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_GCE_CHECK": "true",
        "AWS_CA_BUNDLE": ca,
        "REQUESTS_CA_BUNDLE": ca,
        "SSL_CERT_FILE": ca,
    }


class Bench:
    """Runs contestants through cases.

    Args:
        options: of the command line.
        build: directory of the sink and the virtual environments.
        data: directory of the files to move, which the benchmark deletes.
    """

    def __init__(self, options: argparse.Namespace, build: Path, data: Path) -> None:
        self._options = options
        self._build = build
        self._data = data
        self._program = sink.build(build)
        sink.certificates(data)
        sink_objects(cases(is_quick=True)[0].workload, data)  # makes the pattern

    def run(self, case: Case, names: Sequence[str], file: ResultsFile[Result]) -> None:
        repeats = max(case.repeats_min, min(self._options.repeats, case.repeats_max))
        due = [
            (repeat, name)
            for repeat in range(repeats)
            for name in names
            if not file.has(case=case.name, contestant=name, repeat=repeat)
        ]
        if not due:
            return
        source = self._data / "stage" / "set"
        if case.operation == "upload":
            make_files(case.workload, source)
        for repeat in range(repeats):
            lane = [name for at, name in due if at == repeat]
            random.shuffle(lane)
            for name in lane:
                result = self._quiet_run(case, name, repeat, source)
                file.add(result)
                speed = f"{result.size_bytes / 1e9:.2f} GB in {result.wall_s:.2f} s"
                outcome = result.problem or (
                    f"{speed}, {result.cpu_s_a_gb:.2f} CPU s/GB, {result.rss_bytes / 1e6:.0f} MB"
                )
                print(f"{case.name} {repeat + 1}/{repeats} {name}: {outcome}", file=sys.stderr)
        shutil.rmtree(self._data / "stage", ignore_errors=True)

    def _quiet_run(self, case: Case, name: str, repeat: int, source: Path) -> Result:
        """The first run on a quiet machine, or the quietest of :data:`ATTEMPTS_MAX` runs."""
        best: Result | None = None
        for _ in range(1 if self._options.quick else ATTEMPTS_MAX):
            if not self._options.quick:
                measure.wait_for_quiet(limit_s=30)
            result = self._one(case, name, repeat, source)
            if result.is_quiet or result.problem:
                return result
            if best is None or result.foreign_share < best.foreign_share:
                best = result
        assert best is not None
        return best

    def _one(self, case: Case, name: str, repeat: int, source: Path) -> Result:
        contestant = CONTESTANTS[name]
        is_upload = case.operation == "upload"
        directory = source if is_upload else self._data / "fetched"
        if not is_upload:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        objects = [] if is_upload else sink_objects(case.workload, self._data)
        with sink.Sink(self._program, self._data, case.profile, objects, seed=repeat) as far:
            job = job_file(
                self._data,
                name,
                operation=case.operation,
                workload=case.workload,
                directory=directory,
                endpoint=far.endpoint,
            )
            where = Where(
                python=interpreter(contestant.environment, self._build),
                job=job,
                directory=directory,
                endpoint=far.endpoint,
                ca=self._data / "ca.pem",
            )
            command = list(contestant.command(where, case.operation))
            if contestant.trusts_system_only:
                command = trusting(command, self._data / "trust")
            is_faulty = case.profile.share_503 > 0
            may_repeat = is_faulty or case.profile.tail_s_max > 0
            times = QUICK_FAULT_TIMES_S if self._options.quick else FAULT_TIMES_S
            whole: dict[str, int] = {}

            def note(at_s: float) -> None:
                whole[f"{at_s:g}"] = far.counters().whole_bytes

            taken = measure.run(
                command,
                environment(self._data),
                limit_s=max(times) + 0.5 if is_faulty else LIMIT_S,
                directory=self._data,
                at_s={at_s: partial(note, at_s) for at_s in times} if is_faulty else None,
            )
            seen = far.counters()
        foreign_s = taken.busy_s - taken.own_cpu_s - seen.cpu_s
        foreign_share = max(0.0, foreign_s / taken.elapsed_s)
        moved = seen.whole_bytes if is_upload else seen.bytes_out
        # A client that gives up under faults counts with the bytes that it stored until then.
        problem = "" if is_faulty and moved else _problem(case, taken, moved, directory)
        return Result(
            case=case.name,
            contestant=name,
            repeat=repeat,
            wall_s=taken.wall_s,
            size_bytes=max(1, moved) if may_repeat else case.workload.total_bytes,
            files=case.workload.count,
            cpu_s=taken.cpu_s,
            rss_bytes=taken.rss_bytes,
            foreign_share=foreign_share,
            is_quiet=foreign_share <= FOREIGN_SHARE_MAX,
            problem=problem,
            whole_bytes_at_s=whole,
            faults={"503": seen.made_503, "stalls": seen.made_stall, "resets": seen.made_reset}
            if is_faulty
            else {},
        )


def _problem(case: Case, taken: measure.Run, moved: int, directory: Path) -> str:
    """Why a run does not count; empty if all bytes arrived."""
    last = taken.output.strip().splitlines()[-1:] or [""]
    if taken.is_cut:
        return f"not finished after {LIMIT_S:g} s"
    if taken.exit_code:
        return f"exit code {taken.exit_code}: {last[0][:200]}"
    if case.operation == "upload":
        if moved < case.workload.total_bytes:  # a late chunk may be sent twice
            return f"{moved} bytes of whole objects arrived"
        return ""
    landed = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    if moved < case.workload.total_bytes or landed != case.workload.total_bytes:
        return f"{moved} bytes were sent and {landed} were written"
    return ""


def machine() -> str:
    """Processor, kernel and Python, in one line."""
    info = Path("/proc/cpuinfo").read_text()
    facts: dict[str, str] = {}
    for line in info.splitlines():
        key, _, value = line.partition(":")
        facts[key.strip()] = value.strip()
    model = facts.get("model name", platform.machine())
    wanted = ("aes", "vaes", "vpclmulqdq", "sha_ni", "avx512f")
    flags = [flag for flag in wanted if flag in facts.get("flags", "").split()]
    return (
        f"{os.cpu_count()} cores of {model} ({', '.join(flags)}), Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def box() -> str:
    """The machine and its software, in one line."""
    tls = subprocess.run(["openssl", "version"], capture_output=True, text=True, check=True).stdout
    return f"{machine()}, {' '.join(tls.split()[:2])}, {sink.CIPHER}"


def versions(names: Sequence[str]) -> str:
    """The required packages of these contestants, with versions."""
    environments = dict.fromkeys(CONTESTANTS[name].environment for name in names)
    lines = []
    for environment in environments:
        if environment is not None:
            path = REPOSITORY / "bench" / f"requirements-{environment}.txt"
            lines += path.read_text().split()
    return ", ".join(lines)


def plot(path: Path, build: Path) -> None:
    """Draw docs/performance/transfer.svg in an environment that has matplotlib."""
    script = Path(__file__).resolve().parent / "plot.py"
    subprocess.run([str(interpreter("plot", build)), str(script), str(path), str(PLOT)], check=True)


def add_options(parser: argparse.ArgumentParser, *, quick: str) -> None:
    """The options of a benchmark with contestants; ``quick`` is the help of ``--quick``."""
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--repeats", type=int, default=0, help="repetitions (3; with --quick 1)")
    parser.add_argument("--only", nargs="+", default=[], metavar="CONTESTANT")
    parser.add_argument("--list", action="store_true", help="print the names, and exit")
    parser.add_argument("--json", type=Path, help="results file; its runs are not repeated")
    parser.add_argument("--fresh", action="store_true", help="start with an empty results file")
    parser.add_argument(
        "--data", type=Path, default=Path("/dev/shm"), help="directory for the files"
    )
    parser.add_argument(
        "--write", action="store_true", help="write tables and plot into docs/performance/"
    )


def parse(parser: argparse.ArgumentParser, contestants: Container[str]) -> argparse.Namespace:
    """The arguments of the command line, which names these contestants only."""
    options = parser.parse_args()
    options.repeats = options.repeats or (1 if options.quick else 3)
    if options.write and options.quick:
        parser.error("--write does not accept the results of --quick")
    for name in options.only:
        if name not in contestants:
            parser.error(f"unknown contestant {name!r}; --list shows the names")
    return options


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    add_options(parser, quick="small files, once; ignore noise")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[],
        metavar="CASE",
        help="cases to run; --list shows the names",
    )
    return parse(parser, CONTESTANTS)


def main() -> None:
    options = parsed()
    wanted = cases(is_quick=options.quick)
    if options.list:
        print("\n".join(["contestants:", *CONTESTANTS, "", "cases:", *(c.name for c in wanted)]))
        return
    build = REPOSITORY / "build" / "bench"
    build.mkdir(parents=True, exist_ok=True)
    path = options.json or build / ("quick.jsonl" if options.quick else "results.jsonl")
    if options.fresh:
        path.unlink(missing_ok=True)
    file = ResultsFile(path, Result)
    chosen = [case for case in wanted if not options.cases or case.name in options.cases]
    names = {
        case.name: [
            name
            for name in case.contestants
            if not options.only or name in options.only or name.startswith(REFERENCE)
        ]
        for case in chosen
    }
    for environment in {CONTESTANTS[name].environment for lane in names.values() for name in lane}:
        interpreter(environment, build)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="swansong-bench-", dir=options.data) as data:
        bench = Bench(options, build, Path(data))
        with suppress(KeyboardInterrupt):
            for case in chosen:
                bench.run(case, names[case.name], file)
    present = list(dict.fromkeys(result.contestant for result in file.results))
    tables = "\n".join(
        [
            f"{box()}. {versions(present)}.\n",
            results.markdown(file.results, wanted),
        ]
    )
    print(tables)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.write:
        plot(path, build)
        picture = "![Speed as a share of the bare reference](transfer.svg)"
        results.write_page("make bench", f"{tables}\n\n{picture}")


if __name__ == "__main__":
    main()
