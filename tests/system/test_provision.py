# SPDX-License-Identifier: Apache-2.0
"""packer/provision.sh, run on a throwaway overlay of this machine's root."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from swansong_tools.commands.main import COMMANDS

from testkit import REPOSITORY
from testkit.other_users import needs_root
from testkit.wheelhouse import installed_dependencies, write_wheelhouse

pytestmark = pytest.mark.runs_first

PROVISION = REPOSITORY / "packer" / "provision.sh"
FIRST = """# the configuration of the first run
[run]
name = "to-be-named"
[staging]
path = "/var/lib/swansong/staging"
[store]
url = "file:///to/be/named"
[metrics]
# listen = "127.0.0.1:1"
"""
UNITS = {path.name for path in (REPOSITORY / "systemd").iterdir() if path.is_file()}


@dataclass(frozen=True)
class Provisioned:
    """The output of throwaway_root.sh."""

    output: Path
    stdout: str

    def text(self, name: str) -> str:
        return (self.output / name).read_text()

    def changes(self) -> dict[str, list[str]]:
        """path -> [kind, mode, uid, gid, link target] of every written file."""
        lines = self.text("changes").splitlines()
        return {path: facts for path, *facts in (line.split("\t") for line in lines)}


def may_mount() -> bool:
    """False for the root of an unprivileged container."""
    probe = ["unshare", "--mount", "true"]
    return subprocess.run(probe, check=False, capture_output=True).returncode == 0


def uninstall_commands() -> str:
    """The commands of docs/operations/install.md without dpkg, for root in the clone."""
    page = (REPOSITORY / "docs" / "operations" / "install.md").read_text()
    commands = page.partition("## Uninstall\n")[2].split("```")[3]
    return "cd /run/repository\n" + commands.replace("sudo ", "")


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provisioned]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    missing = [
        what
        for what, there in {
            "mount namespaces": may_mount(),
            "overlay file system": "overlay" in Path("/proc/filesystems").read_text(),
            "systemd-sysusers": shutil.which("systemd-sysusers"),
        }.items()
        if not there
    ]
    if missing:
        assert not os.environ.get("CI"), f"needed in CI: {missing}"
        pytest.skip(f"needs {', '.join(missing)}")
    scratch = tmp_path_factory.mktemp("provision")
    output = scratch / "output"
    output.mkdir()
    write_wheelhouse(scratch / "wheels", scratch / "constraints.txt")
    (scratch / "first.toml").write_text(FIRST)
    (scratch / "second.toml").write_text("# must not be installed\n")
    (scratch / "uninstall.sh").write_text(uninstall_commands())
    python = Path(sys.base_prefix) / "bin" / "python3"
    script = REPOSITORY / "testkit" / "throwaway_root.sh"
    done = subprocess.run(
        ["unshare", "--mount", script, REPOSITORY, scratch, output, python],
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    yield Provisioned(output, done.stdout)
    shutil.rmtree(scratch)


def test_second_run_changes_nothing(provisioned: Provisioned) -> None:
    """A second run, without dpkg and from the sources, changes no path, mode, owner or byte.

    Wheels built from the sources differ in bytes and names from the wheelhouse.
    """

    def differ(name: str, built: str) -> set[str]:
        both = (set(provisioned.text(each).splitlines()) for each in (name, f"{name}.again"))
        asked = "usr/bin/dpkg|etc/machine-id|var/lib/(dbus|systemd)"
        return {
            line
            for line in set.symmetric_difference(*both)
            if not re.search(f"{built}|{asked}", line)
        }

    assert differ("changes", "/hooks/|dist-info") == set()
    assert differ("contents", "opt/swansong/|usr/share/(doc|man)/") == set()


def test_files_of_the_package_have_the_time_of_its_commit(provisioned: Provisioned) -> None:
    """Also if that is later than the build: otherwise each build of the commit is another package."""
    assert "the files of the package are of 4000000000" in provisioned.stdout


def test_config_of_the_operator_is_kept(provisioned: Provisioned) -> None:
    """The given configuration is installed once, with the given values; later runs keep it."""
    named = FIRST.replace('"to-be-named"', '"first-run"')
    named = named.replace('"file:///to/be/named"', '"s3://bucket/prefix"')
    named = named.replace('# listen = "127.0.0.1:1"', 'listen = "127.0.0.1:9469"')
    assert provisioned.text("swansong.toml") == named + "# edited by the operator\n"


def test_all_parts_are_in_place(provisioned: Provisioned) -> None:
    """Program, units, users and directories exist, and the service is enabled."""
    changes = provisioned.changes()
    assert {f"usr/lib/systemd/system/{unit}" for unit in UNITS} <= changes.keys()
    enabled = changes["etc/systemd/system/multi-user.target.wants/swansongd.service"]
    assert enabled[-1] == "/usr/lib/systemd/system/swansongd.service"
    assert changes["usr/bin/swansong"][-1] == "/opt/swansong/bin/swansong"
    assert "usr/lib/systemd/logind.conf.d/zz-swansong.conf" in changes
    uid = re.search(r"^swansong:x:(\d+):", provisioned.text("passwd"), re.MULTILINE)
    gid = re.search(r"^swansong-trainers:x:(\d+):", provisioned.text("group"), re.MULTILINE)
    assert uid
    assert gid
    assert changes["var/lib/swansong"] == ["d", "750", "0", gid[1], ""]
    assert changes["var/lib/swansong/staging"] == ["d", "2750", uid[1], gid[1], ""]
    assert changes["var/lib/swansong/restored"] == ["d", "750", uid[1], gid[1], ""]
    assert changes["var/lib/swansong/store"][:3] == ["d", "700", uid[1]]
    assert re.search(r"^/opt/swansong/.*/swansongd/__init__.py$", provisioned.stdout, re.MULTILINE)
    assert provisioned.stdout.count("#!/opt/swansong/bin/python") == 2


def test_trainers_find_a_wheel_of_the_hooks(provisioned: Provisioned) -> None:
    """Each user can read one wheel of the hooks, which fits the installed daemon."""
    wheels = {
        path: facts
        for path, facts in provisioned.changes().items()
        if path.startswith("opt/swansong/hooks/")
    }
    ((path, (kind, mode, *_)),) = wheels.items()
    assert re.fullmatch(r"opt/swansong/hooks/swansong-[^-]+-py3-none-any\.whl", path)
    assert (kind, mode) == ("f", "644")


def test_all_commands_and_packages_are_described(provisioned: Provisioned) -> None:
    """The man page has each command; the SBOM has each bundled package with its licence."""
    manual = gzip.decompress((provisioned.output / "swansong.1.gz").read_bytes()).decode()
    assert re.findall(r"^\.SS (.+)$", manual, re.MULTILINE) == list(COMMANDS)
    listed = {
        each["name"].lower().replace("_", "-"): each
        for each in json.loads(provisioned.text("sbom.cdx.json"))["components"]
    }
    bundled = installed_dependencies().keys() - {"setuptools"}
    assert listed.keys() == {*bundled, "swansong", "swansongd"}
    assert all(each["licenses"][0]["license"]["name"] for each in listed.values())
    completions = "usr/share/bash-completion/completions/swansong"
    assert {completions, "usr/share/man/man5/swansong.toml.5.gz"} <= provisioned.changes().keys()


@pytest.mark.fault("S22")
def test_no_other_file_is_changed(provisioned: Provisioned) -> None:
    """No cache, key, history or scratch file remains anywhere on the machine."""
    ours = re.compile(
        r"(opt|etc|var/lib|usr/lib|usr/share|usr/share/doc)/swansong(/.*)?"
        r"|usr/lib/systemd/system/swansong[a-z@-]*\.(service|socket|timer)"
        r"|etc/systemd/system/multi-user\.target\.wants/swansongd\.service"
        r"|usr/lib/systemd/logind\.conf\.d/zz-swansong\.conf"
        r"|usr/lib/(sysusers|tmpfiles)\.d/swansong\.conf"
        r"|usr/bin/swansong|usr/share/(man|bash-completion|zsh|fish)/.*swansong.*"
        r"|etc/((passwd|group|shadow|gshadow)-?|\.pwd\.lock)"
    )
    foreign = [
        path
        for path, (kind, *_) in provisioned.changes().items()
        if kind != "d" and not ours.fullmatch(path)
    ]
    assert foreign == []


def test_wheel_with_altered_bytes_is_refused(provisioned: Provisioned) -> None:
    """One wheel of the wheelhouse has an additional byte: nothing is installed, and pip names the wheel."""
    output = provisioned.text("altered")
    assert "exit code 1\n" in output
    assert "DO NOT MATCH THE HASHES" in output
    assert "azure-core" in output
    assert output.partition("exit code 1\n")[2] == ""


@pytest.mark.fault("S8")
def test_only_the_directory_of_a_run_is_shared(provisioned: Provisioned) -> None:
    """A trainer can create nothing beside the directory of a run; the daemon can write to no parent of it."""
    assert "a trainer can write to" not in provisioned.stdout
    assert "the daemon can write to" not in provisioned.stdout
    assert provisioned.stdout.count("of-a-trainer") == 4
    assert provisioned.stdout.count("of-the-daemon") == 4


@pytest.mark.fault("S8")
def test_trainers_of_other_users_share_staging_and_other_users_do_not(
    provisioned: Provisioned,
) -> None:
    """The daemon can read and prune what a trainer wrote under umask 077; other users cannot list it."""
    assert "written\nweights\npruned\n" in provisioned.stdout
    assert "Permission denied" in provisioned.stdout
    assert "a stranger can look" not in provisioned.stdout


@pytest.mark.fault("G06")
def test_image_has_no_machine_id(provisioned: Provisioned) -> None:
    """Every VM that boots from the image generates its own identity."""
    assert "machine-id has 0 bytes" in provisioned.stdout


def findings(shown: str) -> dict[str, str]:
    """name -> level of each finding that ``swansong doctor`` prints."""
    return {
        name: level
        for level, name in re.findall(
            r"^  (ok|warning|failure|skipped) +([^:]+):", shown, re.MULTILINE
        )
    }


def test_doctor_passes_the_image(provisioned: Provisioned) -> None:
    """The script ends with ``swansong doctor --image``, which finds no fault except those of the host."""
    found = findings(provisioned.stdout)
    assert found.pop("polkit") in ("ok", "warning")
    assert set(found) == {
        "configuration", "packages", "users", "unit file", "unit syntax", "logind drop-in",
        "permissions", "sandbox", "secrets", "identity",
    }  # fmt: skip
    assert set(found.values()) == {"ok"}, provisioned.stdout


@pytest.mark.fault("S22", "G06")
def test_image_with_a_secret_is_refused(provisioned: Provisioned) -> None:
    """A credential, an identity, a later drop-in and an invalid unit are each reported."""
    shown = provisioned.text("doctor.again")
    assert provisioned.text("doctor.code") == "12\n"
    found = {
        name.removeprefix("image: ").removeprefix("host: ")
        for name in re.findall(r"^  failure +([^:]+: [^:]+):", shown, re.MULTILINE)
    }
    assert found == {"secrets", "identity", "unit syntax"}
    assert findings(shown)["logind drop-in"] == "warning"
    assert "/root/.aws/credentials" in shown
    assert "zzz-later.conf" in shown
    assert "Nonsense" in shown


def test_files_from_before_the_package_hide_nothing(provisioned: Provisioned) -> None:
    """An unchanged unit in /etc is removed, its link stays; a changed one is named."""
    assert "etc/systemd/system/swansongd.service" not in provisioned.changes()
    assert provisioned.stdout.count("/etc/systemd/system/swansong-exporter.service hides") == 1


def test_uninstalling_leaves_nothing(provisioned: Provisioned) -> None:
    """All commands of docs/operations/install.md work, and no file, user or group of ours remains."""
    assert provisioned.text("left") == ""


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--wheelhouse", "/nowhere"], 1, "--wheelhouse needs something that exists"),
        (["--deb", "/nowhere"], 1, "--deb needs something that exists"),
        (["--config"], 1, "--config needs something that exists"),
        (["--run", 'a"b'], 1, "--run needs a name or a URL"),
        (["--store"], 1, "--store needs a name or a URL"),
        (["--metrics", "a b"], 1, "--metrics needs an address"),
        (["--wheels", "x"], 2, "usage: provision.sh"),
    ],
)
def test_mistaken_command_line_changes_nothing(
    arguments: list[str], exit_code: int, message: str
) -> None:
    """A mistake in the command line is reported before any change."""
    done = subprocess.run(
        [PROVISION, *arguments], check=False, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == exit_code
    assert message in done.stderr
    assert done.stdout == ""


APT_GET = """#!/bin/sh
echo "Selecting previously unselected package $*"
echo "E: Unable to fetch some archives" >&2
exit {code}
"""


@needs_root
@pytest.mark.parametrize("code", [0, 100])
@pytest.mark.parametrize("missing", ["Python", "polkit"])
def test_a_package_manager_that_fails_is_a_failure(tmp_path: Path, code: int, missing: str) -> None:
    """The script fails before any change, and shows the package manager's output only on failure."""
    if not may_mount():
        pytest.skip("needs mount namespaces")
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "cat", "dirname", "id", "realpath"):
        (tools / tool).symlink_to(shutil.which(tool) or "")
    (tools / "apt-get").write_text(APT_GET.format(code=code))
    python = tools / "python3"
    # If polkit is the missing package: a Python that is new enough, and fails at its second start.
    python.write_text("#!/bin/sh\n" + ("exit 1\n" if missing == "Python" else "[ $# = 3 ]\n"))
    for made in (tools / "apt-get", python):
        made.chmod(0o755)
    # Hide all programs of an earlier installation.
    run = 'mount -t tmpfs tmpfs /opt && exec env -i PATH="$1" "$1/bash" "$2"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", run, "sh", tools, PROVISION],
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode != 0
    assert done.stdout == ""
    was_refused = code != 0
    assert ("Unable to fetch some archives" in done.stderr) == was_refused
    assert ("Selecting previously unselected package" in done.stderr) == was_refused
    if was_refused:
        assert re.match(rf"provision: {missing}.* cannot be installed", done.stderr)


@needs_root
def test_only_root_may_provision() -> None:
    """Without root the script stops immediately with an error."""
    script = PROVISION.read_text()  # user 65534 may not be able to read the clone
    done = subprocess.run(
        ["bash", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
        user=65534,
        cwd="/",
    )
    assert done.returncode == 1
    assert "must be root" in done.stderr
