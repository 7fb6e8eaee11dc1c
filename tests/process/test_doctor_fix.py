# SPDX-License-Identifier: Apache-2.0
"""``swansong doctor --fix`` against a daemon; with a real systemd in tests/system/nspawn/test_doctor.py."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from testkit.clouds import Aws
from testkit.rig import BIN, CREDENTIALS, Vm, environment
from testkit.waiting import until

ROOT = ("unshare", "--user", "--map-root-user")
NewVm = Callable[..., Vm]


def fix(vm: Vm, *prefix: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, str(BIN / "swansong"), "--config", str(vm.config), "doctor", "--trial", "--fix"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env=environment(**CREDENTIALS),
    )


def test_fixes_wait_for_the_verdict(new_vm: NewVm, aws: Aws, tmp_path: Path) -> None:
    """During an evacuation no fix runs; after it a directory is created, and the check passes."""
    if subprocess.run([*ROOT, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("needs user namespaces")
    store, directory = tmp_path / "store", tmp_path / "metrics"
    store.mkdir()
    vm = new_vm("a", {"url": store.as_uri()}, metadata=aws.metadata)
    textfile = f'\n[metrics]\ntextfile = "{directory}/swansong.prom"\n'
    vm.config.write_text(vm.config.read_text() + textfile)
    vm.start_daemon()
    if os.geteuid() != 0:
        assert "requires root" in fix(vm).stderr
    aws.notice(in_s=60)
    until(lambda: vm.status()["evacuation"], what="the evacuation")
    done = fix(vm, *ROOT)
    assert (done.returncode, done.stdout) == (12, "")
    assert "an evacuation is in progress" in done.stderr
    assert not directory.exists()

    aws.withdraw()
    until(lambda: not vm.status()["evacuation"], what="the end of the evacuation")
    done = fix(vm, *ROOT)
    assert done.stdout.splitlines()[:4] == [
        "FIXES",
        f"  warning  metrics: metrics textfile: {directory} does not exist",
        f"           fix: install -d -m 0755 {directory}",
        "           the fix ran",
    ]
    assert directory.is_dir()
