# SPDX-License-Identifier: Apache-2.0
"""The sources aws.rebalance, aws.asg and aws.scheduled, and all sources of one VM together."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import pytest
from swansong_bucket.model import DeadlineQuality, Health, Severity
from swansongd.config.config import DeadlineConfig, SourcesConfig
from swansongd.sources.aws import SPOT_PATH, TOKEN_PATH, AwsSource, AwsSpotSource, ImdsSession
from swansongd.sources.aws_events import (
    ASG_PATH,
    HISTORY_PATH,
    LIFE_CYCLE_PATH,
    REBALANCE_PATH,
    SCHEDULED_PATH,
    AwsAsgSource,
    AwsRebalanceSource,
    AwsScheduledSource,
)
from swansongd.sources.polled import PollOptions
from swansongd.sources.selection import open_sources
from swansongd.sources.source import Clocks

from testkit.emulators.aws_imds import ASG_KEY, HISTORY_KEY, META_DATA, event_date
from testkit.emulators.process import EmulatorProcess
from testkit.source_run import SourceRun, asked, control, polls
from testkit.waiting import until

PATHS: dict[type[AwsSource], str] = {
    AwsSpotSource: SPOT_PATH,
    AwsRebalanceSource: REBALANCE_PATH,
    AwsAsgSource: ASG_PATH,
    AwsScheduledSource: SCHEDULED_PATH,
}
KINDS = list(PATHS)


@pytest.fixture(scope="module")
def process() -> Iterator[EmulatorProcess]:
    with EmulatorProcess("testkit.emulators.aws_imds") as process:
        yield process


@pytest.fixture
def imds(process: EmulatorProcess) -> str:
    for order in ("clear", "quiet", "invalidate-tokens"):
        control(process.url, order)
    return process.url


def source(
    kind: type[AwsSource],
    url: str,
    *,
    session: ImdsSession | None = None,
    timeout_s: float = 5.0,
    blind_after_s: float = 30.0,
    wall_ahead_s: float = 0.0,
) -> AwsSource:
    options = PollOptions(
        metadata_url=url,
        poll_interval_s=0.05,
        assumed_grace_s=25.0,
        clocks=Clocks(wall=lambda: time.time() + wall_ahead_s),
        timeout_s=timeout_s,
        blind_after_s=blind_after_s,
        recheck_s=0.2,
    )
    return kind(options, session)


def asg(url: str, state: str | None) -> None:
    control(url, "set", path=ASG_KEY, value=state)


def raise_all(url: str) -> None:
    """A notice of each source."""
    control(url, "notice", action="terminate", in_s=60)
    control(url, "rebalance")
    control(url, "schedule", code="instance-stop", in_s=3600)
    asg(url, "Terminated")


# ---------------------------------------------------------------- what all of them have in common


@pytest.mark.fault("N05")
@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_value_is_the_normal_state(imds: str, kind: type[AwsSource]) -> None:
    """Polls without an announcement post one status, ok; an empty list and 404 mean the same."""
    with SourceRun(source(kind, imds)) as run:
        polls(imds, f"GET {PATHS[kind]}")
        control(imds, "fault", path=PATHS[kind], kind="status", value=404)
        polls(imds, f"GET {PATHS[kind]}")
    assert [(s.source, s.health) for s in run.statuses] == [(kind.name, Health.OK)]
    assert len(run.events) == 1


@pytest.mark.fault("N03", "N06")
@pytest.mark.parametrize(
    ("kind", "status"),
    [(AwsSpotSource, 401), (AwsSpotSource, 403), *((kind, 503) for kind in KINDS)],
)
def test_refusals_are_unknown_and_never_withdraw(
    imds: str, kind: type[AwsSource], status: int
) -> None:
    """An outage makes the source degraded, then blind, and withdraws nothing; a valid response does.

    So does a token that is rejected again and again.
    """
    with SourceRun(source(kind, imds, blind_after_s=0.3)) as run:
        raise_all(imds)
        run.await_notice()
        control(imds, "fault", path=PATHS[kind], kind="status", value=status)
        control(imds, "quiet")
        run.await_health(Health.BLIND)
        polls(imds, f"GET {PATHS[kind]}", 2)
        assert str(status) in run.statuses[-1].reason
        assert run.withdrawals == []
        control(imds, "clear")
        run.await_withdrawal()
        run.await_health(Health.OK)
    healths = [status.health for status in run.statuses]
    assert healths[-3:] == [Health.DEGRADED, Health.BLIND, Health.OK]
    assert [w.source for w in run.withdrawals] == [kind.name]
    assert len(run.notices) == 1


@pytest.mark.fault("N07")
def test_no_other_path_delays_the_spot_notice(imds: str) -> None:
    """While another path hangs for longer than the test, spot polls continue and the notice arrives."""
    control(imds, "fault", path=LIFE_CYCLE_PATH, kind="hang")
    session = ImdsSession()
    with ExitStack() as stack:
        runs = [
            stack.enter_context(SourceRun(source(kind, imds, session=session, timeout_s=60)))
            for kind in KINDS
        ]
        until(lambda: asked(imds, f"GET {LIFE_CYCLE_PATH}", "hang"), what="the other path to hang")
        polls(imds, f"GET {SPOT_PATH}", 10)
        control(imds, "notice", action="terminate", in_s=60)
        until(lambda: runs[0].notices, what="the notice")
        assert runs[0].is_now(Health.OK)


@pytest.mark.fault("N03")
def test_one_token_for_all(imds: str) -> None:
    """All sources use the token of the first; once rejected, few of them replace it, and all recover.

    Each source has one connection.
    """
    session = ImdsSession()
    puts = f"PUT {TOKEN_PATH}"
    before, connections = asked(imds, puts), asked(imds, "connections")
    with ExitStack() as stack:
        runs = []
        for kind in KINDS:
            runs.append(stack.enter_context(SourceRun(source(kind, imds, session=session))))
            until(lambda: runs[-1].is_now(Health.OK), what="health")
        assert asked(imds, puts) - before == 1
        control(imds, "invalidate-tokens")
        for kind in KINDS:
            polls(imds, f"GET {PATHS[kind]}")
        assert 2 <= asked(imds, puts) - before <= 1 + len(KINDS)
        after = asked(imds, puts)
        for kind in KINDS:
            polls(imds, f"GET {PATHS[kind]}")
        assert asked(imds, puts) == after
        assert asked(imds, "connections") - connections == len(KINDS)
    assert [[s.health for s in run.statuses] for run in runs] == [[Health.OK]] * len(KINDS)


def test_token_is_renewed_beside_the_spot_polls(imds: str) -> None:
    """A renewal that hangs delays aws.rebalance, and never aws.spot."""
    session = ImdsSession()
    puts = f"PUT {TOKEN_PATH}"
    with (
        SourceRun(source(AwsSpotSource, imds, session=session, timeout_s=60)) as spot,
        SourceRun(source(AwsRebalanceSource, imds, session=session, timeout_s=60)) as rebalance,
    ):
        spot.await_health(Health.OK)
        rebalance.await_health(Health.OK)
        control(imds, "fault", kind="refuse-put")
        hung = asked(imds, puts, "hang")
        assert session.token
        session.store_token(session.token, time.monotonic())
        until(lambda: asked(imds, puts, "hang") > hung, what="the renewal to hang")
        polls(imds, f"GET {SPOT_PATH}", 10)
    assert [status.health for status in spot.statuses] == [Health.OK]


# ---------------------------------------------------------------- the life cycle


def test_on_demand_vm_has_no_spot_notices(imds: str) -> None:
    """aws.spot and aws.rebalance are unsupported, the latter polls less often; a notice still counts."""
    control(imds, "set", path="instance-life-cycle", value="on-demand")
    session = ImdsSession()
    with (
        SourceRun(source(AwsSpotSource, imds, session=session)) as spot,
        SourceRun(source(AwsRebalanceSource, imds, session=session)) as rebalance,
        SourceRun(source(AwsAsgSource, imds, session=session)) as group,
    ):
        spot.await_health(Health.UNSUPPORTED)
        rebalance.await_health(Health.UNSUPPORTED)
        before = asked(imds, f"GET {SPOT_PATH}"), asked(imds, f"GET {REBALANCE_PATH}")
        polls(imds, f"GET {REBALANCE_PATH}", 3)
        more = asked(imds, f"GET {SPOT_PATH}"), asked(imds, f"GET {REBALANCE_PATH}")
        assert more[0] - before[0] > more[1] - before[1]
        assert group.is_now(Health.OK)
        control(imds, "notice", action="terminate", in_s=60)
        spot.await_notice()
        spot.await_health(Health.OK)
        control(imds, "withdraw")
        spot.await_health(Health.UNSUPPORTED)
        control(imds, "set", path="instance-life-cycle", value="spot")
        spot.await_health(Health.OK)
        rebalance.await_health(Health.OK)


def test_life_cycle_of_a_spot_vm_is_read_once(imds: str) -> None:
    """The life cycle of a spot VM never changes; until it is known, the VM may be one."""
    control(imds, "fault", path=LIFE_CYCLE_PATH, kind="status", value=503, count=3)
    before = asked(imds, f"GET {LIFE_CYCLE_PATH}")
    with SourceRun(source(AwsRebalanceSource, imds)) as run:
        polls(imds, f"GET {REBALANCE_PATH}", 8)
    assert asked(imds, f"GET {LIFE_CYCLE_PATH}") - before == 4
    assert [status.health for status in run.statuses] == [Health.OK]


# ---------------------------------------------------------------- aws.asg


@pytest.mark.fault("N09")
def test_states_that_end_the_vm_and_states_that_do_not(imds: str) -> None:
    """A state of the first kind is one notice, which any state of the other kind withdraws.

    Its deadline is assumed, and its identity is the same after a restart of the daemon.
    """
    with SourceRun(source(AwsAsgSource, imds)) as run:
        for number, (state, kind, back) in enumerate(
            (
                ("Terminated", "scale-in", "InService"),
                ("Warmed:Terminated", "scale-in", "Standby"),
                ("Warmed:Stopped", "stop", "Detached"),
                ("Warmed:Hibernated", "hibernate", "Warmed:Running"),
                ("Terminated", "scale-in", None),
            ),
            start=1,
        ):
            asg(imds, state)
            notice = run.await_notice(number)
            assert (notice.kind, notice.identity) == (kind, f"aws.asg:{state}")
            assert notice.severity is Severity.IMMINENT
            assert notice.deadline_quality is DeadlineQuality.ASSUMED
            assert run.leaves(25.0)
            polls(imds, f"GET {ASG_PATH}")
            assert len(run.notices) == number
            asg(imds, back)
            assert (back or "not set") in run.await_withdrawal(number).reason


@pytest.mark.fault("N08")
@pytest.mark.parametrize("state", ["", "x" * 5000])
def test_unknown_state_is_unknown(imds: str, state: str) -> None:
    """It neither raises nor withdraws a notice; the reason names the state."""
    with SourceRun(source(AwsAsgSource, imds)) as run:
        asg(imds, "Terminated")
        run.await_notice()
        asg(imds, state)
        run.await_health(Health.DEGRADED, "lifecycle state")
        assert len(run.statuses[-1].reason) < 120
        assert run.withdrawals == []
        asg(imds, "Terminated")
        run.await_health(Health.OK)
        assert len(run.notices) == 1


# ---------------------------------------------------------------- aws.scheduled


@pytest.mark.fault("N09", "N11")
def test_event_is_a_notice_with_its_date(imds: str) -> None:
    """Its deadline is its date, by the server's Date; an idle source does not request the history.

    The local clock is twenty minutes off.
    """
    asked_before = asked(imds, f"GET {HISTORY_PATH}")
    with SourceRun(source(AwsScheduledSource, imds, wall_ahead_s=1200)) as run:
        polls(imds, f"GET {SCHEDULED_PATH}")
        assert asked(imds, f"GET {HISTORY_PATH}") == asked_before
        control(imds, "schedule", code="instance-retirement", in_s=86400, event_id="e-1")
        notice = run.await_notice()
        assert abs(notice.deadline_mono_s - time.monotonic() - 86400) < 3
        assert (notice.kind, notice.severity) == ("retirement", Severity.SCHEDULED)
        polls(imds, f"GET {SCHEDULED_PATH}")
        assert len(run.notices) == 1


def test_finished_event_withdraws(imds: str) -> None:
    """An event that moved to the history is withdrawn, and the reason states how it ended."""
    with SourceRun(source(AwsScheduledSource, imds)) as run:
        control(imds, "schedule", code="instance-stop", in_s=3600, event_id="e-1")
        run.await_notice()
        control(imds, "finish", event_id="e-1", state="completed")
        withdrawn = run.await_withdrawal()
        assert "completed" in withdrawn.reason
        polls(imds, f"GET {SCHEDULED_PATH}")
    assert (len(run.notices), len(run.withdrawals)) == (1, 1)


def test_an_event_that_moves_between_two_requests_is_withdrawn_with_its_end(imds: str) -> None:
    """It is listed as active, and as canceled in the history, which is read later."""
    with SourceRun(source(AwsScheduledSource, imds)) as run:
        event = control(imds, "schedule", code="instance-stop", in_s=3600, event_id="e-1")
        run.await_notice()
        ended = {**event, "Description": "[Canceled] by AWS", "State": "canceled"}
        control(imds, "set", path=HISTORY_KEY, value=json.dumps([ended]))
        withdrawn = run.await_withdrawal()
        assert "canceled" in withdrawn.reason


def test_vanished_event_withdraws(imds: str) -> None:
    """An event that is in neither list is withdrawn, even if the history cannot be read."""
    with SourceRun(source(AwsScheduledSource, imds)) as run:
        control(imds, "fault", path=HISTORY_PATH, kind="status", value=503)
        control(imds, "schedule", code="instance-stop", in_s=3600, event_id="e-1")
        run.await_notice()
        control(imds, "quiet")
        withdrawn = run.await_withdrawal()
    assert "no longer listed" in withdrawn.reason


def test_earliest_of_several_counts(imds: str) -> None:
    """An earlier event replaces a later one; when it is canceled, the later one counts again."""
    with SourceRun(source(AwsScheduledSource, imds)) as run:
        control(imds, "schedule", code="system-reboot", in_s=9000, event_id="late")
        run.await_notice()
        control(imds, "schedule", code="instance-stop", in_s=3600, event_id="early")
        run.await_notice(2)
        control(imds, "finish", event_id="early", state="canceled")
        run.await_notice(3)
        assert run.withdrawals == []
        control(imds, "schedule", code="system-reboot", in_s=20000, event_id="late")
        run.await_notice(4)
    kinds = [notice.kind for notice in run.notices]
    assert kinds == ["reboot", "stop", "reboot", "reboot"]
    assert [n.identity for n in run.notices] == [
        f"aws.scheduled:{name}" for name in ("late", "early", "late", "late")
    ]
    assert run.notices[3].deadline_mono_s > run.notices[2].deadline_mono_s + 5000


def test_events_that_are_over_raise_no_notice(imds: str) -> None:
    """An event is over by its state, its description or the history, even if it is still listed."""
    soon = event_date(datetime.now(UTC) + timedelta(hours=1))
    base = {"NotBefore": soon, "Code": "instance-stop", "State": "active"}
    over = [
        base | {"EventId": "a", "State": "canceled"},
        base | {"EventId": "b", "State": "Completed"},
        base | {"EventId": "c", "Description": "[Canceled] power"},
        base | {"EventId": "d"},
    ]
    for path, events in (
        (HISTORY_PATH, [base | {"EventId": "d", "State": "canceled"}, {"State": "completed"}]),
        (SCHEDULED_PATH, over),
    ):
        control(imds, "set", path=path.removeprefix(META_DATA), value=json.dumps(events))
    with SourceRun(source(AwsScheduledSource, imds)) as run:
        polls(imds, f"GET {SCHEDULED_PATH}")
        assert run.notices == []
        assert run.is_now(Health.OK)
        nameless = json.dumps([*over, base])
        path = SCHEDULED_PATH.removeprefix(META_DATA)
        control(imds, "set", path=path, value=nameless)
        run.await_notice()


@pytest.mark.fault("N08")
@pytest.mark.parametrize("body", ["", "{}", "[7]"])
def test_an_invalid_list_is_unknown(imds: str, body: str) -> None:
    """It degrades the source, and neither raises nor withdraws a notice."""
    with SourceRun(source(AwsScheduledSource, imds)) as run:
        control(imds, "schedule", code="instance-stop", in_s=3600)
        run.await_notice()
        control(imds, "fault", path=SCHEDULED_PATH, kind="body", value=body)
        run.await_health(Health.DEGRADED)
        control(imds, "clear")
        run.await_health(Health.OK)
    assert (len(run.notices), run.withdrawals) == (1, [])


# ---------------------------------------------------------------- as opened by the daemon


def test_each_source_raises_its_own_notice(imds: str) -> None:
    """All sources of a VM together: each notice, and each withdrawal, comes from one source."""
    config = SourcesConfig(cloud="aws", metadata_url=imds, poll_interval_s=0.02)
    stop = "instance-stop"
    with ExitStack() as stack:
        runs = [
            stack.enter_context(SourceRun(opened))
            for opened in open_sources(config, DeadlineConfig(), boot_id="b")
        ]
        until(lambda: len([run for run in runs if run.is_now(Health.OK)]) >= len(KINDS))
        for announce, source_name, kind in (
            (lambda: control(imds, "notice", action="hibernate", in_s=60), "aws.spot", "hibernate"),
            (lambda: control(imds, "rebalance"), "aws.rebalance", "rebalance"),
            (lambda: control(imds, "schedule", code=stop, in_s=3600), "aws.scheduled", "stop"),
            (lambda: asg(imds, "Terminated"), "aws.asg", "scale-in"),
        ):
            for run in runs:
                run.events.clear()
            announce()
            until(lambda: [each for run in runs for each in run.notices], what=kind)
            for path in PATHS.values():
                polls(imds, f"GET {path}")
            raised = [(each.source, each.kind) for run in runs for each in run.notices]
            assert raised == [(source_name, kind)]
            control(imds, "quiet")
            until(lambda: [each for run in runs for each in run.withdrawals], what=f"end of {kind}")
            assert [each.source for run in runs for each in run.withdrawals] == [source_name]


def test_grace_of_the_lifecycle_hook_can_be_configured(imds: str) -> None:
    """The configured grace period of the hook replaces the assumed one for aws.asg."""
    opened = open_sources(
        SourcesConfig(cloud="aws", metadata_url=imds, poll_interval_s=0.05, asg_grace_s=300.0),
        DeadlineConfig(),
        boot_id="b",
    )
    (group,) = [one for one in opened if one.name == "aws.asg"]
    asg(imds, "Terminated")
    with SourceRun(group) as run:
        run.await_notice()
        assert run.leaves(300.0)
