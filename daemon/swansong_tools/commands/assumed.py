# SPDX-License-Identifier: Apache-2.0
"""The figures of a run that does not exist yet, from the options of ``swansong advise --size``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace

from swansong import bounds
from swansong_bucket.config import values
from swansong_bucket.config.sections import RetentionConfig
from swansong_bucket.errors import ConfigError
from swansongd.config.config import DeadlineConfig, FlushConfig
from swansongd.core.followup import EARLY_SHARE_STATED
from swansongd.core.planner import Measurements

from swansong_tools.commands.common import Parser, argument, whole
from swansong_tools.economics.advice import Setup
from swansong_tools.economics.bill import Upkeep
from swansong_tools.economics.expected import (
    DAY_S,
    InterruptionKind,
    Job,
    best_interval,
    saves_per_day,
)
from swansong_tools.economics.loss import Loss
from swansong_tools.units import human_bytes, human_s

PREEMPTION = "preemption"
"""The source of the notice that ``--notice`` describes."""
SAVE_BYTES_PER_S = 1e9
"""Assumed rate at which one rank writes its files to staging."""
SNAPSHOT_BYTES_PER_S = 5e9
"""Assumed rate at which one GPU copies its state into host memory."""
PER_DAY = 6.0
"""Assumed interruptions of a day, as with the default of ``run.mtbf_s``."""
STEP_S = 1.0
DOWN_S = {"cloud": 60.0, "boot": 30.0, "start": 30.0, "warm_up": 60.0}
"""Assumed parts of *down*, besides the fetch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The run that is advised."""

    name: str
    job: Job
    setup: Setup
    notices: tuple[tuple[str, float], ...]
    headline: tuple[str, float]
    """Source and grace period of the notice in the first sentence."""
    upkeep: Upkeep
    steps: int | None = None
    """Number of steps of the whole run."""
    loss: Loss | None = None
    """Loss of the run as it was; None for one that does not exist yet."""
    rests_on: str
    seen: Mapping[str, float] | None = None
    """Numbers of records behind the figures; None for a run that does not exist yet."""
    assumed: tuple[str, ...]


_duration, _size = argument(values.duration), argument(values.size)
_count = whole("a count; give a number such as 8", bounds.STEP_MAX)


def _notice(text: str) -> float:
    return 0.0 if text in ("0", "0s") else float(_duration(text))


def _rate(text: str) -> float:
    rate = argument(values.rate)(text.removesuffix("/s"))
    if rate is None:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a rate; give a rate such as 2GB/s")
    return float(rate)


def _per_day(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= DAY_S:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a rate; give a number such as 2")
    return number


_OPTIONS: dict[str, tuple[Parser, str, str]] = {
    "--size": (_size, "SIZE", "bytes of a checkpoint on one VM, such as 84GB"),
    "--bandwidth": (_rate, "RATE", "rate to the store, such as 2GB/s"),
    "--notice": (_notice, "TIME", "time between notice and end, such as 30s; 0s for none"),
    "--gpus": (_count, "N", "GPUs of the VM (default 1)"),
    "--save-bandwidth": (
        _rate,
        "RATE",
        "rate of all ranks to staging (default 1GB/s for each GPU)",
    ),
    "--stall": (
        _duration,
        "TIME",
        "standstill for one checkpoint (default: its bytes at 5GB/s for each GPU)",
    ),
    "--interval": (
        _duration,
        "TIME",
        "training time between checkpoints (default: recommended)",
    ),
    "--interruptions-per-day": (_per_day, "X", "interruptions of one day (default 6)"),
    "--down": (
        _duration,
        "TIME",
        "from the last step to the next, without the fetch (default 3m)",
    ),
    "--step-time": (_duration, "TIME", "duration of a step (default 1s)"),
    "--steps": (_count, "N", "steps of the whole run, for its duration and cost"),
}
_NECESSARY = ("--size", "--bandwidth", "--notice")


def add_assumed(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a run; without ``--size`` the command reads the bucket."""
    group = parser.add_argument_group("a run that does not exist yet")
    for name, (read, metavar, text) in _OPTIONS.items():
        group.add_argument(name, type=read, metavar=metavar, help=text)


