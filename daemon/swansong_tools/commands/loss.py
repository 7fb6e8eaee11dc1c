# SPDX-License-Identifier: Apache-2.0
"""``swansong loss``: show what interruptions have cost a run, in seconds and GPU seconds."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table
from swansong_bucket.format import wall
from swansong_bucket.loss_records import PARTS
from swansong_bucket.runs.lives import lives_of
from swansong_bucket.runs.run import Run

from swansong_tools.commands.bucket_command import opened
from swansong_tools.commands.common import add_json, add_run, note, print_json, rounded
from swansong_tools.commands.progress import ProgressDisplay
from swansong_tools.commands.terminal import console, table
from swansong_tools.economics import loss as losses
from swansong_tools.economics.loss import Interruption, Loss
from swansong_tools.units import counted, human_bytes, human_s

NOTES = "See docs/operations/loss.md."
EXAMPLES = {
    "Show what each preemption of the configured run has cost.": "swansong loss",
    "Print the lost GPU seconds of another run.": (
        "swansong loss --run my-run --json | jq .total.lost_gpu_s"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    with opened(args) as here:
        listed = Run.listed(here.store, here.keys, stop=here.stop)
        with ProgressDisplay("reading resumptions", "resumptions", is_quiet=args.json) as progress:
            found = lives_of(listed, progress=progress)
        loss = losses.loss(found.lives)
        if args.json:
            print_json(facts(here.keys.run, loss, found.left_out))
        elif loss is None:
            note(f"run {here.keys.run} has not trained yet, or its trainers report no steps")
        else:
            _print(here.keys.run, loss, found.left_out)
    return 0


def facts(run_name: str, loss: Loss | None, left_out: int) -> dict[str, Any]:
    """The report as JSON values; docs/operations/loss.md describes the fields."""
    interruptions = () if loss is None else loss.interruptions
    return {
        "run": run_name,
        "generations_left_out": left_out,
        "interruptions": rounded([_facts(each) for each in interruptions], 3),
        "total": None if loss is None else _total(loss),
    }


def _facts(each: Interruption) -> dict[str, Any]:
    seconds = {"stall": each.stall_s, "redone": each.redone_s, **each.parts_s}
    return {
        "after_generation": each.after_generation,
        "generation": each.generation,
        "last_step_at": wall.text(each.ended_wall_s),
        "first_step_at": wall.text(each.resumed_wall_s),
        "last_step": each.last_step,
        "resumed_from_step": each.start_step,
        "same_vm": each.is_same_vm,
        "estimated": each.is_estimated,
        "clocks_differ": each.is_skewed,
        "gpus": each.ranks,
        "stall_s": each.stall_s,
        "redone_s": each.redone_s,
        "down_s": each.down_s,
        "down": each.parts_s,
        "lost_s": each.lost_s,
        "lost_gpu_s": each.lost_gpu_s,
        "down_gpu_s": each.down_gpu_s,
        "lost_parts_gpu_s": {
            part: None if known_s is None else each.lost_parts_gpu_s[part]
            for part, known_s in seconds.items()
        },
        "bytes_fetched": each.bytes_fetched,
        "bytes_linked": each.bytes_linked,
    }


def _total(loss: Loss) -> dict[str, Any]:
    return {
        "begun": wall.text(loss.begun_wall_s),
        "until": wall.text(loss.until_wall_s),
        "wall_s": rounded(loss.wall_s, 3),
        "productive_s": rounded(loss.productive_s, 3),
        "unproductive": rounded(loss.parts_s, 3),
        "gpu_s": rounded(loss.gpu_s, 3),
        "productive_gpu_s": rounded(loss.productive_gpu_s, 3),
        "unproductive_gpu_s": rounded(loss.parts_gpu_s, 3),
        "lost_gpu_s": rounded(loss.lost_gpu_s, 3),
        "ettr": rounded(loss.ettr, 6),
        "ettr_last_hour": rounded(loss.ettr_last_hour, 6),
        "goodput": rounded(loss.goodput_s, 3),
    }


# ---------------------------------------------------------------- for people


def _print(run_name: str, loss: Loss, left_out: int) -> None:
    out = console()
    out.print(f"run {run_name}")
    out.print(_summary(loss))
    if left_out:
        out.print(f"{counted(left_out, 'older generation')} left out")
    if loss.interruptions:
        for shown in (_lost(loss), _down(loss), _restored(loss)):
            out.print()
            out.print(shown)
    for line in _remarks(loss):
        out.print(line)


def _lost(loss: Loss) -> Table:
    """One line for each interruption: its cost; every table fits into 80 columns."""
    shown = table("GEN", "ENDED (UTC)", "LOST", "GPU TIME", "STALL", "REDONE", "DOWN")
    for each in loss.interruptions:
        about = "~" if each.is_estimated else ""
        shown.add_row(
            _name(each),
            _minute(each.ended_wall_s),
            human_s(each.lost_s),
            human_s(each.lost_gpu_s),
            _seconds(each.stall_s),
            f"{about}{_seconds(each.redone_s)}",
            f"{about}{_seconds(each.down_s)}",
        )
    return shown


def _down(loss: Loss) -> Table:
    """The parts of DOWN, in the order in which they happen."""
    shown = table("GEN", *(name.upper().replace("_", "-") for name in PARTS))
    for each in loss.interruptions:
        shown.add_row(_name(each), *(_seconds(each.parts_s.get(name)) for name in PARTS))
    return shown


def _restored(loss: Loss) -> Table:
    """The steps around the interruption, and where the bytes of the checkpoint came from."""
    shown = table("GEN", "STEP", "FROM", "FETCHED", "LINKED")
    for each in loss.interruptions:
        about = "~" if each.is_estimated else ""
        sizes = (each.bytes_fetched, each.bytes_linked)
        shown.add_row(
            _name(each),
            f"{about}{each.last_step}",
            str(each.start_step),
            *("?" if size_bytes is None else human_bytes(size_bytes) for size_bytes in sizes),
        )
    return shown


def _name(each: Interruption) -> str:
    return f"{each.generation}{'*' * each.is_skewed}{'^' * each.is_same_vm}"


def _minute(wall_s: float) -> str:
    return wall.text(wall_s)[5:16].replace("T", " ")


def _seconds(seconds: float | None) -> str:
    return "?" if seconds is None else human_s(seconds)


def _summary(loss: Loss) -> Table:
    lost_s = sum(each.lost_s for each in loss.interruptions)
    interruptions = counted(len(loss.interruptions), "interruption")
    lost_gpu = f"in {interruptions}, {human_s(loss.lost_gpu_s)} of GPU time"
    span = f"from {_minute(loss.begun_wall_s)} to the newest step, {_minute(loss.until_wall_s)} UTC"
    shown = table()
    for justify in ("left", "right", "left"):
        shown.add_column(justify=justify, no_wrap=True)
    shown.add_row("time", human_s(loss.wall_s), span)
    shown.add_row("productive", human_s(loss.productive_s), f"ETTR {_percent(loss.ettr)}")
    last_s = loss.last_hour_productive_s
    ratio = _percent(loss.ettr_last_hour)
    shown.add_row("last hour", human_s(last_s), f"ETTR {ratio} in the last hour of training")
    shown.add_row("lost", human_s(lost_s), lost_gpu)
    saves_s = loss.parts_s["saves"]
    shown.add_row("saves", human_s(saves_s), "training stood still for other checkpoints")
    return shown


def _percent(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{100 * ratio:.2f} %"


def _remarks(loss: Loss) -> list[str]:
    remarks = []
    if any(each.is_estimated for each in loss.interruptions):
        remarks.append("~  the last step is estimated: LOST is right, its split may not be")
    if any(each.is_same_vm for each in loss.interruptions):
        remarks.append("^  a restart on the same VM")
    if any(each.is_skewed for each in loss.interruptions):
        remarks.append("*  the clocks of the VMs contradict each other")
    if any(_has_gap(each) for each in loss.interruptions):
        remarks.append("?  not recorded; a part of DOWN with ? is contained in the one before it")
    return remarks


def _has_gap(each: Interruption) -> bool:
    return None in (each.stall_s, *(each.parts_s.get(name) for name in PARTS))
