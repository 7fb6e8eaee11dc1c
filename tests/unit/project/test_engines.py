# SPDX-License-Identifier: Apache-2.0
"""The jobs of Kubernetes, Slurm, SkyPilot and dstack agree with ``swansong run``, which they start."""

from __future__ import annotations

import re
from importlib import import_module

import kubernetes_validate
import pytest
import yaml
from swansong import EXIT_SAVED
from swansong_bucket.config.values import duration
from swansong_bucket.errors import ConfigError, FencedError, Unreachable
from swansong_bucket.model import Verdict
from swansong_tools.commands import run_supervisor
from swansong_tools.commands.notify import EXIT_BY_VERDICT
from swansongd.config.config import DeadlineConfig

from testkit import REPOSITORY

CONTAINERS = REPOSITORY / "packer" / "container"
MANIFEST = yaml.safe_load((CONTAINERS / "job.yaml").read_text())
JOB = MANIFEST["spec"]
JOBSET = yaml.safe_load((CONTAINERS / "jobset.yaml").read_text())
(NODES,) = JOBSET["spec"]["replicatedJobs"]
"""The job of the JobSet, with a pod for each node."""
VERDICTS = {**EXIT_BY_VERDICT, Verdict.SAFE: EXIT_SAVED}.values()
"""Exit codes of ``swansong run`` after a notice."""


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_the_schema_of_kubernetes_accepts_the_job(version: str) -> None:
    """A field that the schema does not know is refused, too."""
    kubernetes_validate.validate(MANIFEST, version, strict=True)


def test_the_schemas_of_jobset_and_trainer_accept_the_jobset() -> None:
    """Also as the runtime of the page; a field that a schema does not know is refused, too."""
    # 400 models, whose import takes a fourth of the collection of all unit tests: not in each worker.
    models = import_module("kubeflow_trainer_api.models")
    page = (REPOSITORY / "docs" / "trainers" / "kubernetes.md").read_text()
    runtime, train_job = yaml.safe_load_all(page.split("```yaml")[1].split("```")[0])
    assert runtime["spec"]["template"] == {"spec": "..."}
    runtime["spec"]["template"]["spec"] = JOBSET["spec"]
    for schema, resource in (
        (models.JobsetV1alpha2JobSet, JOBSET),
        (models.TrainerV1alpha1TrainingRuntime, runtime),
        (models.TrainerV1alpha1TrainJob, train_job),
    ):
        known = schema.from_dict(resource)
        assert known is not None
        assert known.to_dict() == resource


def test_the_job_of_the_jobset_is_the_job_on_several_nodes() -> None:
    """It has the rules, the pod and the command of the Job, and torchrun finds the first pod."""
    job = NODES["template"]["spec"]
    kubernetes_validate.validate({**MANIFEST, "spec": job}, "1.29", strict=True)
    assert job["podFailurePolicy"] == JOB["podFailurePolicy"]
    pod, alone = job["template"]["spec"], JOB["template"]["spec"]
    (container,), (other,) = pod["containers"], alone["containers"]
    assert pod == {**alone, "dnsPolicy": "ClusterFirstWithHostNet", "containers": [container]}
    assert container["command"] == [*other["command"][:-2], "torchrun", other["command"][-1]]
    changed = ("name", "command", "env", "ports")
    assert container == {**other, **{key: container[key] for key in changed}}

    assert container["env"][: len(other["env"])] == other["env"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert int(values["PET_NNODES"]) == job["completions"] == job["parallelism"]
    name = JOBSET["metadata"]["name"]
    assert values["PET_MASTER_ADDR"] == f"{name}-{NODES['name']}-0-0.{name}"
    assert int(values["PET_MASTER_PORT"]) == container["ports"][0]["containerPort"]


@pytest.mark.parametrize(
    ("code", "action"),
    [
        *((code, "Ignore") for code in VERDICTS),
        (ConfigError.exit_code, "FailJob"),
        (FencedError.exit_code, "FailJob"),
        (Unreachable.exit_code, None),
        (1, None),
    ],
)
@pytest.mark.fault("OE09")
def test_the_action_of_each_exit_code(code: int, action: str | None) -> None:
    """A verdict costs no retry, an error that each pod would repeat ends the Job, and others are counted."""
    for rule in JOB["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            assert rule["onExitCodes"]["operator"] == "In"
            if code in rule["onExitCodes"]["values"]:
                assert rule["action"] == action
                return
    assert action is None


@pytest.mark.parametrize(
    ("page", "rule"),
    [
        ("slurm.md", r"case \$code in ([\d |]+)\) scontrol requeue"),
        ("slurm.md", r"`RequeueExit=([\d,]+)`"),
        ("skypilot.md", r"recover_on_exit_codes: \[([\d, ]+)\]"),
    ],
)
@pytest.mark.fault("OE09")
def test_a_job_starts_again_after_each_verdict(page: str, rule: str) -> None:
    """Also if no training was seen: the job was told of the notice before its first step."""
    (codes,) = re.findall(rule, (REPOSITORY / "docs" / "trainers" / page).read_text())
    assert {int(code) for code in re.findall(r"\d+", codes)} == set(VERDICTS)


@pytest.mark.fault("OE09")
def test_dstack_retries_after_a_verdict_and_its_signal_reaches_the_command() -> None:
    """To dstack an exit code is an ``error`` and a vanished VM an ``interruption``.  The shell must not stay
    between its signal and ``swansong run``, which has less time than the 10 s until SIGKILL."""
    page = (REPOSITORY / "docs" / "trainers" / "dstack.md").read_text()
    task = yaml.safe_load(page.split("```yaml")[1].split("```")[0])
    assert {"error", "interruption"} <= set(task["retry"]["on_events"])
    start, end = task["commands"][-1].split(" --grace ")
    assert start.startswith("exec swansong run ")
    assert duration(end.split()[0]) < 10


def test_the_grace_period_outlasts_the_end_of_the_command() -> None:
    """SIGKILL comes after the verdict and the ends of trainer and daemon, whatever they take."""
    after_verdict_s = 2 * run_supervisor._STOP_LIMIT_S
    grace_s = JOB["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= DeadlineConfig().sigterm_grace_s + after_verdict_s
