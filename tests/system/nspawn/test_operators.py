# SPDX-License-Identifier: Apache-2.0
"""GPU health, metrics, notifications and the exporter in the real units, with the drop-ins of the docs."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from testkit import REPOSITORY
from testkit.clouds import Aws, Bucket
from testkit.fake_nvml import LIBRARY, FakeNvml, has_compiler
from testkit.nspawn.container import DAEMON, Container
from testkit.waiting import until

pytestmark = pytest.mark.timeout(300, func_only=True)

EXPORTER = "swansong-exporter.service"
SECRET = "T0SECRET0B0"
NVML = "/usr/local/lib/nvml"
PROGRAM = f"""#!/bin/sh
id -un
sed -n 's/CapEff:\\t/caps /p' /proc/self/status
echo "home $HOME, event $SWANSONG_EVENT, source $SWANSONG_SOURCE"
for place in /etc /usr /var/lib /tmp /run /run/swansong /var/lib/swansong/staging; do
	(: >"$place/.probe") 2>/dev/null && rm "$place/.probe" && echo "writes $place"
done
cat /etc/swansong/secrets/webhook 2>/dev/null
env | grep -c {SECRET} || true
"""
MONITORING = (REPOSITORY / "docs" / "operations" / "monitoring.md").read_text()
LOW_PORT = re.findall(r"```\n(\[Service\]\nAmbientCapabilities=[^`]*)```", MONITORING)
"""The drop-in for a port below 1024."""
REPLACEMENT = (REPOSITORY / "docs" / "operations" / "replacement.md").read_text()
(END_PROGRAM,) = re.findall(
    r"```\n(#!/bin/sh\n# /usr/local/bin/swansong-end\n[^`]*)```", REPLACEMENT
)
NOTICES = (REPOSITORY / "docs" / "operations" / "notices.md").read_text()
OTHER_CLOUD = re.findall(r"```\n(\[Unit\]\nAfter=swansongd[^`]*)```", NOTICES)
"""The unit of a program for another cloud."""
WATCHER = """#!/bin/sh
until [ -e /run/evicted ]; do sleep 0.1; done
echo '{"id": "evict-17", "in_s": 60}'
exec sleep infinity
"""
BIND = "import socket; socket.create_server(('127.0.0.1', 470))"
SCRAPE = """
import socket, sys
where = sys.argv[1]
peer = socket.socket(socket.AF_UNIX) if "/" in where else socket.socket()
peer.connect(where if "/" in where else ("127.0.0.1", int(where)))
peer.sendall(b"GET /metrics HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n")
print(peer.makefile().read())
"""


@contextmanager
def receiver() -> Iterator[tuple[str, list[str]]]:
    """A webhook that the container reaches: its address, and the paths of the requests."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("0.0.0.0", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://10.99.0.1:{server.server_port}/services/{SECRET}", paths
        server.shutdown()


