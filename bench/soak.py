# SPDX-License-Identifier: Apache-2.0
"""Hours of a real daemon with its trainer under faults: do memory, descriptors, threads and disk stay flat?

    unshare --net sh -c 'ip link set lo up && exec python -m bench.soak --hours 8 --json soak.jsonl'
    python -m bench.soak --table soak.jsonl --plot soak.svg

The trainer saves every five seconds to an emulated S3 with a mirror.  About every twenty seconds something
happens: a notice that the cloud withdraws after the verdict, a killed trainer, an outage of the store or of
the mirror, a prune, a step of the VM's clock.  In the first tenth of the time the daemon is killed, too, and
VMs lose their power and their disk; then one daemon lives until the end.  A trainer that resumes after SAFE
must begin at that step.

It needs gcc for the steps of the clock; times of files do not follow them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import struct
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from swansong_bucket.errors import StoreError

from testkit import TRAINERS
from testkit.clouds import Aws, Bucket
from testkit.emulators.process import EmulatorProcess
from testkit.rig import CREDENTIALS, Process, Vm

CLOCK = Path(__file__).with_name("clock.c")
SAMPLE_S = 10.0
PAUSE_S = (5.0, 35.0)
NOTICE_S = 60.0
OUTAGE_S = 8.0
RESTARTS_SHARE = 0.1
"""Share of the time in which daemons and VMs end."""
KEEP_S = 600.0
"""``retention.keep_within_s``: the hour of real runs would let the bucket grow for an hour."""
SIZE_BYTES = 200_000
"""Of each of the three files of a checkpoint."""
CLOCK_STEPS_S = (-3600, -60, -2, 2, 30, 3600)
"""Offsets to the true time.  The last one lets a deadline pass early, and the first one late."""
LIVE = {
    "notice": 6,
    "kill trainer": 4,
    "outage": 3,
    "outage of the mirror": 1,
    "prune": 2,
    "clock": 2,
}
ENDING = {**LIVE, "kill daemon": 3, "power cut": 4}
COLUMNS = ("rss_mb", "descriptors", "threads", "disk_mb", "commits", "chunks")


class Soak:
    """One VM at a time, its store and its mirror."""

    def __init__(self, seconds: float, path: Path, seed: int) -> None:
        self._path = path
        self._random = random.Random(seed)
        self._begun = time.monotonic()
        self._seconds = seconds
        self._stack = ExitStack()
        self._life = 0
        self._safe_step: int | None = None
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def run(self) -> None:
        with self._stack:
            server = ("testkit.emulators.s3_strict", "--port", "0", "--bucket", "ckpt")
            start = self._stack.enter_context
            self._bucket = Bucket(start(EmulatorProcess(*server)).url, "soak")
            self._mirror = Bucket(start(EmulatorProcess(*server)).url, "mirror")
            imds = start(EmulatorProcess("testkit.emulators.aws_imds", "--port", "0"))
            self._aws = Aws(imds.url)
            self._disks = Path(start(tempfile.TemporaryDirectory(prefix="soak-")))
            self._clock, self._preload = self._disks / "clock", self._disks / "clock.so"
            self._clock.write_bytes(bytes(8))
            compiler = [
                "gcc",
                "-O2",
                "-Wall",
                "-shared",
                "-fPIC",
                "-o",
                str(self._preload),
                str(CLOCK),
            ]
            subprocess.run(compiler, check=True)
            self._next_vm()
            pause, due_s = threading.Event(), 0.0
            while self._now < self._seconds:
                if self._now >= due_s:
                    self._act()
                    due_s = self._now + self._random.uniform(*PAUSE_S)
                self._sample()
                pause.wait(min(SAMPLE_S, max(0.0, due_s - self._now)))

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begun

    # ------------------------------------------------------------ the VM

    def _next_vm(self) -> None:
        self._life += 1
        disk = self._disks / f"vm-{self._life}"
        disk.mkdir()
        settings = {
            "run": {"checkpoint_interval_s": 5},
            "mirror": self._mirror.store,
            "retention": {"keep_last": 3, "keep_within_s": KEEP_S, "in_daemon": True},
        }
        self._vm = self._stack.enter_context(
            Vm(
                disk,
                self._bucket.store,
                metadata=self._aws.metadata,
                settings=settings,
                constants={"swansongd.config.config.KEEP_WITHIN_S_MIN": KEEP_S},
            )
        )
        self._daemon = self._vm.start_daemon(**self._env)
        self._train()

    @property
    def _env(self) -> dict[str, str]:
        as_in_unit = {"MALLOC_ARENA_MAX": "2"}
        return {"LD_PRELOAD": str(self._preload), "CLOCK_OFFSET": str(self._clock), **as_in_unit}

    def _step_clock(self, offset_s: int) -> None:
        with open(self._clock, "r+b") as file:  # the processes have mapped it
            file.write(struct.pack("q", offset_s))

    def _train(self) -> None:
        command = [str(TRAINERS / "witness.py"), "--size-bytes", str(SIZE_BYTES)]
        self._trainer = self._vm.start_trainer(
            "--step-delay-s", "0.05", *command[1:], script=command[0], **self._env
        )
        try:
            resumed = self._trainer.lines.wait(timeout_s=120, event="resumed")
        except AssertionError as error:
            error.add_note("\n".join(["the daemon:", *self._daemon.lines.raw[-60:]]))
            raise
        if self._safe_step not in (None, resumed["from_step"]):
            self.problems.append(f"SAFE at step {self._safe_step}, resumed at {resumed}")
        self._safe_step = None

    # ------------------------------------------------------------ what happens

    def _act(self) -> None:
        weights = ENDING if self._now < RESTARTS_SHARE * self._seconds else LIVE
        (name,) = self._random.choices([*weights], [*weights.values()])
        self.counts[name] += 1
        match name:
            case "notice":
                self._notice()
                self._aws.withdraw()
            case "kill trainer":
                self._trainer.kill()
                self._train()
            case "outage":
                self._bucket.order("outage", seconds=OUTAGE_S)
            case "outage of the mirror":
                self._mirror.order("outage", seconds=OUTAGE_S)
            case "prune":
                done = self._vm.swansong("prune", **self._env)
                self.counts[f"prune: exit code {done.returncode}"] += 1
            case "clock":
                self._step_clock(self._random.choice((0, *CLOCK_STEPS_S)))
            case "kill daemon":
                self._daemon.kill()
                self._daemon = self._vm.start_daemon(**self._env)
            case "power cut":
                if self._notice() == "SAFE":
                    self._safe_step = self._steps()
                self._vm.power_off()
                self._aws.withdraw()
                self._next_vm()
        for server in (self._bucket, self._mirror):  # end faults; the record of requests grows
            if "outage" not in name:
                server.order("clear")

    def _notice(self) -> str:
        before = len(self._daemon.lines.all(event="verdict"))
        self._aws.notice(in_s=NOTICE_S)
        with suppress(AssertionError):
            self._daemon.lines.wait(timeout_s=NOTICE_S + 5, after=self._seen(), event="verdict")
        verdicts = self._daemon.lines.all(event="verdict")[before:]
        word = str(verdicts[-1]["verdict"]) if verdicts else "no verdict"
        self.counts[word] += 1
        return word

    def _seen(self) -> int:
        return len(self._daemon.lines.all())

    def _steps(self) -> int:
        verdict: dict[str, Any] = self._daemon.lines.all(event="verdict")[-1]
        return int(verdict["step"])

    # ------------------------------------------------------------ samples

    def _sample(self) -> None:
        if self._daemon.popen.poll() is not None:
            self.problems.append(f"the daemon ended with {self._daemon.popen.returncode}")
            self._daemon = self._vm.start_daemon(**self._env)
        keys: Sequence[str] = ()
        with suppress(StoreError):  # an outage
            keys = [info.key for info in self._bucket.client.list("")]
        sample = {
            "at_s": round(self._now, 1),
            "life": f"{self._life}.{self._daemon.pid}",
            **_process(self._daemon),
            "disk_mb": _disk_mb(self._vm.disk),
            "commits": sum("/commits/" in key for key in keys) if keys else None,
            "chunks": sum("/data/" in key for key in keys) if keys else None,
            "counts": dict(self.counts),
            "problems": self.problems,
        }
        with open(self._path, "a") as file:
            file.write(json.dumps(sample) + "\n")


def _process(process: Process) -> dict[str, float]:
    home = Path(f"/proc/{process.pid}")
    fields = dict(line.split(":", 1) for line in (home / "status").read_text().splitlines())
    return {
        "rss_mb": round(int(fields["VmRSS"].split()[0]) / 1000, 1),
        "threads": int(fields["Threads"]),
        "descriptors": len(os.listdir(home / "fd")),
    }


def _disk_mb(directory: Path) -> float:
    """Size of all files, of which some vanish meanwhile."""
    size = 0
    for home, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                size += os.lstat(os.path.join(home, name)).st_size
    return round(size / 1e6, 1)


def table(path: Path) -> str:
    """Medians of the quarters of the longest life of a daemon."""
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    lives = Counter(sample["life"] for sample in samples)
    longest = [s for s in samples if s["life"] == lives.most_common(1)[0][0]]
    quarter = max(1, len(longest) // 4)
    quarters = [longest[at : at + quarter] for at in range(0, 4 * quarter, quarter)]
    shown = [column for column in COLUMNS if column in longest[0]]
    took_min = (longest[-1]["at_s"] - longest[0]["at_s"]) / 60
    lines = [
        f"One daemon for {took_min:.0f} of {samples[-1]['at_s'] / 60:.0f} minutes.",
        "",
        "| median of a quarter | " + " | ".join(shown) + " |",
        "| --- " * (len(shown) + 1) + "|",
    ]
    for number, each in enumerate(quarters, 1):
        values = [[s[column] for s in each if s[column] is not None] for column in shown]
        cells = [f"{statistics.median(of_one):g}" if of_one else "" for of_one in values]
        lines.append(f"| {number} | {' | '.join(cells)} |")
    last = samples[-1]
    lines += ["", ", ".join(f"{n} {what}" for what, n in sorted(last["counts"].items()))]
    lines += [f"problem: {each}" for each in last["problems"]]
    return "\n".join(lines)


def plot(path: Path, picture: Path) -> None:
    """Draw memory, descriptors, threads and objects against the time."""
    import matplotlib as mpl  # noqa: PLC0415 - only for the picture

    mpl.use("svg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    samples = [json.loads(line) for line in path.read_text().splitlines()]
    groups = (("rss_mb",), ("descriptors", "threads", "disk_mb"), ("commits", "chunks"))
    figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
    for axis, group in zip(axes, groups, strict=True):
        for column in group:
            known = [s for s in samples if s[column] is not None]
            axis.plot([s["at_s"] / 60 for s in known], [s[column] for s in known], label=column)
        axis.set_xlabel("minutes")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False)
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("soak.jsonl"), help="file of samples")
    parser.add_argument("--table", type=Path, help="print the table of a file of samples")
    parser.add_argument("--plot", type=Path, help="with --table: draw this SVG; needs matplotlib")
    options = parser.parse_args()
    if options.table is None:
        os.environ.update(CREDENTIALS)
        Soak(options.hours * 3600, options.json, options.seed).run()
    elif options.plot is not None:
        plot(options.table, options.plot)
    print(table(options.table or options.json))


if __name__ == "__main__":
    main()
