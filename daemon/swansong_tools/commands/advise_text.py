# SPDX-License-Identifier: Apache-2.0
"""The output of ``swansong advise`` for people: at most 80 columns, the verdict first."""

from __future__ import annotations

import re
import textwrap
from dataclasses import fields, replace

from rich.console import Console
from rich.table import Table

from swansong_tools.commands.assumed import Subject
from swansong_tools.commands.prices import money
from swansong_tools.commands.terminal import console, table
from swansong_tools.economics.advice import Advice, Proposal
from swansong_tools.economics.bill import Bill
from swansong_tools.economics.cost import Prices, costs, saved
from swansong_tools.economics.expected import (
    DAY_S,
    InterruptionKind,
    Job,
    bandwidth_bytes_per_s,
    best_interval,
    covered_redone_s,
    expected,
    fit,
    margin,
    observed,
    observed_gpu_s,
    paid_gpu_s,
)
from swansong_tools.units import counted, human_bytes, human_s

WIDTH = 80
_PROPOSALS_MAX = 8
_PREEMPTIONS = ("preemption", "aws.spot", "gcp.preempted")
_LONG_S = 600.0
_EXAMPLES = {item.name: item.metadata["example"] for item in fields(Prices) if item.default is None}
_HALF_CENT = 0.005
_AGREES = 0.2
"""Intervals this close to the best one lose hardly more."""


def verdict(subject: Subject) -> str:
    """The consequence of the notice that matters, or of an end without one, in two sentences."""
    job, (source, grace_s) = subject.job, subject.headline
    lost_s = job.interval_s / 2 + job.lag_s
    if not job.forecast.is_measured:
        return "Whether a checkpoint fits is unknown: save or bandwidth are not measured yet."
    if grace_s <= 0:
        return (
            f"Without a usable notice, an interruption repeats {human_s(lost_s)} of training on average, "
            f"with a checkpoint every {human_s(job.interval_s)}.{_cost_of_interval(job)}"
        )
    named = "A preemption" if source in _PREEMPTIONS else f"A shutdown by {source}"
    found = margin(job, source, grace_s)
    if found.spare_s >= 0:
        kept_s = covered_redone_s(
            job, InterruptionKind(source=source, grace_s=grace_s, per_day=0.0)
        )
        return (
            f"{named} with {_plain_s(grace_s)} of notice would be SAFE: {human_s(found.spare_s)} to "
            "spare. "
            f"About {human_s(kept_s)} of training would be repeated."
        )
    return (
        f"{named} with {_plain_s(grace_s)} of notice is {human_s(-found.spare_s)} too short for a "
        f"checkpoint. It would lose {human_s(lost_s + grace_s)} of training on average."
    )


def _cost_of_interval(job: Job) -> str:
    """The share of the run that depends on the interval, now and at its least."""
    best = best_interval(job)
    if not best.has_losses:
        return ""
    text = f" With the saves that costs {_interval_share(job)} of the run"
    if abs(job.interval_s - best.best_s) <= _AGREES * best.best_s:
        return f"{text}, and no other interval costs less."
    least = _interval_share(replace(job, interval_s=best.best_s))
    return f"{text}; every {human_s(best.best_s)}, the best interval, it would cost {least}."


def _interval_share(job: Job) -> str:
    found = expected(job)
    percent = 100 * min(1.0, (found.saves_s + found.redone_s) / DAY_S)
    return f"{percent:.2g} %" if percent < 9.95 else f"{percent:.0f} %"


def _plain_s(seconds: float) -> str:
    """Seconds without a larger unit, as clouds state their notices."""
    if abs(seconds) >= _LONG_S:
        return f"{'-' * (seconds < 0)}{human_s(abs(seconds))}"
    return f"{seconds:.0f} s" if abs(seconds) >= 100 else f"{seconds:.3g} s"


def remedy(subject: Subject) -> str:
    """Changes that make the checkpoint fit; empty if it fits."""
    job, (source, grace_s) = subject.job, subject.headline
    found = margin(job, source, grace_s)
    if grace_s <= 0 or found.spare_s >= 0 or not job.forecast.is_measured:
        return ""
    change, ways = fit(job, grace_s), []
    size_bytes, rate = job.measured.save_bytes or 0, bandwidth_bytes_per_s(job)
    if change.size_factor:
        ways.append(f"a state of {human_bytes(size_bytes * change.size_factor)}")
    if change.send_factor and rate is not None:
        ways.append(f"{human_bytes(rate / change.send_factor)}/s to the store")
    ways.append(f"{_plain_s(found.needed_s)} of notice")
    return f"Any one of these makes it fit: {', '.join(ways)}."


