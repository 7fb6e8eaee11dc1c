# SPDX-License-Identifier: Apache-2.0
"""The access key of the store is rotated while the daemon runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from testkit.rig import CREDENTIALS
from testkit.staged import seal_files
from testkit.strict_bucket import Strict


@pytest.mark.fault("O05")
def test_a_rotated_key_needs_no_restart(strict_bucket: Strict, new_vm: Any, tmp_path: Path) -> None:
    """The store refuses the old key before the file contains the new one: the flush fails, then succeeds."""
    shared = tmp_path / "credentials"

    def write(key: str) -> None:
        text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n"
        shared.with_suffix(".new").write_text(text)
        os.replace(shared.with_suffix(".new"), shared)

    write("first")
    strict_bucket.order("credentials", access_key="first", secret_key="secret")
    vm = new_vm("vm", strict_bucket.table())
    without = dict.fromkeys(CREDENTIALS.keys() - {"AWS_EC2_METADATA_DISABLED"}, "")
    daemon = vm.start_daemon(**without, AWS_SHARED_CREDENTIALS_FILE=str(shared))
    seal_files(vm.run_directory, 1, {"model.bin": b"one"})
    daemon.lines.wait(event="committed", step=1)

    strict_bucket.order("credentials", access_key="second", secret_key="secret")
    seal_files(vm.run_directory, 2, {"model.bin": b"two"})
    refused = daemon.lines.wait(event="flush_failed", step=2)
    assert "InvalidAccessKeyId" in refused["reason"]
    assert "instance role" in refused["reason"]
    write("second")
    assert daemon.lines.wait(event="committed", step=2)["generation"] == 1
    assert len(daemon.lines.all(event="credentials_replaced")) == 1
