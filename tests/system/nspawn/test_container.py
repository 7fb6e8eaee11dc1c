# SPDX-License-Identifier: Apache-2.0
"""packer/container: the image of the daemon, and its pod with a trainer, in podman."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from swansong import EXIT_SAVED

from testkit import REPOSITORY, TRAINERS
from testkit.clouds import Aws, Bucket
from testkit.nspawn import build
from testkit.nspawn.build import Layer
from testkit.podman import TOOLS, Podman
from testkit.wheelhouse import write_wheelhouse

pytestmark = pytest.mark.timeout(300, func_only=True)

DAEMON, TRAINER = "my-run-swansongd", "my-run-trainer"
NOT_IN_THE_BASE = ("boot", "usr/lib/modules", "usr/lib/udev", "usr/share/perl", "var/cache")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
UID = 10001


def build_image(podman: Podman, base: Layer, sources: Path) -> None:
    """Build the image as ``make container`` does, from a base that is not downloaded."""
    (root,) = base.directories
    left_out = [f"--exclude=./{each}" for each in NOT_IN_THE_BASE]
    command = ["tar", "-C", str(root), *left_out, "-c", "."]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as files:
        load = podman.command("import", "--quiet", "--change", f"ENV PATH={PATH}", "-", "base")
        subprocess.run(load, stdin=files.stdout, check=True, capture_output=True, timeout=120)
    for part in ("packer", "systemd"):
        shutil.copytree(REPOSITORY / part, sources / part)
    (sources / "build").mkdir()
    write_wheelhouse(sources / "build" / "wheelhouse", sources / "constraints.txt")
    podman.run(
        *("build", "--quiet", "--layers=false", "--network", "none", "--tag", "swansong"),
        *("--build-arg", "BASE=localhost/base"),
        *("--file", "packer/container/Containerfile", str(sources)),
        timeout_s=600,
    )
    shutil.rmtree(sources)


@pytest.fixture
def podman(tmp_path: Path, debian: Layer, network: None) -> Iterator[Podman]:
    """A machine with the image, and the settings of docs/operations/containers.md."""
    if missing := build.missing(TOOLS):
        pytest.skip(f"needs {', '.join(missing)}")
    python = f"usr/bin/python3.{sys.version_info.minor}"
    if not any((layer / python).exists() for layer in debian.directories):
        pytest.skip("does not apply: the wheels of this Python do not fit the base")
    build.run("ip", "address", "add", "169.254.169.254/32", "dev", "lo", timeout_s=10)
    page = (REPOSITORY / "docs" / "operations" / "containers.md").read_text()
    settings = page.partition("```toml\n")[2].partition("```")[0]
    with Podman(tmp_path / "containers.conf", settings) as machine:
        build_image(machine, debian, tmp_path / "sources")
        yield machine


def pod(bucket: Bucket, staging: Path) -> str:
    """packer/container/pod.yaml with a store and a trainer."""
    text = (REPOSITORY / "packer" / "container" / "pod.yaml").read_text()
    store = "\n    ".join(f'{key} = "{value}"' for key, value in bucket.store.items())
    command = "/opt/swansong/bin/python -u /srv/witness.py --step-delay-s 0.02 --stop-after-save"
    mount = "      volumeMounts:\n"
    head, _, tail = text.rpartition(mount)
    text = f"{head}{mount}        - name: script\n          mountPath: /srv\n{tail}"
    text += f"    - name: script\n      hostPath:\n        path: {TRAINERS}\n"
    for old, new in {
        'url = "s3://my-bucket/checkpoints"': f'{store}\n\n    [sources]\n    cloud = "aws"',
        "localhost/my-trainer:latest": "localhost/swansong:latest",
        "python train.py": command,
        "path: /var/lib/swansong/staging\n        type": f"path: {staging}\n        type",
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def exit_code(podman: Podman, name: str) -> int:
    """The exit code of a container, after it has ended."""
    return int(podman.run("wait", name))


def empty(staging: Path) -> None:
    """Make the directory as docs/operations/containers.md does; its contents are lost."""
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    os.chown(staging, UID, UID)
    staging.chmod(0o2750)


@pytest.mark.fault("H03")
def test_a_stopped_pod_is_safe(podman: Podman, bucket: Bucket, aws: Aws, tmp_path: Path) -> None:
    """A pod that is stopped saves within its grace period, and resumes at that step on another disk.

    There a spot notice does the same.  The trainer's user is not the daemon's.
    """
    staging = tmp_path / "staging"
    empty(staging)
    (tmp_path / "pod.yaml").write_text(pod(bucket, staging))
    podman.run("kube", "play", str(tmp_path / "pod.yaml"))
    podman.follow(TRAINER).wait(step=20)

    podman.run("pod", "stop", "my-run")

    assert (exit_code(podman, DAEMON), exit_code(podman, TRAINER)) == (0, EXIT_SAVED)
    verdict = podman.follow(DAEMON, "stderr").wait(event="verdict")
    assert verdict["verdict"] == "SAFE"
    (manifest,) = bucket.manifests("my-run")
    assert (manifest["kind"], manifest["step"]) == ("emergency", verdict["step"])

    empty(staging)
    podman.run("pod", "start", "my-run")
    podman.follow(TRAINER).wait(event="resumed", from_step=verdict["step"])
    status = json.loads(podman.run("exec", DAEMON, "swansong", "status", "--json"))
    assert status["trainers"]
    aws.notice(in_s=60)
    daemon = podman.follow(DAEMON, "stderr")
    daemon.wait(event="notice", source="aws.spot")
    second = daemon.wait(event="verdict", generation=2)
    assert second["verdict"] == "SAFE"
    assert second["step"] > verdict["step"]