def is_assumed(args: argparse.Namespace) -> bool:
    """Whether the options describe a run.

    Raises:
        ConfigError: a necessary option is missing, or the command line also names a run.
    """
    given = [name for name in _OPTIONS if getattr(args, _attribute(name)) is not None]
    if not given:
        return False
    missing = [name for name in _NECESSARY if name not in given]
    if missing:
        raise ConfigError(
            [f"{given[0]}: needs {' and '.join(missing)} (got nothing); set {missing[0]} as well"]
        )
    if args.run is not None:
        raise ConfigError([f"--run: excludes {given[0]} (got {args.run!r}); remove one of the two"])
    return True


def _attribute(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def assumed(args: argparse.Namespace) -> Subject:
    """The run of the options."""
    notes: list[str] = []

    def given(name: str, default: float, text: str) -> float:
        value = getattr(args, _attribute(name))
        if value is None:
            notes.append(f"{name}: {text}")
            return default
        return float(value)

    gpus = 1 if args.gpus is None else args.gpus
    rate = gpus * SAVE_BYTES_PER_S
    save_s = args.size / given("--save-bandwidth", rate, f"{human_bytes(rate)}/s to staging")
    cost_s = args.size / gpus / SNAPSHOT_BYTES_PER_S
    cost_s = given("--stall", cost_s, f"a checkpoint stops training for {human_s(cost_s)}")
    per_day = PER_DAY
    per_day = given("--interruptions-per-day", per_day, f"{per_day:g} interruptions a day")
    other_s = sum(DOWN_S.values())
    down_s = given("--down", other_s, f"{human_s(other_s)} without training, besides the fetch")
    step_s = given("--step-time", STEP_S, f"{human_s(STEP_S)} a step")
    silent = 1.0 if args.notice == 0 else EARLY_SHARE_STATED
    if args.notice:
        notes.append(f"{100 * silent:.0f} % of the VMs end without a usable notice")
    kinds = [InterruptionKind(source="", per_day=silent * per_day)]
    if args.notice:
        noticed = (1 - silent) * per_day
        kinds.append(InterruptionKind(source=PREEMPTION, grace_s=args.notice, per_day=noticed))
    job = Job(
        gpus=gpus,
        measured=Measurements(
            bandwidth_bytes_per_s=args.bandwidth,
            save_s=min(save_s, bounds.SECONDS_MAX),
            save_bytes=args.size,
            step_s=step_s,
        ),
        save_cost_s=cost_s,
        interval_s=0.0,
        stall_s=2 * cost_s,
        down_s={
            **{part: seconds * down_s / other_s for part, seconds in DOWN_S.items()},
            "fetch": args.size / args.bandwidth,
        },
        kinds=tuple(kinds),
        reserve_s=DeadlineConfig().reserve_s,
    )
    interval_s = best_interval(job).best_s if args.interval is None else args.interval
    job = replace(job, interval_s=interval_s)
    return Subject(
        name="this run",
        job=job,
        setup=Setup(ranks=gpus, configured_interval_s=args.interval),
        notices=((PREEMPTION, args.notice),) if args.notice else (),
        headline=(PREEMPTION, args.notice),
        upkeep=_upkeep(job, args.size),
        steps=args.steps,
        rests_on="no measurement: the figures of the command line",
        assumed=tuple(notes),
    )


def _upkeep(job: Job, size_bytes: int) -> Upkeep:
    """With the retention that the daemon has by default."""
    kept = RetentionConfig()
    commits = saves_per_day(job) * kept.keep_within_s / DAY_S + kept.keep_daily + kept.keep_weekly
    chunks = -(-size_bytes // FlushConfig().chunk_bytes)
    return Upkeep(
        size_bytes=size_bytes,
        stored_bytes=commits * size_bytes,
        writes_per_save=chunks + 1,
        reads_per_restore=chunks + 1,
    )
