# SPDX-License-Identifier: Apache-2.0
"""The host shuts down and nobody said so before: SIGTERM to the daemon is the notice."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Bucket

pytestmark = pytest.mark.timeout(60)


@pytest.mark.skipif(
    Path("/run/systemd/system").is_dir(),
    reason="does not apply: systemd tells a stop from a shutdown",
)
@pytest.mark.fault("H03")
def test_sigterm_of_the_host_is_a_notice(bucket: Bucket, new_vm: Any, witness: str) -> None:
    """The trainer is asked, its checkpoint committed, the farewell left; then the daemon leaves."""
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer(script=witness)
    trainer.lines.wait(step=5)

    daemon.kill(signal.SIGTERM)

    assert daemon.wait() == 0
    verdict = daemon.lines.wait(event="verdict")
    assert verdict["verdict"] == "SAFE"
    (manifest,) = bucket.manifests()
    assert (manifest["kind"], manifest["step"]) == ("emergency", verdict["step"])
    (farewell,) = bucket.farewells()
    assert farewell["timeline"][0]["kind"] == "os-shutdown"
    trainer.lines.wait(step=verdict["step"] + 20)


@pytest.mark.fault("H02")
def test_sigint_is_for_people(bucket: Bucket, new_vm: Any, witness: str) -> None:
    """The daemon leaves at once, without a checkpoint; the trainer does not notice."""
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer(script=witness)
    trainer.lines.wait(step=5)

    daemon.kill(signal.SIGINT)

    assert daemon.wait(timeout_s=5) == 0
    assert not daemon.lines.all(event="verdict")
    assert bucket.manifests() == []
    trainer.lines.wait(step=60)
