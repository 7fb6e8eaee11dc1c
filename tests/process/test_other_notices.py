# SPDX-License-Identifier: Apache-2.0
"""The other notices of the clouds, and faults of the metadata service, with the daemon as a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.emulators.process import EmulatorProcess
from testkit.rig import control
from testkit.waiting import until

SCALING = ("testkit.emulators.autoscaling", "--group", "trainers", "--hook", "swansong")


@pytest.fixture
def own_imds() -> Iterator[EmulatorProcess]:
    """A metadata service that one test may kill."""
    with EmulatorProcess("testkit.emulators.aws_imds", "--port", "0") as emulator:
        yield emulator


@pytest.mark.fault("N09")
def test_a_notice_that_is_withdrawn_while_no_daemon_runs_is_over(
    aws: Aws, bucket: Bucket, new_vm: Any
) -> None:
    """The restarted daemon has it from the disk, and its source no longer shows it."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    aws.notice()
    daemon.lines.wait(event="evacuation", phase="notice")
    daemon.kill()
    aws.withdraw()
    daemon = vm.start_daemon()
    daemon.lines.wait(event="evacuation", phase="notice")
    daemon.lines.wait(event="notice_withdrawn", source="aws.spot")
    assert vm.status()["notices"] == []


@pytest.mark.fault("N13")
def test_hibernation_promises_no_time_and_a_checkpoint_is_attempted(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """Hibernation may begin immediately: the daemon attempts a checkpoint within the assumed time."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer("--every-steps", "20", script=witness)
    daemon.lines.wait(event="committed")
    aws.notice("hibernate", in_s=120)
    assert daemon.lines.wait(event="notice")["kind"] == "hibernate"
    assert daemon.lines.wait(event="notice")["deadline_quality"] == "assumed"
    verdict = daemon.lines.wait(event="verdict")
    assert verdict["verdict"] == "SAFE"
    # A periodic commit of the step at the notice may be SAFE before the requested one.
    (step,) = until(
        lambda: [each["step"] for each in vm.commits() if each["kind"] == "emergency"],
        what="the requested commit",
    )
    assert step >= verdict["step"]
    trainer.lines.wait(step=step + 20)  # after the hibernation training continues


def test_scale_in_waits_until_the_run_is_safe(
    own_imds: EmulatorProcess, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The lifecycle hook receives heartbeats during the evacuation, and its completion after SAFE."""
    document = control(own_imds.url, "requests")  # the emulator answers
    assert document is not None
    with EmulatorProcess(*SCALING, "--port", "0", "--instance", "i-0123456789abcdef0") as scaling:
        vm = new_vm(
            "vm",
            bucket.store,
            metadata=("aws", own_imds.url),
            settings={"sources": {"asg_name": "trainers", "asg_hook": "swansong"}},
        )
        daemon = vm.start_daemon(AWS_ENDPOINT_URL_AUTO_SCALING=scaling.url)
        vm.start_trainer(script=witness).lines.wait(step=5)
        bucket.order("outage", seconds=2)
        control(own_imds.url, "set", path="autoscaling/target-lifecycle-state", value="Terminated")
        verdict = daemon.lines.wait(event="verdict")
        assert verdict["verdict"] == "SAFE"

        def actions() -> list[str]:
            return [call["Action"] for call in _calls(scaling.url)]

        until(lambda: "CompleteLifecycleAction" in actions(), what="the completion")
        assert actions()[0] == "RecordLifecycleActionHeartbeat"


@pytest.mark.fault("N02", "O05")
def test_metadata_and_credentials_may_die_two_seconds_after_the_notice(
    own_imds: EmulatorProcess, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """Credentials of the instance role were fetched before; the later flush needs only the store."""
    key = {"access_key": "ASIAEMULATED00000000", "secret_key": "emulated-secret"}
    bucket.order("credentials", **key, session_token="emulated-session-token")
    vm = new_vm("vm", bucket.store, metadata=("aws", own_imds.url))
    daemon = vm.start_daemon(
        AWS_ACCESS_KEY_ID="",
        AWS_SECRET_ACCESS_KEY="",
        AWS_EC2_METADATA_DISABLED="false",
        AWS_EC2_METADATA_SERVICE_ENDPOINT=own_imds.url,
        AWS_SHARED_CREDENTIALS_FILE="/nonexistent",
        AWS_CONFIG_FILE="/nonexistent",
    )
    daemon.lines.wait(event="health", source="store", health="ok")
    vm.start_trainer(script=witness).lines.wait(step=5)
    fetched = control(own_imds.url, "requests")
    assert any("security-credentials" in request for request in fetched), fetched
    control(own_imds.url, "notice", action="terminate", in_s=40)
    control(own_imds.url, "dead", after_s=2)
    bucket.order("outage", seconds=4)
    verdict = daemon.lines.wait(event="verdict")
    assert verdict["verdict"] == "SAFE"
    assert 40 - verdict["slack_s"] > 3, "the verdict came before the metadata service died"
    daemon.lines.wait(event="health", source="aws.spot", health="degraded")


def _calls(url: str) -> list[dict[str, str]]:
    import json
    import urllib.request

    with urllib.request.urlopen(f"{url}/_control/calls", timeout=60) as answer:
        found: list[dict[str, str]] = json.loads(answer.read())
    return found
