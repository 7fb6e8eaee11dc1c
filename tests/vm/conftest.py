# SPDX-License-Identifier: Apache-2.0
"""VMs that boot the image, and the cloud around them, in a network namespace of the test."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testkit.nspawn.build import missing, run
from testkit.vm import image as images
from testkit.vm.cloud import Cloud
from testkit.vm.image import Image
from testkit.vm.machine import Machine

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture(scope="session")
def image() -> Image:
    """Debian after provision.sh, with a kernel."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if lacking := missing(images.TOOLS):
        pytest.skip(f"needs {', '.join(lacking)}")
    return images.made()


@pytest.fixture
def network() -> Iterator[None]:
    """A network namespace for the thread and for every process that it starts, with loopback only."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        assert _libc.unshare(CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            run("ip", "link", "set", "lo", "up", timeout_s=10)
            yield
        finally:
            assert _libc.setns(home, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(home)


@pytest.fixture
def clouds(network: None) -> Iterator[Callable[[str], Cloud]]:
    """Make a cloud, ``aws`` or ``gcp``."""
    with ExitStack() as started:
        yield lambda kind: Cloud(started, kind)


@pytest.fixture
def new_vm(image: Image, network: None, tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Make a VM of a cloud, configured and switched off."""
    with ExitStack() as started:

        def make(
            cloud: Cloud, name: str, files: dict[str, str] | None = None, **settings: dict[str, Any]
        ) -> Machine:
            machine = started.enter_context(Machine(image, tmp_path / name, cloud.vendor))
            tables: dict[str, dict[str, Any]] = {
                "run": {"name": "run"},
                "staging": {"path": "/var/lib/swansong/staging"},
                "store": cloud.store,
                "trainer": {"users": ["trainer"]},
                **settings,
            }
            toml = [
                line
                for table, values in tables.items()
                for line in (
                    f"[{table}]",
                    *(f"{key} = {json.dumps(v)}" for key, v in values.items()),
                )
            ]
            configuration = {"/etc/swansong/swansong.toml": "\n".join([*toml, ""])}
            machine.write({**configuration, **(files or {})})
            return machine

        yield make
    if not os.environ.get("SWANSONG_VM_KEEP"):
        shutil.rmtree(tmp_path)