@pytest.fixture
def equipped(new_vm: Any, bucket: Bucket, aws: Aws, tmp_path: Path) -> Iterator[Any]:
    """A running VM with one GPU, a webhook as a credential, a program, and metrics at a port below 1024."""
    if not has_compiler():
        pytest.skip("no C compiler: apt-get install gcc libc6-dev")
    nvml = tmp_path / "nvml"
    nvml.mkdir()
    FakeNvml(nvml)
    # A container has no kernel log: the test writes what the kernel would, while it keeps the pipe open.
    os.mkfifo(tmp_path / "kmsg", 0o644)
    kernel_log = os.open(tmp_path / "kmsg", os.O_RDWR)
    options = (
        "--capability=CAP_SYSLOG",  # which a VM has
        f"--bind={tmp_path}/kmsg:/dev/kmsg",
        f"--bind-ro={nvml}:{NVML}",
    )
    vm: Container = new_vm(bucket, options=options)
    # Of a pipe, unlike of a kernel log, each record has one reader.
    vm.write("/etc/systemd/journald.conf.d/test.conf", "[Journal]\nReadKMsg=no\n")
    with receiver() as (address, paths):
        vm.write("/etc/swansong/secrets/webhook", f"{address}\n", mode=0o600)
        vm.write("/usr/local/bin/order", PROGRAM + END_PROGRAM, mode=0o755)
        config = vm.read("/etc/swansong/swansong.toml") + (
            '[metrics]\nlisten = "127.0.0.1:469"\n[notify]\nallow_http = true\n'
            'webhook_url_file = "credential:notify-webhook"\nexec = ["/usr/local/bin/order"]\n'
        )
        vm.write("/etc/swansong/swansong.toml", config)
        drop_ins = f"/etc/systemd/system/{DAEMON}.d"
        vm.write(f"{drop_ins}/gpu.conf", (REPOSITORY / "systemd" / "gpu" / "gpu.conf").read_text())
        vm.write(f"{drop_ins}/override.conf", *LOW_PORT)
        vm.drop_in(
            DAEMON,
            "[Service]\nLoadCredential=notify-webhook:/etc/swansong/secrets/webhook\n"
            f"Environment=LD_LIBRARY_PATH={NVML} FAKE_NVML={NVML}/control\n",
        )
        assert (nvml / LIBRARY).exists()
        vm.power_on()
        vm.wait_active()
        yield vm, paths, kernel_log
        os.close(kernel_log)


@pytest.mark.fault("X01", "X09")
def test_a_gpu_fails_in_the_real_unit(equipped: Any, aws: Aws) -> None:
    """The kernel log, the webhook's credential, the program and the metrics work in the sandbox.

    The program has none of the daemon's capabilities, and no other user can take a port below 1024.

    ``systemctl restart`` keeps the suspicion, and a stop ends it.  With the files of the page about
    replacement the VM shuts down.
    """
    vm, paths, kernel_log = equipped
    assert vm.journal.all("Unknown", unit=DAEMON) == []
    assert (vm.show(DAEMON, "PrivateDevices"), vm.show(DAEMON, "ProtectKernelLogs")) == ("no", "no")
    assert "syslog" not in vm.show(DAEMON, "SystemCallFilter").split()
    vm.wait_connected()
    until(lambda: vm.status()["gpus"], what="the GPU")
    assert vm.journal.all(event="health", source="gpu")[-1].facts["reason"] == "1 GPU"
    assert 'swansong_gpus{run="run"} 1.0' in vm.run("python3", "-c", SCRAPE, "469")
    other = vm.run(
        "setpriv", "--reuid=trainer", "--clear-groups", "sh", "-c", f'python3 -c "{BIND}" 2>&1 || :'
    )
    assert "PermissionError" in other
    assert "cap_kill" in vm.show(DAEMON, "AmbientCapabilities").split()

    os.write(kernel_log, b"4,7,9,-;NVRM: Xid (PCI:0000:00:00): 79, GPU has fallen off the bus.\n")
    vm.journal.wait(event="gpu_health", health="lost")
    vm.journal.wait(event="verdict")
    done = vm.journal.wait(event="notification_command").facts
    facts = "home /nonexistent, event notice, source gpu"
    places = ["/run/swansong", "/var/lib/swansong/staging"]
    wanted = ["swansong", f"caps {0:016x}", facts, *(f"writes {place}" for place in places), "0"]
    assert done["output"].split("\\n") == wanted
    until(lambda: len(paths) >= 2, what="the webhook's notice and verdict")
    assert set(paths) == {f"/services/{SECRET}"}

    config = vm.run("cat", "/etc/swansong/swansong.toml")
    config = config.replace("127.0.0.1:469", "unix:/run/swansong/metrics.sock")
    vm.run("sh", "-c", f"cat >/etc/swansong/swansong.toml <<'END'\n{config}\nEND")
    vm.run("systemctl", "restart", DAEMON)
    vm.wait_connected()
    shown = vm.run("python3", "-c", SCRAPE, "/run/swansong/metrics.sock")
    assert 'swansong_gpu_health{gpu="0",health="lost",run="run"} 1.0' in shown
    aws.notice(in_s=30)
    spot = vm.journal.wait(event="evacuation", phase="notice", source="aws.spot")
    vm.journal.wait(event="verdict", since=spot.mono_s)
    assert vm.journal.all(event="verdict", verdict="SAFE") == []
    assert vm.journal.all(event="evacuation", phase="request") == []

    vm.run("systemctl", "stop", DAEMON)
    vm.run("systemctl", "start", DAEMON)
    until(lambda: [gpu["health"] for gpu in vm.status()["gpus"]] == ["ok"], what="a healthy GPU")

    for name, text in re.findall(r"```\n# (/etc/systemd/\S+)\n([^`]*)```", REPLACEMENT):
        vm.run("sh", "-c", f"cat >{name} <<'END'\n{text}END")
    vm.run("systemctl", "daemon-reload")
    vm.run("systemctl", "enable", "--now", "swansong-end.path")
    assert vm.wait_off() == 0


