# SPDX-License-Identifier: Apache-2.0
"""Finished shards are uploaded while others of their set are still written, with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testkit import TRAINERS
from testkit.clouds import Aws, Bucket, digests_of
from testkit.trainers.slow_save import OPTIMIZER_BYTES, SMALL_BYTES, WEIGHTS_BYTES, content
from testkit.waiting import until

SCRIPT = TRAINERS / "slow_save.py"
CHUNK_BYTES = 5 * 2**20
SETTINGS = {"flush": {"chunk_bytes": CHUNK_BYTES, "connections": 4}}


def early(step: int) -> set[str]:
    """The digests of the chunks of the files that are finished first."""
    weights = content(step, "weights.bin", WEIGHTS_BYTES)
    small = content(step, "small.bin", SMALL_BYTES)
    return {*digests_of(weights, CHUNK_BYTES), *digests_of(small, CHUNK_BYTES)}


def test_finished_files_are_sent_before_the_set_is_sealed(
    aws: Aws, bucket: Bucket, new_vm: Any, tmp_path: Path
) -> None:
    """All bytes of the finished files are in the store while another file still grows.  After the seal the
    whole set is committed, and no byte was sent twice."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, settings=SETTINGS)
    daemon = vm.start_daemon()
    gate = tmp_path / "gate"
    trainer = vm.start_trainer("--gate", str(gate), script=str(SCRIPT))
    daemon.lines.wait(event="committed", step=1)
    bucket.order("clear")
    aws.notice(in_s=60)
    step = int(trainer.lines.wait(event="slow")["step"])
    until(lambda: _stored(bucket) >= early(step), what="the finished shards to be stored")
    (partial,) = vm.run_directory.glob("*.partial")
    assert list(partial.glob("*.writing/optimizer.bin")), "the file was complete too early"
    assert bucket.chunks_sent().keys() == early(step), (
        "smaller files wait for more, or for the seal"
    )
    assert [manifest["step"] for manifest in bucket.manifests()] == [1]

    gate.touch()

    verdict = daemon.lines.wait(event="verdict")
    assert (verdict["verdict"], verdict["step"]) == ("SAFE", step)
    sent = bucket.chunks_sent()
    assert {sent[digest] for digest in early(step)} == {1}
    newest = bucket.manifests()[0]
    assert newest["step"] == step
    assert early(step) < {name[9:73] for name, _ in newest["chunks"]}
    restored = bucket.restored(tmp_path / "restored")
    for name, size_bytes in (
        ("weights.bin", WEIGHTS_BYTES),
        ("small.bin", SMALL_BYTES),
        ("optimizer.bin", OPTIMIZER_BYTES),
    ):
        assert restored[f"rank-00000/{name}"] == content(step, name, size_bytes), name


def _stored(bucket: Bucket) -> set[str]:
    keys = bucket.keys("run/data/")
    return {key.rpartition("/")[2].partition("-")[0] for key in keys}
