# SPDX-License-Identifier: Apache-2.0
"""Finished shards are uploaded while others of their set are still written, with real processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testkit import TRAINERS
from testkit.clouds import Aws
from testkit.rig import Process, Vm, control
from testkit.strict_bucket import ACCOUNT, Strict
from testkit.trainers.slow_save import OPTIMIZER_BYTES, SMALL_BYTES, WEIGHTS_BYTES, content
from testkit.waiting import until

SCRIPT = TRAINERS / "slow_save.py"
SETTINGS = {"flush": {"chunk_bytes": "5MiB", "connections": 4}}


@dataclass
class Slow:
    """A VM with an older commit, and a trainer that saves slowly."""

    vm: Vm
    daemon: Process
    trainer: Process
    gate: Path

    def begin(self, aws: Aws) -> int:
        """Give a notice; returns the step of the set that is then being written."""
        aws.notice(in_s=60)
        return int(self.trainer.lines.wait(event="slow")["step"])


@pytest.fixture
def slow(aws: Aws, strict_bucket: Strict, new_vm: Any, tmp_path: Path) -> Slow:
    vm = new_vm("vm", strict_bucket.table(), metadata=aws.metadata, settings=SETTINGS)
    daemon = vm.start_daemon(**ACCOUNT)
    gate = tmp_path / "gate"
    trainer = vm.start_trainer("--gate", str(gate), script=str(SCRIPT))
    daemon.lines.wait(event="committed", step=1)
    strict_bucket.order("clear")
    return Slow(vm, daemon, trainer, gate)


def asked(strict_bucket: Strict, method: str, *words: str) -> list[str]:
    """Targets of the requests since the older commit that contain these words."""
    requests = control(strict_bucket.url, "requests")
    return [t for m, t in requests if m == method and all(word in t for word in words)]


def test_finished_files_are_sent_before_the_set_is_sealed(
    slow: Slow, aws: Aws, strict_bucket: Strict, tmp_path: Path
) -> None:
    """All bytes of the finished files are in the store while another file still grows.  After the seal the
    whole set is committed, and no byte was sent twice."""
    step = slow.begin(aws)
    until(
        lambda: (
            len(asked(strict_bucket, "PUT", "weights.bin", "partNumber")) == 2
            and asked(strict_bucket, "POST", "weights.bin", "uploadId")
            and asked(strict_bucket, "PUT", "small.bin")
        ),
        what="the finished shards to be stored",
    )
    (partial,) = slow.vm.run_directory.glob("*.partial")
    assert list(partial.glob("*.writing/optimizer.bin")), "the file was complete too early"
    stored = strict_bucket.objects("run/data/")
    assert not asked(strict_bucket, "PUT", "optimizer.bin")
    assert [manifest["step"] for manifest in strict_bucket.manifests()] == [1]

    slow.gate.touch()

    verdict = slow.daemon.lines.wait(event="verdict")
    assert (verdict["verdict"], verdict["step"]) == ("SAFE", step)
    assert len(asked(strict_bucket, "PUT", "weights.bin", "partNumber")) == 2
    assert len(asked(strict_bucket, "PUT", "small.bin")) == 1
    newest = strict_bucket.manifests()[0]
    assert newest["step"] == step
    early = {key for key, _ in newest["objects"]} & stored.keys()
    names = {key.rpartition("/")[2] for key in early if f"/{step:012d}-" in key}
    assert names == {"weights.bin", "small.bin"}, "smaller files wait for more, or for the seal"
    restored = strict_bucket.restored(tmp_path / "restored")
    for name, size_bytes in (
        ("weights.bin", WEIGHTS_BYTES),
        ("small.bin", SMALL_BYTES),
        ("optimizer.bin", OPTIMIZER_BYTES),
    ):
        assert restored[f"rank-00000/{name}"] == content(step, name, size_bytes), name


@pytest.mark.fault("T02", "T03", "G01", "O19")
def test_a_set_that_is_never_sealed_is_not_committed(
    slow: Slow, aws: Aws, strict_bucket: Strict, new_vm: Any
) -> None:
    """The trainer dies during the save.  The older commit remains, and the next VM resumes from it and aborts
    the unfinished upload."""
    strict_bucket.order("answer", status=503, method="PUT", match="partNumber=2", times=1_000_000)
    step = slow.begin(aws)
    until(
        lambda: (
            asked(strict_bucket, "PUT", "weights.bin", "partNumber=2")
            and asked(strict_bucket, "PUT", "small.bin")
        ),
        what="a stored shard, and another that is half stored",
    )
    slow.trainer.kill()

    verdict = slow.daemon.lines.wait(event="verdict")
    assert (verdict["verdict"], verdict["step"]) == ("PARTIAL", 1)
    assert verdict["slack_s"] > 20, "the daemon waited for a trainer that had ended"
    assert [manifest["step"] for manifest in strict_bucket.manifests()] == [1]
    slow.vm.power_off()
    strict_bucket.order("clear")
    aws.withdraw()
    (left,) = strict_bucket.store.uploads("run/data/")
    assert f"/{step:012d}-" in left.key
    until(
        lambda: all(upload.age_s >= 1 for upload in strict_bucket.store.uploads("run/data/")),
        what="the upload to be old enough",
    )  # the daemon sweeps once after its start

    table = strict_bucket.table() | {"abort_uploads_after_s": "1s"}
    second = new_vm("second", table, metadata=aws.metadata, settings=SETTINGS)
    daemon = second.start_daemon(**ACCOUNT)
    daemon.lines.wait(event="upload_aborted", key=left.key)
    assert list(strict_bucket.store.uploads("")) == []
    trainer = second.start_trainer("--gate", str(slow.gate), script=str(SCRIPT))
    assert trainer.lines.wait(event="resumed")["from_step"] == 1
