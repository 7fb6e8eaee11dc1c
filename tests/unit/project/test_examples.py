# SPDX-License-Identifier: Apache-2.0
"""Files that operators copy: first-boot scripts are executed, Terraform examples are parsed."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import hcl2
import pytest
import yaml
from swansongd.config.config import load

from testkit import REPOSITORY

PACKER = REPOSITORY / "packer"
FIRST_BOOT = PACKER / "first-boot"
EXAMPLE = resources.files("swansongd").joinpath("swansong.example.toml").read_text()
DROP_IN = (REPOSITORY / "systemd" / "trainer.service.d" / "swansong.conf").read_text()
WORDS = {
    "run": "llama-7b.run3",
    "store": "s3://bucket/a/prefix",
    "group": "swansong-llama",
    "notice": "120",
}


class Vm:
    """A root directory, and a systemctl that records its calls."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.config = root / "etc/swansong/swansong.toml"
        self.drop_in = root / "etc/systemd/system/trainer.service.d/swansong.conf"
        self._calls = root / "calls"
        for path, text in {
            self.config: EXAMPLE,
            root / "usr/share/swansong/trainer.service.d/swansong.conf": DROP_IN,
            root / "bin/systemctl": f'#!/bin/sh\necho "$@" >>{self._calls}\n',
        }.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (root / "bin/systemctl").chmod(0o755)

    def here(self, text: str) -> str:
        """Rewrite all absolute paths in the text to paths below the root directory."""
        return re.sub(r"(?<![\w}])/(etc|usr/share)/", rf"{self._root}/\1/", text)

    def run(self, *command: str) -> None:
        path = f"{self._root}/bin:{os.environ['PATH']}"
        subprocess.run(command, check=True, timeout=20, env={"PATH": path})

    def calls(self) -> list[str]:
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return lines


@pytest.fixture
def vm(tmp_path: Path) -> Vm:
    return Vm(tmp_path)


def first_boot(name: str) -> str:
    return Template((FIRST_BOOT / name).read_text()).safe_substitute(WORDS)


def test_aws_user_data_names_run_bucket_and_group(vm: Vm) -> None:
    """The commands run twice, as under cloud-init; configuration and drop-in are then complete."""
    text = first_boot("aws-user-data.yaml")
    assert text.startswith("#cloud-config\n")
    body = yaml.safe_load(text)
    assert set(body) == {"bootcmd", "runcmd"}
    for _ in range(2):
        for command in body["bootcmd"]:
            vm.run(*map(vm.here, command))
    config = load(vm.config)
    assert (config.run.name, config.store.url) == (WORDS["run"], WORDS["store"])
    assert (config.sources.asg_name, config.sources.asg_hook) == (WORDS["group"], "swansong")
    assert config.sources.asg_grace_s == 300
    assert vm.drop_in.read_text() == DROP_IN
    for command in body["runcmd"]:
        vm.run(*command)
    assert vm.calls() == ["daemon-reload", "enable --now --no-block trainer.service"]


def test_gcp_startup_script_names_run_and_bucket(vm: Vm) -> None:
    """The first boot writes the names alone and restarts the daemon; later boots change nothing."""
    script = vm.here(first_boot("gcp-startup.sh"))
    vm.run("bash", "-c", script)
    config = load(vm.config)
    assert (config.run.name, config.store.url) == (WORDS["run"], WORDS["store"])
    assert config.sources.gcp_preemption_notice_s == 120
    assert vm.drop_in.read_text() == DROP_IN
    start = ["daemon-reload", "start --no-block trainer.service"]
    assert vm.calls() == ["restart swansongd.service", *start]
    before = vm.config.read_text()
    lines = zip(EXAMPLE.splitlines(), before.splitlines(), strict=True)
    assert [new for old, new in lines if old != new] == [
        f'name = "{WORDS["run"]}"',
        f'url = "{WORDS["store"]}"',
        "gcp_preemption_notice_s = 120",
    ]
    vm.run("bash", "-c", script)
    assert vm.calls() == start
    assert vm.config.read_text() == before


