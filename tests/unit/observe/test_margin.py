# SPDX-License-Identifier: Apache-2.0
"""The margin that a notice right now would leave, for each kind of notice."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from swansong_bucket.model import Health, NoticeKind
from swansong_tools.commands.view.once import print_status
from swansongd.config.config import DeadlineConfig, SourcesConfig
from swansongd.core.events import FlushFailed, TrainerFailed, TrainerProgress
from swansongd.core.pace import Figure
from swansongd.observe.build_status import status_of
from swansongd.observe.margin import margins
from swansongd.observe.status import STORE_HEALTH, Margin, StagingStatus
from swansongd.sources.selection import notice_kinds, open_sources

from testkit.paced import PacedVm, Physics
from testkit.story import MIB, Story

KINDS = (
    NoticeKind(source="aws.spot", grace_s=120.0),
    NoticeKind(source="logind", grace_s=19.0),
    NoticeKind(source="deadline", grace_s=120.0, is_scheduled=True),
)
SLOW = Physics(size_bytes=1024 * MIB, files=2, save_s=2.0, link_bytes_per_s=40 * MIB)


def lines(story: Story, capsys: pytest.CaptureFixture[str]) -> str:
    """The output of ``swansong status`` for this state, on one line."""
    print_status(story.status)
    return " ".join(capsys.readouterr().out.split())


def test_each_kind_of_notice_has_its_own_margin(capsys: pytest.CaptureFixture[str]) -> None:
    """27 s of work: an AWS notice leaves time, a shutdown does not, and the report names the state left."""
    vm = PacedVm(SLOW, 1)
    vm.configure(notice_kinds=KINDS)
    vm.periodic()
    shutdown, *long = margins(vm.state)
    assert shutdown.source == "logind"
    assert shutdown.spare_s is not None
    assert shutdown.spare_s < -5
    assert shutdown.lost_since_step == vm.step
    assert {m.source for m in long} == {"aws.spot", "deadline"}
    assert all(m.spare_s is not None and 75 < m.spare_s < 95 for m in long), long
    shown = lines(vm, capsys)
    assert re.search(r"margin aws\.spot: [\d.]+ s of 2 min to spare", shown), shown
    assert f"short: training since step {vm.step} is lost" in shown


def measured(*, commit_s: float | None = None, send_s: float = 10.0) -> Story:
    """A save of 2 s, then 10 s to send 100 MiB; the reserve is 5 s."""
    story = Story(notice_kinds=KINDS, reserve_s=5.0)
    story.join(step=3, save_s=2.0, save_bytes=100 * MIB)
    commit = None if commit_s is None else Figure(commit_s, samples=8)
    known = replace(story.state.learned.pace, commit_s=commit)
    story.state = replace(
        story.state,
        learned=replace(story.state.learned, bandwidth_bytes_per_s=100 * MIB / send_s, pace=known),
    )
    return story


@pytest.mark.parametrize(
    ("commit_s", "variance", "needed_s"),
    [
        pytest.param(None, 0.0, 2.0 + 10.0 + 5.0, id="nothing known of the commit"),
        pytest.param(1.0, 0.15**2 * 0.22, 2.0 + 10.0 + 5.0, id="the reserve covers the commit"),
        pytest.param(7.0, 1.05**2 * 0.22, 2.0 + 10.0 + 7.0, id="the commit exceeds the reserve"),
    ],
)
def test_a_margin_counts_save_send_reserve_or_commit_and_the_spread(
    commit_s: float | None, variance: float, needed_s: float
) -> None:
    """A term without samples deviates by 15 %; eight equal samples leave 22 % of that variance."""
    story = measured(commit_s=commit_s)
    spread_s = 1.28 * math.sqrt((0.15 * 2.0) ** 2 + (0.15 * 10.0) ** 2 + variance)
    spares_s = {margin.source: margin.spare_s for margin in margins(story.state)}
    assert spares_s == {
        "logind": pytest.approx(19.0 - needed_s - spread_s, abs=0.06),
        "aws.spot": pytest.approx(120.0 - needed_s - spread_s, abs=0.06),
        "deadline": pytest.approx(120.0 - needed_s - spread_s, abs=0.06),
    }


def test_without_a_trainer_the_rest_of_the_sealed_set_and_the_commit_count() -> None:
    """100 MiB are sealed and not sent; once they are stored, only the manifest is missing."""
    for commit_s, manifest_s in ((None, 5.0), (7.0, 7.0)):
        story = measured(commit_s=commit_s)
        story.seal(3)
        story.leave()
        assert [m.spare_s for m in margins(story.state)][-1] == 120.0 - 10.0 - manifest_s
    story.flushed()
    assert story.state.commits.stored
    assert [m.spare_s for m in margins(story.state)][-1] == 120.0 - 7.0


def test_an_end_that_is_known_hours_ahead_counts_from_the_start_of_its_evacuation() -> None:
    """It begins at least twice the checkpoint and the reserve before the end."""
    end = margins(measured(send_s=100.0).state)[-1]
    assert end.source == "deadline"
    assert end.grace_s == 2 * (2.0 + 100.0) + 5.0


def test_unknown_values_give_no_margin(capsys: pytest.CaptureFixture[str]) -> None:
    """Before the first save and flush nothing is promised."""
    story = Story(notice_kinds=KINDS)
    story.join(step=3)
    assert {margin.spare_s for margin in margins(story.state)} == {None}
    assert "unknown, save and bandwidth are not measured yet" in lines(story, capsys)


def test_a_sealed_set_that_fits_is_not_lost() -> None:
    """The new checkpoint does not fit; the uncommitted set, which is half sent, does."""
    vm = PacedVm(SLOW, 2)
    vm.configure(notice_kinds=KINDS)
    vm.periodic()
    vm.step += 10
    vm._seal("", 2.0)
    while vm.state.candidates[0].bytes_left > 200 * MIB:
        vm._tick(0.1)
    assert margins(vm.state)[0].lost_since_step == vm.step


def test_without_a_trainer_only_sealed_sets_count() -> None:
    """All is committed: nothing is needed."""
    vm = PacedVm(SLOW, 3)
    vm.configure(notice_kinds=KINDS)
    vm.periodic()
    vm.leave()
    assert [m.spare_s for m in margins(vm.state)] == [19.0, 120.0, 120.0]


def test_a_source_that_the_vm_does_not_have_has_no_margin() -> None:
    story = Story(notice_kinds=KINDS)
    story.health("logind", Health.UNSUPPORTED)
    assert [margin.source for margin in margins(story.state)] == ["aws.spot", "deadline"]


def fitting(story: Story, *, free_bytes: int = 2**40) -> list[Margin]:
    """The margins in the status, with this space in staging."""
    staging = StagingStatus(size_bytes=2**40, free_bytes=free_bytes)
    return list(status_of(replace(story.snapshot(), staging=staging)).margins)


def fails_to_send(story: Story) -> None:
    staged = story.seal(4)
    story.tell(FlushFailed(story.flight.flush_id, "503", void=False))
    assert staged in story.staging


def stalls(story: Story) -> None:
    story.tell(TrainerProgress(1, 4, step_s=0.1))
    story.wait(600.0)


@pytest.mark.parametrize(
    ("happens", "problem"),
    [
        (lambda story: story.leave(), "the position of rank 0 is unknown"),
        (lambda story: story.health(STORE_HEALTH, Health.BLIND), "the store is blind"),
        (fails_to_send, "uploads fail, 1 in a row"),
        (stalls, "rank 0 makes no progress"),
        (lambda story: story.tell(TrainerFailed(1, "", "disk full", 5)), "failed: disk full"),
        (lambda story: story.join(2, rank=1, ranks=3), "1 of 3 ranks are not connected"),
        (
            lambda story: story.join(2, rank=1, pid=9, start_id="b"),
            "the ranks are not of one start",
        ),
        (lambda story: story.join(3, start_id="b", pid=400), "the training has no generation yet"),
    ],
)
def test_a_checkpoint_that_would_not_be_safe_does_not_fit(
    happens: Callable[[Story], object], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever time a notice leaves, no margin fits, and the status says why."""
    story = measured()
    story.commit(3, after_s=10.0)
    assert {m.fits for m in fitting(story)} == {True}
    story.grants = False
    happens(story)
    assert {m.fits for m in fitting(story)} == {False}
    assert all(problem in str(m.problem) for m in fitting(story)), fitting(story)
    assert problem in lines(story, capsys)


