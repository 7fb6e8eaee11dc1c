# SPDX-License-Identifier: Apache-2.0
"""The picture of ``swansong status --watch`` in the docs: ``python -m testkit.status_picture``.

It is drawn by the code of the command, from the statuses of an evacuation.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from swansong_bucket.model import CommitRef, GpuHealth, Health, Verdict
from swansong_tools.commands.view.live import Canvas, Frame, view
from swansong_tools.commands.view.poller import Poll
from swansong_tools.commands.view.recent import PollHistory
from swansongd.observe.status import (
    CommitStatus,
    DaemonStatus,
    EvacuationStatus,
    FlushStatus,
    GpuHealthStatus,
    HealthStatus,
    LagStatus,
    Margin,
    MirrorLagStatus,
    MirrorState,
    MirrorStatus,
    PrefetchState,
    PrefetchStatus,
    StagingStatus,
    TrainerStatus,
    UnsentStatus,
    VerdictStatus,
)

from testkit import REPOSITORY

FILE = REPOSITORY / "docs/operations/pictures/status-watch.svg"
WIDTH, HEIGHT = 80, 24
NOON_WALL_S = 1_800_014_400.0
GRACE_S, SIZE_BYTES, STEP = 120.0, 84 * 10**9, 48_120
THEME = TerminalTheme(
    (13, 17, 23),
    (201, 209, 217),
    [
        (72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34),
        (88, 166, 255), (188, 140, 255), (57, 197, 207), (177, 186, 196),
    ],
)  # fmt: skip
_FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace;
 font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: sans-serif; font-size: 16px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
"""Of rich, without fonts from the network."""


def statuses() -> Iterator[tuple[float, DaemonStatus]]:
    """Time and status of each second: training, then a notice of two minutes."""
    for second in range(-30, 34):
        yield float(second), status(float(second))


def status(second: float) -> DaemonStatus:
    """The status ``second`` seconds after the notice."""
    is_open, sending_s = second >= 0, max(0.0, second - 9)
    stored_bytes = round(2.5e9 * sending_s + 1.5e9 * math.sin(sending_s))
    step, committed = STEP + round(1.6 * (min(second, 4) + sending_s)), STEP - 900
    state = "FLUSHING" if second >= 9 else "CHECKPOINTING" if is_open else "IDLE"
    flush = FlushStatus(
        step=STEP + 6, size_bytes=SIZE_BYTES, stored_bytes=stored_bytes, for_s=second - 9
    )
    evacuation = EvacuationStatus(
        id="e1", reason="aws.spot: terminate", seconds_left=GRACE_S - second, plan="TAKE", why="",
        phase=state, expected_s=42.1,
    )  # fmt: skip
    return DaemonStatus(
        run="llama-70b-sft",
        generation=7,
        state=state,
        verdict=None if is_open else Verdict.SAFE,
        last_verdict=VerdictStatus(
            verdict=Verdict.SAFE, reason="", age_s=93_000.0, generation=6, step=31_400,
            evacuation="e0", notices=(),
        ),
        sources=tuple(
            HealthStatus(name=name, health=Health.OK, reason="no notice", for_s=90_000.0)
            for name in ("aws.spot", "aws.rebalance", "aws.asg", "logind")
        ),
        gpus=tuple(
            GpuHealthStatus(
                index=index, uuid="", name="H100", pci="", health=GpuHealth.OK, reason="",
                for_s=90_000.0,
            )
            for index in range(8)
        ),
        store=HealthStatus(name="store", health=Health.OK, reason="responds", for_s=90_000.0),
        evacuation=evacuation if is_open else None,
        margins=(
            Margin(source="aws.spot", grace_s=GRACE_S, spare_s=71.4, fits=True),
            Margin(
                source="logind", grace_s=30.0, spare_s=-4.1, fits=False, lost_since_step=committed
            ),
        ),
        trainers=tuple(
            TrainerStatus(
                rank=rank, pid=4000 + rank, world_size=8, step=step, loss=1.734, connected=True
            )
            for rank in range(8)
        ),
        last_commit=CommitStatus(generation=7, step=committed, age_s=560.0 + second),
        replication_lag=LagStatus(
            steps=step - committed, seconds=560.0 + second, bytes=SIZE_BYTES
        ),
        flush=flush if second >= 9 else None,
        bandwidth_bytes_per_s=2.71e9,
        unsent=UnsentStatus(sets=1, bytes=SIZE_BYTES - stored_bytes)
        if second >= 9
        else UnsentStatus(),
        staging=StagingStatus(size_bytes=19 * 10**11, free_bytes=12 * 10**11),
        prefetch=PrefetchStatus(
            state=PrefetchState.NOT_NEEDED, reason="", bytes_done=0, bytes_total=0
        ),
        mirror=MirrorStatus(
            url="", state=MirrorState.PAUSED, reason="", lag=MirrorLagStatus(),
            newest=CommitRef(7, committed), copied_commits=0, copied_bytes=0, damaged=0,
        ),
        version="0.1.0",
        pid=812,
        uptime_s=90_400.0,
    )  # fmt: skip


def picture() -> str:
    """The live view as SVG."""
    history = PollHistory()
    for at_s, newest in statuses():
        history.take(Poll(at_s, NOON_WALL_S + at_s, newest))
    frame = Frame(history, at_s, NOON_WALL_S + at_s)
    console = Console(
        record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=True,
        color_system="standard", markup=False, highlight=False, _environ={},
    )  # fmt: skip
    console.print(view(frame, Canvas(WIDTH, HEIGHT)))
    return console.export_svg(
        title="swansong status --watch", theme=THEME, code_format=_FORMAT, unique_id="watch"
    )


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(picture(), encoding="utf-8")
