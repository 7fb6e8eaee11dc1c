# SPDX-License-Identifier: Apache-2.0
"""The lifecycle hook of an Auto Scaling group, against a strict emulator of its API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs
from swansongd.sources.asg import LifecycleHook

from testkit.emulators.aws_imds import TOKEN_PATH
from testkit.emulators.process import EmulatorProcess
from testkit.source_run import control, http
from testkit.waiting import until

BEAT = "RecordLifecycleActionHeartbeat"
COMPLETE = "CompleteLifecycleAction"


@pytest.fixture(scope="module")
def imds() -> Iterator[str]:
    with EmulatorProcess("testkit.emulators.aws_imds") as process:
        yield process.url


@pytest.fixture
def api() -> Iterator[str]:
    with EmulatorProcess("testkit.emulators.autoscaling") as process:
        yield process.url


@pytest.fixture(autouse=True)
def credentials(imds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the credentials of the VM's role, from the emulated metadata service."""
    control(imds, "clear")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE",
                 "AWS_EC2_METADATA_DISABLED"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", imds)


@contextmanager
def hook(
    imds: str,
    api: str,
    *,
    group: str = "trainers",
    interval_s: float = 0.1,
    timeout_s: float = 5.0,
) -> Iterator[LifecycleHook]:
    made = LifecycleHook(
        hook="swansong",
        group=group,
        metadata_url=imds,
        endpoint=api,
        heartbeat_interval_s=interval_s,
        timeout_s=timeout_s,
    )
    made.start()
    try:
        yield made
    finally:
        made.stop()


def calls(api: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = http("GET", f"{api}/_control/calls").json()
    return found


def actions(api: str) -> list[str]:
    return [call["Action"] for call in calls(api)]


def beat_until(lifecycle: LifecycleHook, is_enough: Callable[[], bool]) -> None:
    """Ask for heartbeats until this holds."""

    def is_so() -> bool:
        lifecycle.heartbeat()
        return is_enough()

    until(is_so, what="heartbeats")


def test_heartbeats_then_completion(imds: str, api: str) -> None:
    """Heartbeats during the evacuation, then one completion, for this VM and region."""
    with hook(imds, api) as lifecycle:
        beat_until(lifecycle, lambda: actions(api).count(BEAT) >= 3)
        lifecycle.complete()
        until(lambda: COMPLETE in actions(api), what="completion")
        beat_until(lifecycle, lambda: actions(api)[-1] == BEAT)  # of a later evacuation
    (completion,) = (call for call in calls(api) if call["Action"] == COMPLETE)
    assert completion == {
        "Action": COMPLETE,
        "Version": "2011-01-01",
        "LifecycleHookName": "swansong",
        "AutoScalingGroupName": "trainers",
        "InstanceId": "i-0123456789abcdef0",
        "LifecycleActionResult": "CONTINUE",
    }


def test_heartbeats_keep_their_interval(imds: str, api: str) -> None:
    """Any number of calls sends one heartbeat per interval; the completion is not delayed."""
    with hook(imds, api, interval_s=3600) as lifecycle:
        beat_until(lifecycle, lambda: BEAT in actions(api))
        for _ in range(100):
            lifecycle.heartbeat()
        lifecycle.complete()
        until(lambda: COMPLETE in actions(api), what="completion")
        assert actions(api) == [BEAT, COMPLETE]


def test_completion_is_retried_until_it_succeeds(imds: str, api: str) -> None:
    """After an outage, throttling and expired credentials; a failure that repeats is logged once."""
    failures = {"ServiceUnavailable": 503, "Throttling": 400, "ExpiredToken": 403, "X": 500}
    for code, status in failures.items():
        control(api, "fail", status=status, code=code, count=2 if code == "X" else 1)
    with capture_logs() as lines, hook(imds, api) as lifecycle:
        lifecycle.complete()
        until(lambda: len(actions(api)) == 6, what="the sixth attempt")
        until(lambda: lines and lines[-1]["event"] == "lifecycle_hook", what="the success")
    failed = [line["reason"] for line in lines if line["event"] == "lifecycle_hook_failed"]
    assert len(failed) == len(failures)
    assert all(code in reason for code, reason in zip(failures, failed, strict=True))
    assert set(actions(api)) == {COMPLETE}


def test_a_rejection_is_final(imds: str, api: str) -> None:
    """A call without a pending action, or for another group, is rejected and not retried."""
    with hook(imds, api, group="others") as lifecycle:
        lifecycle.complete()
        until(lambda: actions(api) == [COMPLETE], what="the rejection")
        beat_until(lifecycle, lambda: BEAT in actions(api))
    assert actions(api).count(COMPLETE) == 1


def test_a_service_that_hangs_blocks_no_caller(imds: str, api: str) -> None:
    """They return during the attempt, whose timeout is 20 s."""
    control(api, "fail", status=0, count=1)
    with hook(imds, api, timeout_s=20.0) as lifecycle:
        began_s = time.monotonic()
        lifecycle.complete()
        until(lambda: actions(api) == [COMPLETE], what="the attempt")
        lifecycle.complete()
        lifecycle.heartbeat()
        assert time.monotonic() - began_s < 15


def test_an_attempt_that_hangs_is_repeated(imds: str, api: str) -> None:
    """It ends at its timeout."""
    control(api, "fail", status=0, count=1)
    with hook(imds, api, timeout_s=0.5) as lifecycle:
        lifecycle.complete()
        until(lambda: actions(api)[:2] == [COMPLETE, COMPLETE], what="the second attempt")


def test_ready_before_it_is_needed(imds: str, api: str) -> None:
    """Once started, the hook works without the metadata service, including credentials."""
    with EmulatorProcess("testkit.emulators.aws_imds") as vm, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", vm.url)
        with hook(vm.url, api) as lifecycle:
            until(lambda: lifecycle._client is not None, what="readiness")
            vm.kill()
            lifecycle.complete()
            until(lambda: actions(api) == [COMPLETE], what="completion")


@pytest.mark.fault("N01")
def test_preparation_is_retried(imds: str, api: str) -> None:
    """If the metadata service is down at the start, the hook retries without a further call."""
    control(imds, "fault", path=TOKEN_PATH, kind="status", value=503, count=2)
    with hook(imds, api) as lifecycle:
        until(lambda: lifecycle._client is not None, what="readiness")
    assert actions(api) == []