def test_startup_script_is_executable() -> None:
    """The script has a shebang and the mode of a program; make check runs shellcheck on it."""
    script = FIRST_BOOT / "gcp-startup.sh"
    assert script.read_text().startswith("#!/bin/bash\n")
    assert script.stat().st_mode & stat.S_IXUSR


# ---------------------------------------------------------------- Terraform

SCRAPE = yaml.safe_load((REPOSITORY / "monitoring/prometheus/scrape.example.yml").read_text())
MONITORING_PAGE = (REPOSITORY / "docs/operations/monitoring.md").read_text()
SECTIONS = {"": "resource", "data.": "data"}
META_ARGUMENTS = {"for_each", "depends_on", "lifecycle"}
ARGUMENTS = yaml.safe_load((Path(__file__).parent / "terraform-arguments.yaml").read_text())


def terraform_text(cloud: str) -> str:
    return (PACKER / "examples" / cloud / "main.tf").read_text()


@cache
def terraform(cloud: str) -> dict[str, Any]:
    body: dict[str, Any] = hcl2.loads(terraform_text(cloud))
    return body


def names(blocks: list[dict[str, Any]]) -> set[str]:
    return {name.strip('"') for block in blocks for name in block if not name.startswith("__")}


def declared(body: dict[str, Any], section: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Kind, name and body of each block of a section."""
    for block in body.get(section, []):
        for kind, instances in block.items():
            for name, facts in instances.items() if isinstance(instances, dict) else ():
                if not name.startswith("__"):
                    yield kind.strip('"'), name.strip('"'), facts


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_terraform_example_is_consistent(cloud: str) -> None:
    """Variables and locals are declared and used; references and files exist."""
    text, body = terraform_text(cloud), terraform(cloud)
    variables = names(body["variable"])
    assert set(re.findall(r"\bvar\.(\w+)", text)) == variables
    assert set(re.findall(r"\blocal\.(\w+)", text)) == names(body["locals"])
    for block in body["variable"]:
        for facts in block.values():
            assert not isinstance(facts, dict) or facts["description"]
    made = {
        f"{prefix}{kind}.{name}"
        for prefix, section in SECTIONS.items()
        for kind, name, _ in declared(body, section)
    }
    provider = {"aws": "aws", "gcp": "google"}[cloud]
    pattern = rf"(?<![\w\"])((?:data\.)?{provider}_\w+\.\w+)[.\[]"
    assert set(re.findall(pattern, text)) <= made
    files = re.findall(r'"\$\{path\.module\}/([^"]+)"', text)
    assert len(files) == 2
    assert all((PACKER / "examples" / cloud / file).is_file() for file in files)


def check_arguments(body: dict[str, Any], name: str) -> None:
    """Compare the names in a block, and in the blocks below it, with those that the provider accepts."""
    nested = [(key, each) for key in body if f"{name}.{key}" in ARGUMENTS for each in body[key]]
    nested += [
        (key.strip('"'), *facts["content"])
        for each in body.get("dynamic", [])
        for key, facts in each.items()
        if not key.startswith("__")
    ]
    given = {key for key in body if not key.startswith("__")} - META_ARGUMENTS - {"dynamic"}
    given |= {key for key, _ in nested}
    required, optional = (set(ARGUMENTS[name].get(part, ())) for part in ("required", "optional"))
    assert required <= given <= required | optional, name
    for key, facts in nested:
        check_arguments(facts, f"{name}.{key}")


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_terraform_example_has_only_arguments_of_its_provider(cloud: str) -> None:
    """The recorded schemas have each argument, and no required one is missing."""
    body = terraform(cloud)
    for prefix, section in SECTIONS.items():
        for kind, _, facts in declared(body, section):
            check_arguments(facts, prefix + kind)


@pytest.mark.parametrize(
    ("cloud", "file"), [("aws", "aws-user-data.yaml"), ("gcp", "gcp-startup.sh")]
)
def test_terraform_passes_every_template_variable(cloud: str, file: str) -> None:
    """The example passes exactly the variables of the first-boot file; Terraform refuses others."""
    text = terraform_text(cloud)
    handed = re.search(rf"{re.escape(file)}\", \{{(.*?)\}}\)", text, re.DOTALL)
    assert handed
    needed = set(re.findall(r"[$%]\{(.*?)\}", (FIRST_BOOT / file).read_text()))
    assert set(re.findall(r"^\s+(\w+)\s+=", handed[1], re.MULTILINE)) == needed


def blocks(body: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The bodies of all resources of a kind."""
    return [facts for found, _, facts in declared(body, "resource") if found == kind]


def test_mixed_fleets_are_variables() -> None:
    """Both examples have one Spot VM by default, and the first VMs of a job on demand if wanted."""
    for cloud in ("aws", "gcp"):
        body = terraform(cloud)
        variables = {
            name.strip('"'): facts for each in body["variable"] for name, facts in each.items()
        }
        assert (variables["vms"]["default"], variables["on_demand"]["default"]) == (1, 0)
    body = terraform("aws")
    (group,) = blocks(body, "aws_autoscaling_group")
    assert group["min_size"] == group["max_size"] == "${var.vms}"
    (distribution,) = group["mixed_instances_policy"][0]["instances_distribution"]
    assert distribution["on_demand_base_capacity"] == "${var.on_demand}"
    assert distribution["on_demand_percentage_above_base_capacity"] == 0
    body = terraform("gcp")
    (template,) = blocks(body, "google_compute_instance_template")
    (group,) = blocks(body, "google_compute_region_instance_group_manager")
    assert template["for_each"] == group["for_each"] == "${local.models}"
    assert template["scheduling"][0]["provisioning_model"] == "${each.key}"
    assert group["target_size"] == "${each.value}"


def test_gcp_example_reaches_the_bucket_and_gets_preemption_notices() -> None:
    """External address, subnetwork, disk type and notice are variables; runs share no account or role."""
    body = terraform("gcp")
    (template,) = blocks(body, "google_compute_instance_template")
    (interface,) = template["network_interface"]
    assert interface["subnetwork"] == "${var.subnetwork}"
    assert [*interface["dynamic"][0]] == ['"access_config"']
    (disk,) = template["disk"]
    assert (disk["disk_type"], disk["disk_size_gb"]) == ("${var.disk_type}", "${var.disk_gb}")
    (scheduling,) = template["scheduling"]
    assert [*scheduling["dynamic"][0]] == ['"preemption_notice_duration"']
    (account,) = blocks(body, "google_service_account")
    (role,) = blocks(body, "google_project_iam_custom_role")
    assert "${local.id}" in account["account_id"]
    assert "${local.id}" in role["role_id"]


def test_aws_example_has_session_manager_and_an_encrypted_root_disk() -> None:
    """The size of the root disk is a variable, and no ARN names a partition."""
    text, body = terraform_text("aws"), terraform("aws")
    (session,) = blocks(body, "aws_iam_role_policy_attachment")
    assert session["policy_arn"].strip('"').endswith(":policy/AmazonSSMManagedInstanceCore")
    (template,) = blocks(body, "aws_launch_template")
    (disk,) = template["block_device_mappings"]
    assert disk["device_name"] == "${data.aws_ami.swansong.root_device_name}"
    (facts,) = disk["ebs"]
    assert (facts["volume_size"], facts["encrypted"]) == ("${var.disk_gb}", True)
    fixed = re.findall(r'"[^"]*(?:arn:aws:|\.amazonaws\.com)[^"]*"', text)
    assert fixed == ['"arn:aws:"']  # the text that the example replaces in the policy
    policy = (PACKER / "permissions" / "aws-vm.json").read_text()
    assert set(re.findall(r"arn:[a-z*-]+:", policy)) == {"arn:aws:"}


def test_lifecycle_hook_of_the_group_is_the_configured_one() -> None:
    """Name and timeout of the group's hook match the user data."""
    text = terraform_text("aws")
    hook = re.search(r"initial_lifecycle_hook \{(.*?)\n  \}", text, re.DOTALL)
    assert hook
    facts = dict(re.findall(r"(\w+)\s+= \"?([^\"\n]+)", hook[1]))
    commands = " ".join(map(str, yaml.safe_load(first_boot("aws-user-data.yaml"))["bootcmd"][0]))
    assert f'asg_hook = "{facts["name"]}"' in commands
    assert facts["heartbeat_timeout"] == "300"
    assert facts["lifecycle_transition"] == "autoscaling:EC2_INSTANCE_TERMINATING"


@pytest.mark.fault("S20")
def test_containers_get_no_credentials_of_the_vm() -> None:
    """The AWS example limits the metadata service to one hop and requires tokens."""
    text = terraform_text("aws")
    options = re.search(r"metadata_options \{(.*?)\}", text, re.DOTALL)
    assert options
    facts = dict(re.findall(r"(\w+)\s+= \"?(\w+)", options[1]))
    assert facts == {
        "http_endpoint": "enabled",
        "http_tokens": "required",
        "http_put_response_hop_limit": "1",
    }


# ---------------------------------------------------------------- names for service discovery


def jobs(discovery: str) -> list[dict[str, Any]]:
    """The jobs of the scrape example that find VMs in this way."""
    return [job for job in SCRAPE["scrape_configs"] if discovery in job]


def of_the_vm(job: dict[str, Any], prefix: str) -> set[str]:
    """The tags or labels of a VM that the job reads."""
    sources = [
        source for rule in job["relabel_configs"] for source in rule.get("source_labels", ())
    ]
    return {source.removeprefix(prefix) for source in sources if source.startswith(prefix)}


def test_the_scrape_example_finds_the_vms_of_the_aws_example() -> None:
    """Each new VM has the tags that the jobs filter on, and the tag with the name of its run."""
    body = terraform("aws")
    (group,) = blocks(body, "aws_autoscaling_group")
    tags = {
        tag["key"].strip('"'): tag["value"].strip('"')
        for tag in group["tag"]
        if tag["propagate_at_launch"] is True
    }
    found = jobs("ec2_sd_configs")
    assert len(found) == 2
    for job in found:
        for config in job["ec2_sd_configs"]:
            for each in config["filters"]:
                kind, _, key = each["name"].partition(":")
                if kind == "tag":
                    assert tags[key] in each["values"]
                    assert f"Key={key},Value={tags[key]} " in MONITORING_PAGE
    assert of_the_vm(found[0], "__meta_ec2_tag_") == {"run"}
    assert tags["run"] == "${var.run}"
    assert "Key=run,Value=my-run" in MONITORING_PAGE


def test_the_scrape_example_finds_the_vms_of_the_gcp_example() -> None:
    """Each VM has the network tag that the job keeps, and the label with the name of its run."""
    body = terraform("gcp")
    (template,) = blocks(body, "google_compute_instance_template")
    tags = [tag.strip('"') for tag in template["tags"]]
    (job,) = jobs("gce_sd_configs")
    (kept,) = (rule["regex"] for rule in job["relabel_configs"] if rule.get("action") == "keep")
    assert re.fullmatch(kept, f",{','.join(tags)},")
    assert f"--tags {','.join(tags)}\n" in MONITORING_PAGE
    assert of_the_vm(job, "__meta_gce_label_") == {"run"}
    assert template["labels"] == {"run": "${var.run}"}
    assert "--labels run=my-run\n" in MONITORING_PAGE
