# SPDX-License-Identifier: Apache-2.0
"""Containers that boot the contents of an image, and the cloud around them.

The thread that runs a test moves to a new network namespace.  The emulators listen there, and the network
link of the container ends there: the metadata service has its real address.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket, Gcp
from testkit.emulators.process import EmulatorProcess
from testkit.nspawn import build
from testkit.nspawn.build import Layer
from testkit.nspawn.container import Container, Entry

RELEASE = os.environ.get("SWANSONG_TEST_RELEASE", build.STANDARD)
"""Release of Debian: bullseye has systemd 247, bookworm 252, trixie 257."""
CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def debian() -> Layer:
    """A plain Debian."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if missing := build.missing(build.TOOLS):
        pytest.skip(f"needs {', '.join(missing)}")
    return build.debian(RELEASE)


@pytest.fixture(scope="session")
def image(debian: Layer) -> Layer:
    """Debian after provision.sh, with a trainer."""
    if RELEASE == "bullseye":
        pytest.skip("does not apply: its Python is too old for the daemon")
    return build.provisioned(debian)


@pytest.fixture
def network() -> Iterator[None]:
    """A network namespace for the thread, and for every process that it starts."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        assert _libc.unshare(CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            build.run("ip", "link", "set", "lo", "up", timeout_s=10)
            yield
        finally:
            assert _libc.setns(home, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(home)


@pytest.fixture
def aws(network: None) -> Iterator[Aws]:
    """EC2's metadata service, at its real address as seen from the container."""
    with EmulatorProcess("testkit.emulators.aws_imds", "--host", "0.0.0.0", "--port", "80"):
        yield Aws("http://127.0.0.1")


@pytest.fixture
def gcp(network: None) -> Iterator[Gcp]:
    """Compute Engine's metadata server, at its real address as seen from the container."""
    with EmulatorProcess("testkit.emulators.gcp_metadata", "--host", "0.0.0.0", "--port", "80"):
        yield Gcp("http://127.0.0.1")


@pytest.fixture
def bucket(network: None) -> Iterator[Bucket]:
    """An empty prefix of a bucket outside of the container."""
    arguments = ("--host", "0.0.0.0", "--port", "9000", "--bucket", "ckpt")
    with EmulatorProcess("testkit.emulators.s3_server", *arguments):
        yield Bucket("http://127.0.0.1:9000", secrets.token_hex(4))


@pytest.fixture
def new_vm(image: Layer, network: None, tmp_path: Path) -> Iterator[Any]:
    """``new_vm(bucket)``: a container that is configured and off.  It is killed after the test.

    ``store`` replaces the bucket.
    """
    made: list[Container] = []
    with ExitStack() as containers:

        def make(
            bucket: Bucket | None = None,
            *,
            store: dict[str, str] | None = None,
            cloud: str = "aws",
            arguments: str = "--steps 100000 --step-delay-s 0.02",
            staging: str = "/var/lib/swansong/staging",
            options: tuple[str, ...] = (),
        ) -> Container:
            name = f"sw{os.getpid()}-{next(_numbers)}"
            vm = containers.enter_context(Container(name, image, tmp_path / name, options))
            made.append(vm)
            if bucket is not None:
                store = {**bucket.store, "endpoint": "http://10.99.0.1:9000"}
            assert store is not None
            tables = {
                "run": {"name": "run"},
                "staging": {"path": staging},
                "store": store,
                "sources": {"cloud": cloud},
                "trainer": {"users": ["trainer"]},
            }
            lines = [
                line
                for section, table in tables.items()
                for line in (f"[{section}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items()))
            ]
            vm.write("/etc/swansong/swansong.toml", "\n".join([*lines, ""]))
            vm.write("/etc/trainer.env", f"ARGUMENTS={arguments}\n")
            return vm

        yield make
        for vm in made:
            print(vm.journal.story())  # pytest shows it if the test has failed


class Phases:
    """Times of events in a scenario, from the container's own journal."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record
        self._begun_mono_s: float | None = None

    def begin(self, entry: Entry) -> None:
        """Set the time origin; by default the first added entry is the origin."""
        self._begun_mono_s = entry.mono_s

    def add(self, phase: str, entry: Entry) -> None:
        if self._begun_mono_s is None:
            self._begun_mono_s = entry.mono_s
        self._record("phase", (phase, entry.mono_s - self._begun_mono_s))


@pytest.fixture
def phases(record_property: Callable[[str, object], None]) -> Phases:
    return Phases(record_property)


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table of the scenarios: times of events, from the containers' own journals."""
    rows = [
        (str(report.nodeid).rpartition("::")[2], *row)
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
        for key, row in report.user_properties
        if key == "phase"
    ]
    if rows:
        terminalreporter.section("phases, in seconds since the first phase of each scenario")
    for scenario, phase, seconds in rows:
        terminalreporter.write_line(f"{scenario:44} {phase:44} {seconds:8.2f}")