def show(subject: Subject, advice: Advice, prices: Prices, bill: Bill) -> None:
    out = console()
    _say(out, verdict(subject))
    _say(out, remedy(subject))
    if advice.expected.is_hopeless:
        _say(out, "With these figures a day loses all of its training.")
    out.print()
    if len(advice.margins) > 1:
        out.print(_margins(advice))
        out.print()
    out.print(_loss(advice, subject, bill))
    _say(out, _interval(subject, advice))
    _proposals(out, advice, bill)
    out.print()
    out.print(_costs(subject, bill))
    _say(out, _missing(prices))
    out.print()
    _say(out, _checkpoint(subject))
    _say(out, f"Rests on {subject.rests_on}.")
    if subject.assumed:
        _say(out, f"Assumed: {'; '.join(subject.assumed)}.")


def _say(out: Console, text: str) -> None:
    if text:
        joined = re.sub(r"(\d) (?=[a-zA-Z]{1,3}\b)", "\\1\N{NO-BREAK SPACE}", text)
        lines = textwrap.fill(joined, WIDTH, break_on_hyphens=False)
        out.print(lines.replace("\N{NO-BREAK SPACE}", " "))


def _margins(advice: Advice) -> Table:
    shown = table("NOTICE", "GRACE", "NEEDED", "SPARE", "CHANCE", left=["NOTICE"])
    for each in advice.margins:
        shown.add_row(
            each.source,
            _plain_s(each.grace_s),
            _plain_s(each.needed_s),
            _plain_s(each.spare_s),
            f"{100 * each.chance:.0f} %",
        )
    return shown


def _loss(advice: Advice, subject: Subject, bill: Bill) -> Table:
    """One row for each GPU's day, and its GPU time over all GPUs."""
    names = ("SAVES", "STALL", "REDONE", "DOWN", "GPU TIME", "ETTR", *["COST"] * _has_money(bill))
    shown = table("LOSS A DAY", *names, left=["LOSS A DAY"])
    gpus = subject.job.gpus
    rows = [("expected", advice.expected, advice.expected.total_s * gpus, bill.lost_gpus)]
    if subject.loss is not None:
        gpu_s, paid_s = observed_gpu_s(subject.loss), paid_gpu_s(subject.loss)
        rows.insert(0, ("observed", observed(subject.loss), gpu_s, bill.of_gpu_s(paid_s)))
    if advice.proposals:
        first = advice.proposals[0]
        money_after = bill.of(first.job).lost_gpus
        rows.append(("after 1", first.after, first.after.total_s * gpus, money_after))
    for name, found, gpu_s, amount in rows:
        parts = (found.saves_s, found.stall_s, found.redone_s, found.down_s, gpu_s)
        cost = [_amount(amount, bill)] * _has_money(bill)
        shown.add_row(name, *map(human_s, parts), f"{100 * found.ettr:.1f} %", *cost)
    return shown


def _has_money(bill: Bill) -> bool:
    return bill.prices.spot is not None


def _amount(amount: float | None, bill: Bill) -> str:
    return "-" if amount is None else money(amount, bill.prices.currency)


def _checkpoint(subject: Subject) -> str:
    """The figures of one checkpoint and of its restore."""
    job, made = subject.job, subject.job.forecast
    rate = bandwidth_bytes_per_s(job)
    sent = "" if rate is None else f" ({human_bytes(rate)}/s)"
    restore_s = job.down_s.get("fetch", 0.0) + job.down_s.get("load", 0.0)
    return (
        f"A checkpoint: {human_bytes(job.measured.save_bytes or 0)} on each VM, a stall of "
        f"{human_s(job.save_cost_s)}, {human_s(made.save_s)} to save, {human_s(made.send_s)} to send"
        f"{sent}, {human_s(made.commit_s)} to commit, {human_s(restore_s)} to restore."
    )


def _missing(prices: Prices) -> str:
    """The prices that would complete the table."""
    unknown = [
        f"--price {key}={example}"
        for key, example in _EXAMPLES.items()
        if getattr(prices, key) is None
    ]
    return f"Unknown prices; give them as in {' '.join(unknown)}." if unknown else ""


