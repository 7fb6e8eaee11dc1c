# SPDX-License-Identifier: Apache-2.0
"""Compute Engine takes a Spot VM back: one value, perhaps the last response of the metadata server."""

from __future__ import annotations

import secrets
from collections import Counter
from typing import Any
from urllib.parse import urlencode

import pytest

from testkit.clouds import Gcp
from testkit.emulators.process import EmulatorProcess
from testkit.rig import control
from testkit.waiting import until


@pytest.fixture
def narrow(gcs: EmulatorProcess, store: dict[str, str]) -> None:
    """The role of packer/permissions, which may not delete, and so may not overwrite."""
    control(gcs.url, "role?delete=0&first=rights")


@pytest.fixture
def store(gcs: EmulatorProcess) -> dict[str, str]:
    """An empty prefix in a Cloud Storage bucket without faults."""
    control(gcs.url, "clear")
    return {"url": f"gs://ckpt/{secrets.token_hex(4)}", "endpoint": gcs.url}


def test_preempted_becomes_a_commit_and_the_next_vm_ends_with_the_same_weights(
    gcp: Gcp, store: dict[str, str], new_vm: Any, weights_after: Any
) -> None:
    """``preempted`` turns TRUE; the set that was sealed after it is in Cloud Storage, and loads elsewhere."""
    command_line = ("--steps", "200")
    first = new_vm("first", store, metadata=gcp.metadata)
    daemon = first.start_daemon()
    trainer = first.start_trainer(*command_line, "--step-delay-s", "0.01")
    trainer.lines.wait(step=20)

    gcp.preempt()

    notice = daemon.lines.wait(event="notice", source="gcp.preempted")
    assert notice["deadline_quality"] == "assumed"  # the value contains no time
    verdict = daemon.lines.wait(event="verdict")
    assert verdict["verdict"] == "SAFE"
    assert verdict["slack_s"] > 0
    (commit,) = first.commits()
    assert (commit["kind"], commit["step"]) == ("emergency", verdict["step"])
    first.power_off()

    second = new_vm("second", store)
    second.start_daemon()
    trainer = second.start_trainer(*command_line)
    assert trainer.wait() == 0
    assert trainer.lines.all()[0]["step"] == verdict["step"] + 1
    assert trainer.lines.all()[-1] == {"weights_sha256": weights_after(200)}


@pytest.mark.fault("O08", "O09", "O11")
@pytest.mark.usefixtures("narrow")
def test_lost_replies_under_a_role_that_may_not_overwrite(
    gcp: Gcp, gcs: EmulatorProcess, store: dict[str, str], new_vm: Any, witness: str
) -> None:
    """The replies to the claim, a chunk and the manifest are lost.  A read resolves each, and the next VM,
    under the same role, resumes from the commit."""
    claim, manifest, chunk = (("PUT", f"/{name}/") for name in ("generations", "commits", "data"))

    def lose(method: str, match: str) -> None:
        query = urlencode({"status": 503, "method": method, "match": match, "carry_out": 1})
        control(gcs.url, f"answer?{query}")

    def asked(method: str, match: str) -> int:
        requests = control(gcs.url, "requests")
        return len([target for how, target in requests if how == method and match in target])

    lose(*claim)
    vm = new_vm("vm", store, metadata=gcp.metadata, settings={"flush": {"chunk_bytes": "5MiB"}})
    daemon = vm.start_daemon()
    vm.start_trainer("--size-bytes", "5500000", script=witness).lines.wait(step=5)
    until(lambda: asked(*claim) == 3, what="the claim, its retry, and the read that resolves it")
    for lost in (manifest, chunk):
        lose(*lost)
    gcp.preempt()
    verdict = daemon.lines.wait(event="verdict")
    assert verdict["verdict"] == "SAFE"
    assert asked(*manifest) == 2
    chunks = Counter(target for how, target in control(gcs.url, "requests") if "/data/" in target)
    assert max(chunks.values()) >= 2, "no chunk was asked for again"
    vm.power_off()

    second = new_vm("second", store)
    second.start_daemon()
    resumed = second.start_trainer(script=witness).lines.wait(event="resumed")
    assert resumed["from_step"] == verdict["step"]
