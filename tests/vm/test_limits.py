# SPDX-License-Identifier: Apache-2.0
"""A real kernel enforces the limits that an operator sets on the daemon's unit, and the daemon obeys them."""

from __future__ import annotations

import pytest

from tests.vm.test_power import TEST_MAX_S, Clouds, NewVm, push_button_and_stop_hard, train

# The VM's own address, the first that its network assigns.
KNOCK = "import socket; socket.create_connection(('169.254.10.15', 8099), 3); print('it answers')"
LISTENER = f"""[Service]
ExecStart=/usr/bin/python3 -m http.server 8099
ExecStartPost=/usr/bin/python3 -c "import time; time.sleep(3)"
ExecStartPost=/usr/bin/python3 -c "{KNOCK}"
"""
LIMITS = f"""[Unit]
Requires=listener.service
After=listener.service
[Service]
MemoryMax=300M
MemorySwapMax=0
OOMPolicy=continue
IPAddressDeny=any
IPAddressAllow=169.254.169.254
ExecStartPre=-/usr/bin/python3 -c "len(b'x' * (400 << 20)); print('took 400 MiB')"
ExecStartPre=-/usr/bin/python3 -c "{KNOCK}"
"""


@pytest.mark.timeout(TEST_MAX_S, func_only=True)
@pytest.mark.fault("H06")
def test_limits_of_the_unit_are_enforced(clouds: Clouds, new_vm: NewVm) -> None:
    """In the unit, memory above the limit kills a process, and a connection to a denied address times out.
    Outside of the unit the address responds.  Within these limits an evacuation is SAFE."""
    cloud = clouds("gcp")
    machine = new_vm(
        cloud,
        "limited",
        {
            "/etc/systemd/system/listener.service": LISTENER,
            "/etc/systemd/system/swansongd.service.d/limits.conf": LIMITS,
        },
    )
    train(machine, cloud)
    push_button_and_stop_hard(machine)
    (story,) = machine.journal()
    reached = [entry for entry in story.entries if "it answers" in entry.text]
    assert [entry.unit for entry in reached] == ["listener.service"]
    assert story.contains("TimeoutError")
    assert not story.contains("took 400 MiB")
    assert story.contains("Memory cgroup out of memory: Killed process")
    assert story.verdicts[-1] == ("SAFE", cloud.committed_steps()[-1])