def test_a_full_staging_holds_no_checkpoint() -> None:
    """A checkpoint takes 100 MiB."""
    story = measured()
    assert {m.fits for m in fitting(story, free_bytes=100 * MIB)} == {True}
    assert {m.problem for m in fitting(story, free_bytes=99 * MIB)} == {
        "a checkpoint takes 100 MiB, and staging has 99 MiB free"
    }


def test_a_blind_source_misses_its_own_notice() -> None:
    """The others are seen."""
    story = measured()
    story.health("aws.spot", Health.BLIND)
    assert {m.source: m.fits for m in fitting(story)} == {
        "logind": True,
        "aws.spot": False,
        "deadline": True,
    }


def test_the_end_of_the_run_needs_no_trainer() -> None:
    """It is committed, so that a notice ends with SAFE."""
    story = measured()
    story.commit(3, after_s=10.0, is_final=True)
    story.leave(is_goodbye=True)
    assert {m.fits for m in fitting(story)} == {True}


ON_AWS = {("aws.spot", 120.0), ("aws.scheduled", 120.0)}
ON_GCP = {("gcp.maintenance", 120.0), ("gcp.upcoming", 120.0), ("gcp.stop", 25.0)}
SHORT, LONG = ("gcp.preempted", 25.0), ("gcp.preempted", 115.0)


