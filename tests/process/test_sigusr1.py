# SPDX-License-Identifier: Apache-2.0
"""Trainers without our hooks: SIGUSR1 to the process in the pid file, if the process handles the signal."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket

SCRIPT = "usr1_trainer.py"


def with_signal(vm_disk: Any) -> dict[str, dict[str, Any]]:
    return {"trainer": {"signal": "SIGUSR1", "pid_file": str(vm_disk / "trainer.pid")}}


def test_a_signalled_trainer_saves_slowly_and_its_whole_checkpoint_is_committed(
    aws: Aws, bucket: Bucket, new_vm: Any, tmp_path: Any, weights_after: Any
) -> None:
    """Four files in 1.2 s without a mark of completeness: they are committed once all are complete.

    Neither the save nor a resume from it changes a later step.
    """
    settings = with_signal(tmp_path / "vm")
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, settings=settings)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer(
        *("--checkpoints", str(vm.run_directory), "--pid-file", str(vm.pid_file)),
        *("--steps", "100000", "--step-delay-s", "0.01", "--file-delay-s", "0.3"),
        script=SCRIPT,
    )
    trainer.lines.wait(step=10)

    aws.notice(in_s=60)

    assert daemon.lines.wait(event="evacuation", phase="accepted")["pid"] == trainer.pid
    daemon.lines.wait(event="verdict", verdict="SAFE")
    (manifest,) = bucket.manifests()
    assert [commit["kind"] for commit in vm.commits()] == [manifest["kind"]] == ["emergency"]
    (saved,) = vm.run_directory.glob("checkpoint-*")
    assert saved.name == f"checkpoint-{manifest['step']}"
    assert bucket.content(manifest) == {path.name: path.read_bytes() for path in saved.iterdir()}
    assert len(manifest["shards"]) == 4
    later = trainer.lines.wait(step=manifest["step"] + 3)

    # On a new VM the script's own --resume is sufficient.
    elsewhere = new_vm("elsewhere", bucket.store)
    place = elsewhere.disk / "checkpoint"
    assert elsewhere.swansong("restore", "--to", str(place)).returncode == 0
    resumed = elsewhere.start_trainer("--resume", str(place), "--steps", "200", script=SCRIPT)
    assert resumed.wait() == 0
    assert later in resumed.lines.all()
    assert resumed.lines.all()[-1] == {"weights_sha256": weights_after(200)}


@pytest.mark.fault("S11", "T10")
def test_a_trainer_that_would_die_of_the_signal_does_not_get_it(
    aws: Aws, bucket: Bucket, new_vm: Any, tmp_path: Any
) -> None:
    """Without a handler SIGUSR1 would kill the process: the verdict reports that it was not sent."""
    settings = with_signal(tmp_path / "vm")
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, settings=settings)
    daemon = vm.start_daemon()
    loop = "import itertools, json, time\nfor n in itertools.count():\n"
    loop += "  print(json.dumps({'turn': n}), flush=True)\n  time.sleep(0.01)\n"
    (vm.disk / "deaf.py").write_text(loop)
    deaf = vm.spawn([sys.executable, str(vm.disk / "deaf.py")], lines_on="stdout")
    turn = deaf.lines.wait(turn=3)["turn"]
    vm.pid_file.write_text(f"{deaf.pid}\n")

    aws.notice(in_s=4)

    verdict = daemon.lines.wait(event="verdict")
    assert verdict["verdict"] == "LOST"
    assert "SIGUSR1" in verdict["reason"]
    deaf.lines.wait(turn=turn + 50)
    assert deaf.popen.poll() is None
