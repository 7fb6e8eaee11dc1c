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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from swansong import EXIT_SAVED

from testkit import REPOSITORY, TRAINERS
from testkit.clouds import Aws, Bucket
from testkit.netns.cluster import Cluster, Machine
from testkit.nspawn import build
from testkit.nspawn.build import Layer
from testkit.podman import TOOLS, Podman
from testkit.rig import Lines
from testkit.wheelhouse import write_wheelhouse

pytestmark = [pytest.mark.timeout(300, func_only=True), pytest.mark.runs_first]

DAEMON, TRAINER = "my-run-swansongd", "my-run-trainer"
NOT_IN_THE_BASE = ("boot", "usr/lib/modules", "usr/lib/udev", "usr/share/perl", "var/cache")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
UID = 10001
PYTHON = "/opt/swansong/bin/python -u"


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


@pytest.fixture(scope="session")
def settings() -> str:
    """The settings of docs/operations/containers.md."""
    page = (REPOSITORY / "docs" / "operations" / "containers.md").read_text()
    return page.partition("```toml\n")[2].partition("```")[0]


@pytest.fixture(scope="session")
def archive(
    tmp_path_factory: pytest.TempPathFactory, debian: Layer, settings: str
) -> Iterator[Path]:
    """The image, as a file for all tests: a build takes half a minute."""
    if missing := build.missing(TOOLS):
        pytest.skip(f"needs {', '.join(missing)}")
    python = f"usr/bin/python3.{sys.version_info.minor}"
    if not any((layer / python).exists() for layer in debian.directories):
        pytest.skip("does not apply: the wheels of this Python do not fit the base")
    directory = tmp_path_factory.mktemp("image")
    with Podman(directory / "containers.conf", settings) as machine:
        build_image(machine, debian, directory / "sources")
        file = directory / "swansong.tar"
        machine.run("save", "--quiet", "--output", str(file), "swansong")
    yield file
    file.unlink()


@pytest.fixture
def podman(tmp_path: Path, archive: Path, settings: str, network: None) -> Iterator[Podman]:
    """A machine with the image and the settings."""
    build.run("ip", "address", "add", "169.254.169.254/32", "dev", "lo", timeout_s=10)
    with Podman(tmp_path / "containers.conf", settings) as machine:
        machine.run("load", "--quiet", "--input", str(archive))
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


def job_pod(template: dict[str, Any], name: str, files: Path, script: str, command: str) -> str:
    """A pod as the controller of a Job creates it, with a small trainer.

    Args:
        template: of the pods, in the Job.
        files: a directory with the store of all pods and the firmware's name of the cloud.
        script: the command of the trainer in the template.
        command: the command of the small trainer.
    """
    # podman gives an emptyDir of one name to all pods.
    text = json.dumps(template["spec"]).replace('"state"', f'"state-{name}"')
    spec: dict[str, Any] = json.loads(text)
    (container,) = spec["containers"]
    words = " ".join(container["command"])
    for old, new in {"s3://my-bucket/prefix": "file:///store", script: command}.items():
        assert words.count(old) == 1, old
        words = words.replace(old, new)
    container |= {
        "name": "trainer",
        "image": "localhost/swansong:latest",
        "command": words.split(),
    }
    mounts = {"/store": files / "store", "/srv": TRAINERS, "/sys/class": files / "class"}
    for number, (inside, path) in enumerate(mounts.items()):
        container["volumeMounts"].append({"name": f"test-{number}", "mountPath": inside})
        spec["volumes"].append({"name": f"test-{number}", "hostPath": {"path": str(path)}})
    metadata = {"name": name, **template.get("metadata", {})}
    return yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory with a store and the firmware's name of the cloud, for all pods."""
    (tmp_path / "class" / "dmi" / "id").mkdir(parents=True)
    (tmp_path / "class" / "dmi" / "id" / "sys_vendor").write_text("Amazon EC2\n")
    (tmp_path / "store").mkdir()
    os.chown(tmp_path / "store", UID, UID)
    return tmp_path