def test_the_exporter_runs_in_its_unit(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """It serves the run from the bucket, as a user without any capability who can write nowhere."""
    vm: Container = new_vm(bucket, arguments="--steps 100000 --step-delay-s 0.02 --every-steps 50")
    store = {**bucket.store, "endpoint": "http://10.99.0.1:9000"}
    lines = [f"{key} = {json.dumps(value)}" for key, value in store.items()]
    vm.write("/etc/swansong/stores.toml", "\n".join(["[[store]]", *lines, ""]))
    vm.power_on()
    until(bucket.manifests, timeout_s=60, what="a commit")
    vm.run("systemctl", "start", EXPORTER)
    vm.journal.wait(event="metrics_served", unit=EXPORTER)
    shown = until(
        lambda: (
            found if 'run="run"' in (found := vm.run("python3", "-c", SCRAPE, "9470")) else None
        ),
        what="the run",
    )
    (commits,) = re.findall(
        r'^swansong_run_commits\{.*kind="periodic".*\} (\d+)', shown, re.MULTILINE
    )
    assert int(commits) >= 1
    assert vm.journal.all("Unknown", unit=EXPORTER) == []

    process = f"/proc/{vm.main_pid(EXPORTER)}"
    status = vm.run("cat", f"{process}/status")
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert facts["Uid"].split()[0] != "0"
    assert (int(facts["CapEff"], 16), facts["NoNewPrivs"], facts["Seccomp"]) == (0, "1", "2")
    mounts = [line.split() for line in vm.run("cat", f"{process}/mounts").splitlines()]
    options = {
        each[1]: each[3].split(",") for each in mounts
    }  # of several on one path, the last one counts
    for path in ("/", "/run", "/tmp", "/var/tmp"):
        assert "ro" in options[path], path
    assert "rw" not in options.get("/var/lib/swansong/staging", ())


def test_a_program_for_another_cloud_runs_in_its_unit(
    new_vm: Any, bucket: Bucket, aws: Aws
) -> None:
    """With the unit of the page, the output of a program of another user reaches the daemon: SAFE."""
    vm = new_vm(bucket, cloud="none")
    config = vm.read("/etc/swansong/swansong.toml")
    key = 'command_socket = "/run/swansong/notices.sock"'
    vm.write("/etc/swansong/swansong.toml", config.replace("[sources]", f"[sources]\n{key}"))
    vm.write("/usr/local/bin/watch-notices", WATCHER, mode=0o755)
    vm.write("/etc/systemd/system/notices.service", *OTHER_CLOUD)
    vm.power_on()
    vm.wait_active()
    vm.wait_connected()
    vm.run("systemctl", "start", "notices")
    vm.journal.wait(event="health", source="command", health="ok")
    assert vm.run("stat", "-c", "%U", f"/proc/{vm.main_pid('notices')}") == "notices"
    vm.run("touch", "/run/evicted")
    assert vm.journal.wait(event="verdict").facts["verdict"] == "SAFE"
