# SPDX-License-Identifier: Apache-2.0
"""The facts of a report: each evacuation with the resumption after it, and sentences about both.  Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from swansong import bounds
from swansong_bucket.format.farewell import RecordedEvacuation
from swansong_bucket.loss_records import Resumption
from swansong_bucket.model import REDONE_TO, Verdict
from swansong_bucket.runs.history import RunHistory, last_evacuation

from swansong_tools.economics import loss as losses
from swansong_tools.economics.loss import Interruption, Loss
from swansong_tools.report.lanes import course, decided_s, first_entry, is_of_peer, number_in
from swansong_tools.report.positions import Picture, picture
from swansong_tools.units import counted, human_span, second

_MEANING = {
    Verdict.SAFE: "The newest state is in the store.",
    Verdict.PARTIAL: "At most an older commit is in the store, so steps are done again.",
    Verdict.LOST: "The run had no commit, so it starts from scratch.",
    Verdict.NO_TRAINING: "No training was seen on the VM, so nothing is claimed.",
}
_PLANS = {
    "TAKE": "request a new checkpoint",
    "FLUSH": "send the checkpoints that were sealed already",
    "COMMIT": "commit the checkpoints that were stored already",
    "NONE": "nothing, because everything was committed",
}


LOST = "of it, lost to interruptions"
"""Name of the amount of all interruptions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """An evacuation, and the resumption after it."""

    recorded: RecordedEvacuation
    interruption: Interruption | None
    """None while no VM has resumed the run, and for an evacuation that the VM has outlived."""
    resumption: Resumption | None
    compared: Mapping[str, float]
    """Health of a commit after the resumption, with the comparison of repeated steps; empty without one."""
    picture: Picture
    was_outlived: bool = False
    """The VM lived on: it ended long after the deadline, or during another evacuation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """All facts of a report."""

    run: str
    store_url: str
    written_wall_s: float
    history: RunHistory
    loss: Loss | None
    amounts: Mapping[str, str]
    """Amounts of money, each with its currency, by name; empty without prices."""
    stories: tuple[Story, ...]
    """Newest first."""

    def vm_of(self, story: Story) -> str:
        """The VM of an evacuation, if the job has several."""
        nodes = {each.recorded.node for each in self.stories}
        return f"node {story.recorded.node}" if nodes != {0} else ""


def report(
    history: RunHistory,
    *,
    run: str,
    store_url: str,
    written_wall_s: float,
    amounts: Mapping[str, str] = MappingProxyType({}),
) -> RunReport:
    """The facts of a report about this history."""
    loss = losses.loss(history.lives.lives)
    told = stories(history, loss)
    return RunReport(
        run=run,
        store_url=store_url,
        written_wall_s=written_wall_s,
        history=history,
        loss=loss,
        amounts=amounts,
        stories=tuple(reversed(told)),
    )


def summary(report: RunReport) -> str:
    """The first sentences of a report: its evacuations, the cost, and the first change to try."""
    verdicts = Counter(story.recorded.verdict.value for story in report.stories)
    ended = ", ".join(f"{number} {name}" for name, number in verdicts.items())
    happened = f"{counted(len(report.stories), 'evacuation')}: {ended}. " if ended else ""
    loss = report.loss
    newest = next(iter(report.stories), None)
    if newest is not None and newest.recorded.verdict is Verdict.LOST:
        return f"{happened}First find out why the run has no whole commit: swansong ls, swansong doctor."
    if loss is None or not loss.interruptions:
        return f"{happened}No interruption is recorded, so there is nothing to do."
    parts_gpu_s = losses.lost_gpu_s(loss.interruptions)
    largest, gpu_s = max(parts_gpu_s.items(), key=lambda part: part[1])
    price = f" ({report.amounts[LOST]})" if LOST in report.amounts else ""
    name, change = _CHANGES[largest]
    return (
        f"{happened}{counted(len(loss.interruptions), 'interruption')} cost "
        f"{human_span(loss.lost_gpu_s)} of GPU time{price}. The largest part is {name}, "
        f"{human_span(gpu_s)}: {change}."
    )


_CHANGES = {
    "stall": ("the stall of the saves", "make the state smaller, or see swansong advise"),
    "redone": (
        "training that had to be done again",
        "look for evacuations that are not SAFE, and for a shorter interval in swansong advise",
    ),
    "cloud": ("time without a VM", "order the next VM at the notice, or in more zones"),
    "boot": ("the boot", "put all packages and drivers into the image"),
    "start": ("the start of the trainer", "shorten its imports and its container's start"),
    "fetch": ("the download", "raise flush.connections, or use a bucket in the region of the VMs"),
    "load": ("the load", "see swansong advise"),
    "warm_up": ("the first step", "keep the caches of the compiler in the image"),
    "unknown": ("time that no VM recorded", "attach the hooks, which report steps"),
}
"""The name of each part of a loss, and the first change to try."""


def stories(history: RunHistory, loss: Loss | None) -> list[Story]:
    """Each evacuation; the one during which a VM ended comes with the interruption."""
    interruptions = (
        {} if loss is None else {each.after_generation: each for each in loss.interruptions}
    )
    evacuations = history.evacuations.evacuations
    resumptions = {life.generation: life.resumption for life in history.lives.lives}
    compared = {
        commit.ref.generation: commit.health
        for commit in history.commits.commits
        if 0 <= commit.health.get(REDONE_TO, -1) <= bounds.STEP_MAX
    }
    of_vms = defaultdict[tuple[int, int], list[RecordedEvacuation]](list)
    for each in evacuations:
        of_vms[each.generation, each.node].append(each)
    found = []
    for each in evacuations:
        of_vm, ended = of_vms[each.generation, each.node], interruptions.get(each.generation)
        last = (
            of_vm[-1] if ended is None else last_evacuation(of_vm, ended.ended_wall_s, _recorded_s)
        )
        was_outlived = each is not last
        if was_outlived:
            ended = None
        resumed = None if ended is None else resumptions.get(ended.generation)
        found.append(
            Story(
                recorded=each,
                interruption=ended,
                resumption=resumed,
                compared=compared.get(ended.generation, {}) if ended is not None else {},
                picture=picture(course(each, ended, resumed)),
                was_outlived=was_outlived,
            )
        )
    return found


def _recorded_s(recorded: RecordedEvacuation) -> float:
    """Length of the timeline: the VM lived at least until its last entry."""
    return recorded.timeline[-1].at_s if recorded.timeline else 0.0


def sentences(story: Story) -> Iterator[str]:
    """The course of an evacuation in plain English."""
    recorded, ended = story.recorded, story.interruption
    at = second(recorded.opened_wall_s)
    named = dict.fromkeys(f"{notice.kind} from {notice.source}" for notice in recorded.notices)
    notice = ", ".join(named)
    if is_of_peer(recorded):
        notice = "another VM of the job has it"
    left = (
        ""
        if recorded.deadline_s is None
        else f", {human_span(max(0.0, recorded.deadline_s))} before the deadline"
    )
    yield f"At {at} UTC the daemon acted on a notice{f' ({notice})' if notice else ''}{left}."
    opening = first_entry(recorded.timeline, "notice")
    plan = _PLANS.get(str(opening.facts.get("plan"))) if opening is not None else None
    if opening is not None and plan is not None:
        why = opening.facts.get("why")
        yield f"Its plan was to {plan}{f' ({why})' if why else ''}."
    yield f"The verdict is {recorded.verdict.value}: {recorded.reason}. {_MEANING[recorded.verdict]}"
    at_s, deadline_s = decided_s(recorded), recorded.deadline_s
    if at_s is not None and deadline_s is not None and at_s > deadline_s:
        verdicts = [entry for entry in recorded.timeline if entry.phase == "verdict"]
        timely = [entry.facts.get("verdict") for entry in verdicts if entry.at_s <= deadline_s]
        earlier = f", at which it was {timely[-1]}" if timely else ""
        yield f"It came {human_span(at_s - deadline_s)} after the deadline{earlier}."
    if story.was_outlived:
        yield "The VM outlived this deadline, and training continued."
        return
    if ended is None:
        yield "No later VM has resumed the run since, as far as the bucket shows."
        return
    about = "about " if ended.is_estimated else ""
    again = ended.last_step - ended.start_step
    redone = (
        f"{about}{counted(again, 'step')} had to be done again ({human_span(ended.redone_s)})"
        if again > 0
        else "no step had to be done again"
    )
    where = "A restarted daemon on the same VM" if ended.is_same_vm else "The next VM"
    yield (
        f"{where} completed its first new step {about}{human_span(ended.down_s)} after the last one, "
        f"and {redone}."
    )
    if story.compared.get("redone_differs"):
        yield (
            f"The repeated steps differ from the interrupted run, at step {story.compared[REDONE_TO]:.0f} "
            "or later: see docs/trainers/checks.md#redone-steps."
        )
    elif story.compared:
        yield f"The repeated steps are as before, up to step {story.compared[REDONE_TO]:.0f}."


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the table that compares the plan of an evacuation with its outcome."""

    name: str
    plan: str
    outcome: str


