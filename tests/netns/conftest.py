# SPDX-License-Identifier: Apache-2.0
"""A new network namespace for each test, in which the metadata service has its real address.

The thread that runs the test moves to the namespace, and every process that it starts inherits it.  The
kernel removes the namespace after the last of these processes.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from testkit import TRAINERS
from testkit.clouds import Aws, Gcp
from testkit.emulators.process import EmulatorProcess
from testkit.rig import Vm
from testkit.warm import python_of

ADDRESS = "169.254.169.254"
CLONE_NEWNET = 0x40000000
WITNESS = str(TRAINERS / "witness.py")
_libc = ctypes.CDLL(None, use_errno=True)


class Network:
    """The path between the VM and its metadata service, without faults to begin with.

    Packets of both directions have the address of the service as their destination.  Requests of the test
    to an emulator use 127.0.0.1 and always arrive.
    """

    def drop(self) -> None:
        """Drop all packets silently."""
        self._treat("drop")

    def lose(self, percent: int) -> None:
        """Drop this percentage of the packets."""
        self._treat(f"numgen random mod 100 < {percent} counter drop")

    def reset(self) -> None:
        """Answer every packet with a TCP reset."""
        self._treat("tcp dport 80 counter reject with tcp reset")

    def heal(self) -> None:
        _run("nft", "flush", "ruleset")

    @contextmanager
    def ipv6_only(self, address: str) -> Iterator[None]:
        """Move the metadata service to this address; 127.0.0.1 stays for the test."""
        _run("ip", "address", "del", f"{ADDRESS}/32", "dev", "lo")
        _run("ip", "-6", "address", "add", f"{address}/128", "dev", "lo", "nodad")
        with closing(socket.create_server((address, 80), family=socket.AF_INET6)) as listener:
            relay = threading.Thread(target=_relay_all, args=(listener,), daemon=True)
            relay.start()
            yield
            listener.shutdown(socket.SHUT_RDWR)
            relay.join(60)

    def dropped_packets(self) -> int:
        """Number of packets that the present rule has matched."""
        (count,) = re.findall(r"counter packets (\d+)", _run("nft", "list", "ruleset"))
        return int(count)

    def _treat(self, rule: str) -> None:
        rule = rule if "counter" in rule else f"counter {rule}"
        chain = f"type filter hook output priority 0; ip daddr {ADDRESS} {rule};"
        _run("nft", "-f", "-", given=f"table ip way {{ chain output {{ {chain} }}; }}")


@pytest.fixture
def network() -> Iterator[Network]:
    """A network namespace; every fixture and test that starts a process here depends on this fixture."""
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.unshare(CLONE_NEWNET) != 0:
            pytest.skip(f"no network namespace: {os.strerror(ctypes.get_errno())}; needs root")
        try:
            _run("ip", "link", "set", "lo", "up")
            _run("ip", "address", "add", f"{ADDRESS}/32", "dev", "lo")
            yield Network()
        finally:
            assert _libc.setns(home, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(home)


class Clouds:
    """The emulators of one test, at the real address and port."""

    def __init__(self, started: ExitStack) -> None:
        self._started = started

    def aws(self) -> Aws:
        return Aws(self._start("testkit.emulators.aws_imds"))

    def gcp(self) -> Gcp:
        return Gcp(self._start("testkit.emulators.gcp_metadata"))

    def _start(self, module: str) -> str:
        # On every address: the test reaches the emulator at 127.0.0.1, whatever happens to the real address.
        self._started.enter_context(EmulatorProcess(module, "--host", "0.0.0.0", "--port", "80"))
        return "http://127.0.0.1"


@pytest.fixture
def clouds(network: Network) -> Iterator[Clouds]:
    with ExitStack() as started:
        yield Clouds(started)


@pytest.fixture
def new_vm(network: Network, tmp_path: Path) -> Iterator[Any]:
    """``new_vm("aws")``: a VM without a configured metadata address, with a directory as its store.

    Its processes are forks of a warm Python; ``is_warm=False`` starts the installed programs, whose libraries
    read the environment when they are imported.
    """
    with ExitStack() as vms:

        def make(cloud: str, store: dict[str, str] | None = None, *, is_warm: bool = True) -> Vm:
            disk = tmp_path / "vm"
            disk.mkdir()
            shelf = tmp_path / "store"
            shelf.mkdir()
            vm = Vm(
                disk,
                store or {"url": f"file://{shelf}"},
                metadata=(cloud, None),
                warm=python_of(os.environ["SWANSONG_TEST_WARM"], "swansongd") if is_warm else None,
            )
            return vms.enter_context(vm)

        yield make


@pytest.fixture
def witness() -> str:
    """Script of the small trainer that prints each message of the daemon."""
    return WITNESS


def _relay_all(listener: socket.socket) -> None:
    """Connect each client to port 80 of 127.0.0.1, until the listener is shut down."""
    with suppress(OSError):
        while True:
            caller, _ = listener.accept()
            threading.Thread(target=_relay, args=(caller,), daemon=True).start()


def _relay(caller: socket.socket) -> None:
    with (
        suppress(OSError),
        caller,
        socket.create_connection(("127.0.0.1", 80)) as service,
    ):
        other = {caller: service, service: caller}
        while True:
            for end in select.select(list(other), [], [])[0]:
                data = end.recv(65536)
                if not data:
                    return
                other[end].sendall(data)


def _run(*command: str, given: str = "") -> str:
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout
