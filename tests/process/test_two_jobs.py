# SPDX-License-Identifier: Apache-2.0
"""Two daemons on one VM: one link, and one daemon for each run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.staged import seal_files
from testkit.waiting import until

MB = 1_000_000
CONFIG_ERROR = 2


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The runtime directory of all daemons."""
    directory = tmp_path / "shared"
    directory.mkdir()
    return directory


def test_the_bytes_of_a_verdict_go_before_those_of_another_job(
    bucket: Bucket, new_vm: Any, aws: Aws, witness: str, shared: Path
) -> None:
    """A periodic checkpoint does not start while an evacuation sends 60 MB at 8 MB/s, and does not fail.

    The daemon of the evacuation is killed in the middle: the periodic checkpoint is sent.
    """

    def chunks(run: str) -> int:
        return len(bucket.keys(f"{run}/data/"))

    settings = {"flush": {"chunk_bytes": "1MiB"}}
    table = bucket.store
    urgent = new_vm("urgent", table, run="urgent", metadata=aws.metadata, settings=settings)
    routine = new_vm("routine", table, run="routine", settings=settings)
    runtime = {"RUNTIME_DIRECTORY": f"{shared}:{shared}/job"}
    first, second = urgent.start_daemon(**runtime), routine.start_daemon(**runtime)
    urgent.start_trainer("--size-bytes", str(20 * MB), script=witness).lines.wait(step=1)
    bucket.order("pace", total_bytes_per_s=8 * MB)
    aws.notice(in_s=60)
    second.lines.wait(event="uploads_yield")
    seal_files(routine.run_directory, 10, {"weights": os.urandom(4 * MB)})
    second.lines.wait(event="sealed_set_found")
    before = chunks("urgent")
    until(lambda: chunks("urgent") >= before + 10, what="ten chunks", every_s=0.2)
    assert not chunks("routine")

    first.kill()
    second.lines.wait(event="uploads_resume")
    second.lines.wait(event="committed", step=10)
    assert not first.lines.all(event="verdict"), "the daemon was not killed in the middle"
    assert not second.lines.all(event="flush_failed")


@pytest.mark.fault("H10")
def test_a_second_daemon_of_one_run_is_refused(bucket: Bucket, new_vm: Any, shared: Path) -> None:
    """Also with another staging directory, where it would take the run over.  The first one continues."""
    one, other = (new_vm(name, bucket.store) for name in ("one", "other"))
    one.start_daemon(RUNTIME_DIRECTORY=str(shared))
    refused = other.start_daemon(ready=False, RUNTIME_DIRECTORY=str(shared))
    assert refused.wait() == CONFIG_ERROR
    problems = [line.get("problem", "") for line in refused.lines.all(event="cannot_start")]
    assert any(problem.startswith("run.name: another daemon of this VM") for problem in problems)
    assert one.status()["run"] == "run"
