# SPDX-License-Identifier: Apache-2.0
"""packer/container in podman: the image of the daemon, its pod with a trainer, and the pods of the Job."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from swansong import EXIT_SAVED

from testkit import REPOSITORY, TRAINERS
from testkit.clouds import Aws, Bucket
from testkit.nspawn import build
from testkit.nspawn.build import Layer
from testkit.podman import TOOLS, Podman
from testkit.rig import Lines
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


def job_pod(job: dict[str, Any], number: int, files: Path, *options: str) -> str:
    """A pod as the controller of the Job creates it, with a small trainer and its options.

    Args:
        files: a directory with the store of all pods and the firmware's name of the cloud.
    """
    # podman gives an emptyDir of one name to all pods.
    text = json.dumps(job["spec"]["template"]["spec"]).replace('"state"', f'"state-{number}"')
    spec: dict[str, Any] = json.loads(text)
    (container,) = spec["containers"]
    command = " ".join(container["command"])
    witness = "/opt/swansong/bin/python -u /srv/witness.py --step-delay-s 0.02 --stop-after-save"
    for old, new in {"s3://my-bucket/prefix": "file:///store", "python train.py": witness}.items():
        assert command.count(old) == 1, old
        command = command.replace(old, new)
    container |= {"image": "localhost/swansong:latest", "command": [*command.split(), *options]}
    mounts = {"/store": files / "store", "/srv": TRAINERS, "/sys/class": files / "class"}
    for name, (inside, path) in enumerate(mounts.items()):
        container["volumeMounts"].append({"name": f"test-{name}", "mountPath": inside})
        spec["volumes"].append({"name": f"test-{name}", "hostPath": {"path": str(path)}})
    return yaml.safe_dump(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"job-{number}"}, "spec": spec}
    )


@pytest.mark.fault("H03")
def test_pods_of_a_job_continue_each_other(podman: Podman, aws: Aws, tmp_path: Path) -> None:
    """A pod that is stopped, or has a notice, ends with 75, and the next pod resumes at that step elsewhere.

    The pod of a finished run ends with 0, so that the Job is complete.
    """
    job = yaml.safe_load((REPOSITORY / "packer" / "container" / "job.yaml").read_text())
    (tmp_path / "class" / "dmi" / "id").mkdir(parents=True)
    (tmp_path / "class" / "dmi" / "id" / "sys_vendor").write_text("Amazon EC2\n")
    (tmp_path / "store").mkdir()
    os.chown(tmp_path / "store", UID, UID)

    def start(number: int, *options: str) -> Lines:
        (tmp_path / "pod.yaml").write_text(job_pod(job, number, tmp_path, *options))
        podman.run("kube", "play", str(tmp_path / "pod.yaml"))
        return podman.follow(f"job-{number}-trainer")

    def saved_step(number: int) -> int:
        """The step of the verdict that the pod has ended with."""
        name = f"job-{number}-trainer"
        assert exit_code(podman, name) == EXIT_SAVED
        lines = podman.follow(name, "stderr")
        lines.drained()
        return int(re.findall(r"SAFE: generation \d+ step (\d+)", "\n".join(lines.raw))[-1])

    start(0).wait(step=20)
    podman.run("pod", "stop", "job-0")
    step = saved_step(0)

    trainer = start(1)
    trainer.wait(event="resumed", from_step=step)
    trainer.wait(step=step + 20)
    aws.notice(in_s=60)
    step = saved_step(1)

    aws.withdraw()
    start(2, "--steps", str(step + 20), "--finish").wait(event="resumed", from_step=step)
    assert exit_code(podman, "job-2-trainer") == 0