def saved_step(podman: Podman, container: str) -> int:
    """The step of the verdict that the pod has ended with."""
    assert exit_code(podman, container) == EXIT_SAVED
    lines = podman.follow(container, "stderr")
    lines.drained()
    return int(re.findall(r"SAFE: generation \d+ step (\d+)", "\n".join(lines.raw))[-1])


@pytest.mark.fault("H03")
def test_pods_of_a_job_continue_each_other(podman: Podman, aws: Aws, files: Path) -> None:
    """A pod that is stopped, or has a notice, ends with 75, and the next pod resumes at that step elsewhere.

    The pod of a finished run ends with 0, so that the Job is complete.
    """
    job = yaml.safe_load((REPOSITORY / "packer" / "container" / "job.yaml").read_text())
    template = job["spec"]["template"]

    def start(name: str, *options: str) -> Lines:
        command = " ".join(
            [PYTHON, "/srv/witness.py --step-delay-s 0.02 --stop-after-save", *options]
        )
        (files / "pod.yaml").write_text(job_pod(template, name, files, "python train.py", command))
        podman.run("kube", "play", str(files / "pod.yaml"))
        return podman.follow(f"{name}-trainer")

    start("job-0").wait(step=20)
    podman.run("pod", "stop", "job-0")
    step = saved_step(podman, "job-0-trainer")

    trainer = start("job-1")
    trainer.wait(event="resumed", from_step=step)
    trainer.wait(step=step + 20)
    aws.notice(in_s=60)
    step = saved_step(podman, "job-1-trainer")

    aws.withdraw()
    start("job-2", "--steps", str(step + 20), "--finish").wait(event="resumed", from_step=step)
    assert exit_code(podman, "job-2-trainer") == 0


@pytest.mark.timeout(600, func_only=True)
@pytest.mark.fault("H03", "OE05")
def test_a_stopped_pod_of_a_jobset_ends_the_others(podman: Podman, files: Path) -> None:
    """SIGTERM to one of two pods, each on its own node, ends both with 75 at one step, where both resume."""
    torch = pytest.importorskip("torch")
    jobset = yaml.safe_load((REPOSITORY / "packer" / "container" / "jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    template = job["template"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    del container["ports"]  # podman refuses them with hostNetwork
    settings = {each["name"]: each for each in container["env"]}
    settings["PET_NPROC_PER_NODE"]["value"] = "1"
    container["env"] += [
        {"name": "PYTHONPATH", "value": "/torch"},
        {"name": "GLOO_SOCKET_IFNAME", "value": "eth0"},
    ]
    container["volumeMounts"].append({"name": "torch", "mountPath": "/torch"})
    packages = Path(torch.__file__).parents[1]
    template["spec"]["volumes"].append({"name": "torch", "hostPath": {"path": str(packages)}})
    command = f"{PYTHON} -m torch.distributed.run /srv/gloo_trainer.py --stop-after-save"

    with ExitStack() as started:
        cluster = Cluster(files, started)
        nodes = [Machine(number, files, cluster.store, started) for number in (0, 1)]
        settings["PET_MASTER_ADDR"]["value"] = nodes[0].address

        def start(name: str) -> list[Lines]:
            """Start both pods of the JobSet."""
            for index, node in enumerate(nodes):
                annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
                template["metadata"] = {"annotations": annotations}
                pod = job_pod(template, f"{name}-{index}", files, "torchrun train.py", command)
                (files / "pod.yaml").write_text(pod)
                with node.namespace.inside():
                    podman.run("kube", "play", str(files / "pod.yaml"))
            return [podman.follow(f"{name}-{index}-trainer") for index in (0, 1)]

        start("first")[1].wait(180, step=5)
        podman.run("pod", "stop", "first-1")
        step = saved_step(podman, "first-1-trainer")
        assert saved_step(podman, "first-0-trainer") == step

        for trainer in start("next"):
            assert trainer.wait(180, event="resumed", from_step=step)["world"] == 2
            trainer.wait(step=step + 1)
