# SPDX-License-Identifier: Apache-2.0
"""The Packer templates: a real build of the AMI, as far as possible without an account.

Packer 1.6 has its builders compiled in.  It uses moto's EC2, whose VMs accept no logins: the provisioners are
removed here, and provision.sh has its own tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import hcl2
import pytest

from testkit import REPOSITORY
from testkit.emulators.process import EmulatorProcess

PACKER = REPOSITORY / "packer"
MOTO = """
  access_key                  = "test"
  secret_key                  = "test"
  skip_credential_validation  = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  communicator                = "none"
  custom_endpoint_ec2         = "{url}"
"""


@pytest.fixture
def ec2() -> Iterator[tuple[Any, str]]:
    """A client of moto's EC2, and its URL."""
    with EmulatorProcess("testkit.emulators.ec2_server") as server:
        client = boto3.client(
            "ec2",
            endpoint_url=server.url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        yield client, server.url
        client.close()


def templates(tmp_path: Path, url: str) -> Path:
    """The templates with moto's URL, without what needs a login."""
    folder = tmp_path / "packer"
    shutil.copytree(PACKER, folder)
    (folder / "plugins.pkr.hcl").unlink()
    source = (folder / "aws.pkr.hcl").read_text()
    source = re.sub(r"\n  (imds_support.*|metadata_options \{(.|\n)*?\n  \})", "", source)
    head, opening, rest = source.partition('source "amazon-ebs" "swansong" {')
    (folder / "aws.pkr.hcl").write_text(head + opening + MOTO.format(url=url) + rest)
    build = (folder / "build.pkr.hcl").read_text()
    without = re.sub(r"\n  provisioner .*?\n  }\n", "\n", build, flags=re.DOTALL)
    assert without.count("provisioner") == 0
    (folder / "build.pkr.hcl").write_text(without)
    return folder


def packer(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("packer") is None:
        pytest.skip("needs packer")
    scratch = folder.parent
    return subprocess.run(
        ["packer", *arguments, "."],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(scratch),
            "CHECKPOINT_DISABLE": "1",
            "PACKER_CONFIG_DIR": str(scratch),
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_ami_is_built_and_nothing_else_is_left(ec2: tuple[Any, str], tmp_path: Path) -> None:
    """The build uses the named base image and subnet, and removes VM, key and security group."""
    client, url = ec2
    subnet = client.describe_subnets()["Subnets"][0]["SubnetId"]
    filters = {"root-device-type": "ebs", "virtualization-type": "hvm", "name": "ubuntu/*"}
    base = client.describe_images(
        Filters=[{"Name": name, "Values": [value]} for name, value in filters.items()]
    )["Images"][0]
    variables = {
        "gcp_project": "none",
        "image_name": "trainer",
        "aws_subnet": subnet,
        "aws_source_image": base["Name"],
        "aws_source_owner": base["OwnerId"],
    }
    groups = {g["GroupId"] for g in client.describe_security_groups()["SecurityGroups"]}
    options = [f"-var={name}={value}" for name, value in variables.items()]
    done = packer(templates(tmp_path, url), "build", "-color=false", "-only=amazon-ebs.*", *options)
    assert done.returncode == 0, done.stdout + done.stderr

    (image,) = client.describe_images(Owners=["self"])["Images"]
    assert re.fullmatch(r"trainer-\d{8}-\d{6}", image["Name"])
    assert image["Tags"] == [{"Key": "Name", "Value": image["Name"]}]
    ((vm,),) = (found["Instances"] for found in client.describe_instances()["Reservations"])
    assert vm["State"]["Name"] == "terminated"
    assert (vm["ImageId"], vm["InstanceType"]) == (base["ImageId"], "t3.small")
    assert client.describe_key_pairs()["KeyPairs"] == []
    assert {g["GroupId"] for g in client.describe_security_groups()["SecurityGroups"]} == groups


def test_templates_for_current_packer_set_what_images_need() -> None:
    """IMDSv2, encryption, disk sizes and IAP; and folders that comments name exist."""
    texts = {path.name: path.read_text() for path in PACKER.glob("*.pkr.hcl")}
    aws = hcl2.loads(texts["aws.pkr.hcl"])["source"][0]['"amazon-ebs"']['"swansong"']
    assert aws["imds_support"] == '"v2.0"'
    assert aws["metadata_options"][0]["http_tokens"] == '"required"'
    assert aws["encrypt_boot"] == "${var.aws_encrypt}"
    assert [*aws["dynamic"][0]] == ['"launch_block_device_mappings"']
    gcp = hcl2.loads(texts["gcp.pkr.hcl"])["source"][0]['"googlecompute"']['"swansong"']
    assert gcp["disk_size"] == "${var.gcp_disk_gb}"
    assert {gcp[key] for key in ("use_iap", "omit_external_ip", "use_internal_ip")} == {
        "${var.gcp_iap}"
    }
    comments = re.findall(r"#.*", "".join(texts.values()))
    named = set(re.findall(r"(?<![\w/.])([a-z-]+)/(?!\w)", "\n".join(comments)))
    assert named
    assert {name for name in named if not (PACKER / name).is_dir()} == set()


def test_a_misspelt_argument_is_found(tmp_path: Path) -> None:
    """Packer 1.6 knows every argument of both builders, so `make check` finds wrong ones."""
    folder = templates(tmp_path, "http://127.0.0.1:1")
    gcp = folder / "gcp.pkr.hcl"
    gcp.write_text(gcp.read_text().replace("subnetwork ", "subnetwrk "))
    done = packer(folder, "validate", "-var=gcp_project=none")
    assert done.returncode == 1
    assert "subnetwrk" in done.stdout + done.stderr


def test_both_builders_accept_every_variable(tmp_path: Path) -> None:
    """With each variable set, the builders check their optional blocks, too."""
    folder = templates(tmp_path, "http://127.0.0.1:1")
    values = {"aws_kms_key": "alias/key"}
    for variable in hcl2.loads((folder / "variables.pkr.hcl").read_text())["variable"]:
        for quoted, facts in variable.items():
            default = facts["default"]
            of_type = {bool: "true", int: "500"}.get(type(default), "another")
            values.setdefault(quoted.strip('"'), of_type)
    assert len(values) > 20
    done = packer(folder, "validate", *(f"-var={name}={value}" for name, value in values.items()))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_plugins_are_named_for_current_packer() -> None:
    """In the only file that Packer 1.6 cannot read: both plugins, each with its source and a version."""
    plugins = hcl2.loads((PACKER / "plugins.pkr.hcl").read_text())
    required = plugins["packer"][0]["required_plugins"][0]
    named = {name: fact for name, fact in required.items() if not name.startswith("__")}
    assert set(named) == {"amazon", "googlecompute"}
    for name, fact in named.items():
        assert fact["source"].strip('"') == f"github.com/hashicorp/{name}"
        assert re.fullmatch(r'"?>= \d+\.\d+\.\d+"?', fact["version"])


def test_every_variable_is_used_and_explained() -> None:
    """Each variable of the templates is used in one of them and named in the README."""
    texts = {path.name: path.read_text() for path in PACKER.glob("*.pkr.hcl")}
    declared = set(re.findall(r'^variable "(\w+)"', texts.pop("variables.pkr.hcl"), re.MULTILINE))
    used = set(re.findall(r"var\.(\w+)", "".join(texts.values())))
    readme = (PACKER / "README.md").read_text()
    assert used == declared
    assert {name for name in declared if f"`{name}`" not in readme} == set()