def comparisons(story: Story) -> Iterator[Comparison]:
    """The plan of an evacuation against its outcome."""
    recorded = story.recorded
    opening = first_entry(recorded.timeline, "notice")
    pessimistic_s = number_in(opening, "pessimistic_s")
    plan = "not measured before"
    if recorded.expected_s is not None:
        plan = f"expected {human_span(recorded.expected_s)}"
        if pessimistic_s is not None and pessimistic_s >= recorded.expected_s:
            plan += f", at worst {human_span(pessimistic_s)}"
    outcome = "no commit" if recorded.took_s is None else human_span(recorded.took_s)
    if recorded.took_s is not None and recorded.expected_s:
        outcome += f" ({recorded.took_s / recorded.expected_s:.0%} of the forecast)"
    yield Comparison("Request to commit", plan, outcome)
    if recorded.deadline_s is not None:
        at_s = decided_s(recorded)
        yield Comparison(
            "Verdict",
            f"within {human_span(max(0.0, recorded.deadline_s))}",
            "not recorded" if at_s is None else f"after {human_span(at_s)}",
        )
    agreed = first_entry(recorded.timeline, "target")
    target = None if agreed is None else agreed.facts.get("step")
    yield Comparison(
        "Committed step",
        "no step was agreed on" if target is None else f"{target}, as the ranks agreed",
        "none" if recorded.commit is None else str(recorded.commit.step),
    )
