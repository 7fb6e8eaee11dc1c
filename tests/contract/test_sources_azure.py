# SPDX-License-Identifier: Apache-2.0
"""The sources azure.deletion and azure.scheduled against the emulated metadata service."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from swansong_bucket.model import DeadlineQuality, Health, Severity
from swansongd.sources.azure import (
    EVENTS_PATH,
    NAME_PATH,
    AzureDeletionSource,
    AzureScheduledSource,
    AzureSource,
)
from swansongd.sources.polled import PollOptions
from swansongd.sources.source import Clocks

from testkit.emulators.azure_imds import VM_NAME
from testkit.emulators.process import EmulatorProcess
from testkit.source_run import SourceRun, asked, control, http, polls
from testkit.waiting import until

GET = f"GET {EVENTS_PATH}"
GRACE_S = 25.0


@pytest.fixture(scope="module")
def process() -> Iterator[EmulatorProcess]:
    with EmulatorProcess("testkit.emulators.azure_imds") as process:
        yield process


@pytest.fixture
def imds(process: EmulatorProcess) -> str:
    control(process.url, "clear")
    control(process.url, "end")
    return process.url


def source(
    kind: type[AzureSource], url: str, *, wall_ahead_s: float = 0.0, approves: bool = False
) -> AzureSource:
    options = PollOptions(
        metadata_url=url,
        poll_interval_s=0.05,
        assumed_grace_s=GRACE_S,
        blind_after_s=0.3,
        timeout_s=0.3,
        clocks=Clocks(wall=lambda: time.time() + wall_ahead_s),
    )
    return kind(options, approves=approves)


@pytest.mark.fault("N05", "N06", "N07")
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status", "value": 503},
        {"kind": "status", "value": 404},
        {"kind": "hang"},
        {"kind": "body", "value": "[]"},
        {"kind": "body", "value": '{"Events": [{"EventType": "Preempt"}]}'},
        {"kind": "body", "value": "[" * 50_000},
    ],
    ids=["503", "404", "hang", "list", "no-id", "deep"],
)
def test_without_a_valid_document_the_events_are_unknown(
    imds: str, fault: dict[str, object]
) -> None:
    """No fault of the service is a notice, or withdraws one; the source is blind meanwhile, and recovers."""
    with SourceRun(source(AzureDeletionSource, imds)) as run:
        run.await_health(Health.OK)
        assert run.notices == []
        control(imds, "event", type="Preempt", in_s=600)
        run.await_notice()
        control(imds, "fault", path=EVENTS_PATH, **fault)
        run.await_health(Health.BLIND)
        assert run.withdrawals == []
        control(imds, "end")
        control(imds, "clear")
        run.await_withdrawal()
        run.await_health(Health.OK)
    assert len(run.notices) == 1


@pytest.mark.fault("N09")
@pytest.mark.parametrize(
    ("type_", "name", "kind"),
    [
        ("Preempt", "azure.deletion", "reclaim"),
        ("Terminate", "azure.deletion", "scale-in"),
        ("Reboot", "azure.scheduled", "reboot"),
        ("Redeploy", "azure.scheduled", "redeploy"),
        ("Defragment", "azure.scheduled", "maintenance"),
        ("Freeze", "", ""),
    ],
)
def test_each_type_of_event_is_a_notice_of_one_source(
    imds: str, type_: str, name: str, kind: str
) -> None:
    """A deletion is imminent, all else is scheduled, at the stated time; a freeze loses nothing."""
    control(imds, "event", type=type_, in_s=600)
    before_mono_s = time.monotonic()
    with (
        SourceRun(source(AzureDeletionSource, imds)) as one,
        SourceRun(source(AzureScheduledSource, imds)) as other,
    ):
        for run in (one, other):
            run.await_health(Health.OK)
    notices = [*one.notices, *other.notices]
    assert [(each.source, each.kind) for each in notices] == ([(name, kind)] if name else [])
    for notice in notices:
        imminent = name == "azure.deletion"
        assert notice.severity is (Severity.IMMINENT if imminent else Severity.SCHEDULED)
        assert notice.deadline_quality is DeadlineQuality.STATED
        assert notice.deadline_mono_s - before_mono_s == pytest.approx(600, abs=5)


def test_an_event_of_other_vms_is_no_notice(imds: str) -> None:
    """The document has events of a whole scale set; names are compared without regard to case."""
    with SourceRun(source(AzureDeletionSource, imds)) as run:
        control(imds, "event", type="Preempt", in_s=600, resources=["trainers_1", "trainers_2"])
        polls(imds, GET)
        assert run.notices == []
        control(imds, "event", type="Preempt", in_s=600, resources=["x", VM_NAME.upper()])
        run.await_notice()


@pytest.mark.fault("N06")
def test_an_event_is_unknown_while_the_name_of_the_vm_is(imds: str) -> None:
    """Without its name the VM cannot tell whether an event concerns it: degraded, no notice, then both."""
    control(imds, "fault", path=NAME_PATH, kind="status", value=500)
    control(imds, "event", type="Preempt", in_s=600)
    with SourceRun(source(AzureDeletionSource, imds)) as run:
        run.await_health(Health.BLIND)
        assert run.notices == []
        control(imds, "clear")
        run.await_notice()


def test_a_started_event_keeps_its_deadline(imds: str) -> None:
    """An event that starts loses its time: the first deadline stays, and nothing is posted again."""
    with SourceRun(source(AzureDeletionSource, imds)) as run:
        started = control(imds, "event", type="Preempt", in_s=40)["id"]
        run.await_notice()
        control(imds, "start", id=started)
        polls(imds, GET)
        assert len(run.notices) == 1
        control(imds, "end", id=started)
        run.await_withdrawal()


def test_an_event_that_begins_as_started_has_the_assumed_grace_period(imds: str) -> None:
    """After a failure of the hardware, Azure starts an event without an announcement."""
    control(imds, "event", type="Reboot", in_s=0)
    with SourceRun(source(AzureScheduledSource, imds)) as run:
        notice = run.await_notice()
    assert notice.deadline_quality is DeadlineQuality.ASSUMED
    assert notice.deadline_mono_s - time.monotonic() == pytest.approx(GRACE_S, abs=5)


@pytest.mark.fault("N08")
def test_a_wrong_clock_moves_no_deadline(imds: str) -> None:
    """The time of an event is compared with the clock of the service; the status names the difference."""
    control(imds, "event", type="Preempt", in_s=60)
    with SourceRun(source(AzureDeletionSource, imds, wall_ahead_s=3600.0)) as run:
        until(lambda: run.statuses and run.notices, what="the notice")
    assert run.notices[0].deadline_mono_s - time.monotonic() == pytest.approx(60, abs=5)
    assert "the local clock is 3" in run.statuses[-1].reason


def test_the_nearest_event_counts(imds: str) -> None:
    """Of two events the nearer one is the notice; once it is over, the other one is."""
    later = control(imds, "event", type="Redeploy", in_s=900)["id"]
    with SourceRun(source(AzureScheduledSource, imds)) as run:
        run.await_notice()
        sooner = control(imds, "event", type="Reboot", in_s=100)["id"]
        run.await_notice(2)
        control(imds, "end", id=sooner)
        run.await_notice(3)
    found = [each.identity.partition(":")[2] for each in run.notices]
    assert found == [later, sooner, later]


def approvals(url: str) -> list[str]:
    found: list[str] = http("GET", f"{url}/_control/approvals").json()
    return found


def test_an_event_is_approved_after_safe_only_and_only_if_it_names_no_other_vm(imds: str) -> None:
    """Approval lets Azure proceed for all VMs of the event; a request that fails is sent again, once."""
    before = approvals(imds)
    watched = source(AzureScheduledSource, imds, approves=True)
    with SourceRun(watched) as run:
        own = control(imds, "event", type="Reboot", in_s=600)["id"]
        shared = control(imds, "event", type="Redeploy", in_s=600, resources=[VM_NAME, "x"])["id"]
        run.await_notice()
        polls(imds, GET)
        assert approvals(imds) == before
        control(imds, "fault", path=EVENTS_PATH, method="POST", kind="status", value=503, count=2)
        watched.settle(frozenset(f"azure.scheduled:{id_}" for id_ in (own, shared)))
        until(lambda: approvals(imds) != before, what="the approval")
        polls(imds, GET)
        assert approvals(imds) == [*before, own]
    assert asked(imds, f"POST {EVENTS_PATH}", "503") >= 2


def test_an_approval_is_a_choice(imds: str) -> None:
    """By default no event is approved: Azure waits for its time, and training continues until then."""
    before = approvals(imds)
    watched = source(AzureDeletionSource, imds)
    with SourceRun(watched) as run:
        own = control(imds, "event", type="Preempt", in_s=600)["id"]
        run.await_notice()
        watched.settle(frozenset({f"azure.deletion:{own}"}))
        polls(imds, GET)
    assert approvals(imds) == before