def _interval(subject: Subject, advice: Advice) -> str:
    found, in_use_s = advice.interval, subject.job.interval_s
    if not found.has_losses:
        return "Interval between checkpoints: any, because no uncovered interruption is expected."
    text = (
        f"Interval between checkpoints: {human_s(found.best_s)} is best "
        f"(Young {human_s(found.young_s)}, Daly {human_s(found.daly_s)}; one uncovered interruption in "
        f"{human_s(found.mtbf_s)})."
    )
    if in_use_s == found.best_s:
        return text
    if abs(in_use_s - found.best_s) <= _AGREES * found.best_s:
        return f"{text} The {human_s(in_use_s)} in use agree."
    is_fixed = subject.setup.configured_interval_s is not None
    why = "run.checkpoint_interval_s" if is_fixed else "the trainer or by the last 8 VMs"
    return f"{text} In use: {human_s(in_use_s)}, set by {why}."


def _proposals(out: Console, advice: Advice, bill: Bill) -> None:
    if not advice.proposals:
        out.print()
        out.print("No proposal saves GPU time.")
        return
    out.print()
    out.print(_columns("WHAT WOULD SAVE MOST", "GPU TIME A DAY", "COST" * _has_money(bill)))
    for number, each in enumerate(advice.proposals[:_PROPOSALS_MAX], start=1):
        saved = _amount(_saved(bill, each), bill) if _has_money(bill) else ""
        out.print(_columns(f"{number}  {each.title}", human_s(each.saved_gpu_s), saved))
        for line in (each.change, each.formula):
            text = textwrap.fill(line, WIDTH, initial_indent="   ", subsequent_indent="   ")
            out.print(text, style="dim" if line is each.formula else None)


def _saved(bill: Bill, proposal: Proposal) -> float | None:
    """Less than half a cent of further checkpoints, in the time that is won, shows as nothing."""
    saved = bill.saved_by(proposal.job)
    return saved if saved is None or saved <= -_HALF_CENT else max(0.0, saved)


def _columns(left: str, middle: str, right: str) -> str:
    return f"{left:<51}{middle:>15}{right:>14}".rstrip()


def _costs(subject: Subject, bill: Bill) -> Table:
    job = subject.job
    heads = ("COST A DAY", "", *["COST"] * _has_any(bill))
    shown = table(*heads, left=heads[:2])
    trained_s = expected(job).ettr * DAY_S * job.gpus
    rows = [
        ("checkpoints", f"{human_s(bill.stall_gpu_s)} of GPU time", bill.stall),
        ("", f"{human_bytes(bill.stored_bytes)} in the store", bill.storage),
        (
            "",
            f"{counted(round(bill.writes), 'write')}, {counted(round(bill.reads), 'read')}",
            bill.requests,
        ),
        ("interruptions", f"{human_s(bill.interruptions_gpu_s)} of GPU time", bill.interruptions),
        ("spot", f"{counted(job.gpus, 'GPU')}, all time above included", bill.spot),
        ("on-demand", f"the same training, {human_s(trained_s)} of GPU time", bill.on_demand),
    ]
    if bill.saved is not None and bill.on_demand:
        share = 100 * bill.saved / bill.on_demand
        text = f"{abs(share):.0f} % {'less' if share >= 0 else 'more'} than on-demand"
        rows.append(("saved by spot", text, bill.saved))
    if subject.loss is not None and bill.prices.spot is not None:
        rows += _so_far(**costs(subject.loss, bill.prices))
    if bill.days is not None:
        rows.append(("the whole run", human_s(bill.days * DAY_S), _whole(bill)))
    for name, text, amount in rows:
        shown.add_row(name, text, *[_amount(amount, bill)] * _has_any(bill))
    return shown


def _has_any(bill: Bill) -> bool:
    return any(getattr(bill.prices, key) is not None for key in _EXAMPLES)


def _so_far(
    *, spot: float | None, on_demand: float | None, **_: float | None
) -> list[tuple[str, str, float | None]]:
    amount = saved(on_demand, spot)
    share = (
        f"{100 * amount / on_demand:.0f} % of on-demand" if amount is not None and on_demand else ""
    )
    return [
        ("run so far", "all GPU time at the spot price", spot),
        ("saved so far", share, amount),
    ]


def _whole(bill: Bill) -> float | None:
    if bill.spot is None or bill.days is None:
        return None
    return (bill.spot + (bill.storage or 0.0) + (bill.requests or 0.0)) * bill.days