@pytest.mark.parametrize(
    ("config", "graces"),
    [
        (SourcesConfig(cloud="aws"), ON_AWS),
        (SourcesConfig(cloud="aws", asg_grace_s=300.0), ON_AWS | {("aws.asg", 300.0)}),
        (
            SourcesConfig(cloud="aws", asg_name="g", asg_hook="h"),
            ON_AWS | {("aws.asg", 25.0)},
        ),
        (SourcesConfig(cloud="gcp"), ON_GCP | {SHORT, LONG}),
        (SourcesConfig(cloud="gcp", gcp_preemption_notice_s=120.0), ON_GCP | {LONG}),
        (SourcesConfig(cloud="gcp", gcp_preemption_notice_s=0.0), ON_GCP | {SHORT}),
        (SourcesConfig(cloud="none", max_run_duration_s=3600.0), {("deadline", 120.0)}),
    ],
)
def test_the_kinds_of_notices_follow_from_the_configuration(
    config: SourcesConfig, graces: set[tuple[str, float]]
) -> None:
    """With the two kinds that each host has."""
    deadline = DeadlineConfig()
    kinds = notice_kinds(open_sources(config, deadline, boot_id="b"), config, deadline)
    host = {("logind", 19.0), ("host", 25.0)}
    assert {(kind.source, kind.grace_s) for kind in kinds} == graces | host


WITHOUT_LENGTH = {"aws.rebalance"}
"""An advisory notice, which announces no end."""


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_every_source_of_a_cloud_has_a_margin_or_announces_no_end(cloud: str) -> None:
    """A new source has to be decided here.  The group has a lifecycle hook."""
    config = SourcesConfig(
        cloud=cloud, asg_name="g", asg_hook="h", max_run_duration_s=3600.0, gpu="off"
    )
    deadline = DeadlineConfig()
    sources = open_sources(config, deadline, boot_id="b")
    kinds = {kind.source for kind in notice_kinds(sources, config, deadline)}
    assert {source.name for source in sources} - kinds == WITHOUT_LENGTH & {
        source.name for source in sources
    }
