# SPDX-License-Identifier: Apache-2.0
"""The scripts of docs/operations/replacement.md, with stand-ins for the commands of the clouds."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swansongd.notifications.exec_command import environment
from swansongd.observe.notifications import NotificationKind, Origin, fields, sample

from testkit import REPOSITORY

PAGE = (REPOSITORY / "docs/operations/replacement.md").read_text()
SCRIPTS = dict(
    zip(
        ("aws.spot", "gcp.preempted"),
        re.findall(
            r"^```\n(#!/bin/sh\n# \S+/swansong-replace\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL
        ),
        strict=True,
    )
)
CURL = """#!/bin/sh
for url; do :; done
case "$url" in
*/api/token) echo token ;;
*/instance-id) echo i-0123 ;;
*/region) echo eu-west-1 ;;
*/name) echo trainer-a ;;
*/zone) echo projects/1/zones/europe-west4-a ;;
*) exit 22 ;;
esac
"""
RECORD = '#!/bin/sh\necho "${0##*/} $*" >>"$CALLS"\n'


def calls(folder: Path, script: str, source: str, seconds_left: float) -> list[str]:
    """The calls that the script makes for a notice."""
    for name, text in (
        ("curl", CURL), ("aws", RECORD), ("gcloud", RECORD), ("replace", script)
    ):  # fmt: skip
        path = folder / name
        path.write_text(text)
        path.chmod(0o755)
    made = replace(
        sample(time.time()), kind=NotificationKind.NOTICE, source=source, seconds_left=seconds_left
    )
    variables = environment(fields(Origin(run="r", vm="v", host="h"), made), {})
    recorded = folder / "calls"
    recorded.touch()
    subprocess.run(
        [folder / "replace"],
        env={**variables, "PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(recorded)},
        check=True,
        timeout=30,
    )
    return recorded.read_text().splitlines()


def test_a_spot_instance_is_detached_and_its_place_is_filled(tmp_path: Path) -> None:
    """At once: the next VM waits for the end of this one."""
    (detached,) = calls(tmp_path, SCRIPTS["aws.spot"], "aws.spot", 118.6)
    assert detached == (
        "aws autoscaling detach-instances --region eu-west-1 --auto-scaling-group-name trainers "
        "--instance-ids i-0123 --no-should-decrement-desired-capacity"
    )


def test_a_preempted_vm_leaves_its_group_after_another_one_joined(tmp_path: Path) -> None:
    create, abandon = calls(tmp_path, SCRIPTS["gcp.preempted"], "gcp.preempted", 25.0)
    assert re.fullmatch(
        r"gcloud compute instance-groups managed create-instance trainers --zone europe-west4-a "
        r"--instance trainer-\d+",
        create,
    )
    assert abandon == (
        "gcloud compute instance-groups managed abandon-instances trainers --zone europe-west4-a "
        "--instances trainer-a"
    )


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("source", ["host", "manual", "aws.rebalance", "gcp.maintenance"])
def test_no_other_notice_orders_a_vm(tmp_path: Path, script: str, source: str) -> None:
    """A reboot, or a notice that may not come true, must not cost a second VM."""
    assert calls(tmp_path, script, source, 100.0) == []


@pytest.mark.parametrize(
    ("facts", "ends"),
    [
        ({"kind": NotificationKind.NOTICE, "source": "gpu", "urgency": "imminent"}, True),
        ({"kind": NotificationKind.NOTICE, "source": "gpu", "urgency": "advisory"}, False),
        ({"kind": NotificationKind.NOTICE, "source": "aws.spot", "urgency": "imminent"}, False),
        ({"kind": NotificationKind.VERDICT, "verdict": "LOST"}, True),
        ({"kind": NotificationKind.VERDICT, "verdict": "PARTIAL"}, True),
        ({"kind": NotificationKind.VERDICT, "verdict": "SAFE"}, False),
    ],
)
def test_a_vm_ends_itself_after_a_failed_gpu_and_a_loss(
    tmp_path: Path, facts: dict[str, Any], *, ends: bool
) -> None:
    """After SAFE, and for a notice of the cloud, it lives on."""
    pattern = r"```\n(#!/bin/sh\n# \S+/swansong-end\n[^`]*)```"
    (script,) = re.findall(pattern, PAGE)
    made = replace(sample(time.time()), **{"source": "", "urgency": "", "verdict": "", **facts})
    order = tmp_path / "end"
    program = tmp_path / "program"
    program.write_text(script.replace("/run/swansong/end", str(order)))
    program.chmod(0o755)
    variables = environment(fields(Origin(run="r", vm="v", host="h"), made), {})
    subprocess.run([program], env={**os.environ, **variables}, check=True, timeout=30)
    assert order.exists() == ends
