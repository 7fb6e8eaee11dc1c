# SPDX-License-Identifier: Apache-2.0
"""``swansong doctor --image``: units, drop-ins, staging, secrets and identity."""

from __future__ import annotations

import pwd
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from swansong_tools.doctor import host
from swansong_tools.doctor.findings import Finding, Level, examine
from swansong_tools.doctor.installation import Installation, own_account
from swansongd.config.config import Config, parse

from tests.unit.doctor.test_doctor import installation

HOME = pwd.getpwuid(0).pw_dir.lstrip("/")
UNIT = "usr/lib/systemd/system/swansongd.service"
DROP_INS = "etc/systemd/system/swansongd.service.d"
STAGING = "/var/lib/swansong/staging"


def config(staging: str = STAGING) -> Config:
    return parse(
        {"run": {"name": "r"}, "staging": {"path": staging}, "store": {"url": "s3://bucket"}}
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An image without faults."""
    for name, text in {
        UNIT: "[Service]\nReadWritePaths=/var/lib/swansong\n",
        "etc/machine-id": "uninitialized\n",
        f"{HOME}/.ssh/id_ed25519.pub": "ssh-ed25519 AAAA\n",
        f"{HOME}/.aws/config": "[default]\nregion = eu-west-1\n",
    }.items():
        write(tmp_path / name, text)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def findings(root: Path, configured: Config | None) -> dict[str, Finding]:
    path = Path("/etc/swansong/swansong.toml")
    vm = Installation(path=path, configured=configured, user=own_account(), root=root)
    return {found.name: found for found in examine(vm, host.IMAGE)}


def levels(root: Path, staging: str = STAGING) -> dict[str, Level]:
    return {name: found.level for name, found in findings(root, config(staging)).items()}


def test_a_good_image_is_ok(root: Path) -> None:
    """Public keys, settings without secrets and an empty machine id are allowed."""
    assert levels(root) == {"sandbox": Level.OK, "secrets": Level.OK, "identity": Level.OK}


@pytest.mark.fault("S22")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (f"{HOME}/.aws/credentials", "[default]"),
        (f"{HOME}/.ssh/id_ed25519", "x"),
        (f"{HOME}/.config/gcloud/application_default_credentials.json", "{}"),
        (f"{HOME}/.cache/huggingface/token", "x"),
        (f"{HOME}/.netrc", "machine example.org"),
        ("etc/swansong/aws/credentials", "[training]"),
        ("etc/swansong/gcloud/application_default_credentials.json", "{}"),
        ("etc/swansong/aws/config", "aws_secret_access_key = x"),
        ("etc/swansong/key.pem", "-----BEGIN EC PRIVATE KEY-----"),
        ("etc/swansong/swansong.toml", "# AKIAABCDEFGHIJKLMNOP"),
        (f"{DROP_INS}/env.conf", "[Service]\nEnvironment=AWS_SECRET_ACCESS_KEY=x"),
        ("etc/pip.conf", "index-url = https://me:secret@example.org/simple"),
    ],
)
def test_a_secret_is_found(root: Path, name: str, text: str) -> None:
    """The finding names the file, but not its contents."""
    write(root / name, text)
    found = findings(root, config())["secrets"]
    assert found.level is Level.FAILURE
    assert f"/{name}" in found.found
    assert found.fix == f"sudo rm /{name}"
    assert text not in found.found


@pytest.mark.fault("G06")
@pytest.mark.parametrize("name", ["etc/machine-id", "var/lib/dbus/machine-id"])
def test_an_identity_is_found(root: Path, name: str) -> None:
    """The copy of D-Bus counts as well: systemd would restore the machine id from it."""
    write(root / name, "0123456789abcdef0123456789abcdef\n")
    assert levels(root)["identity"] is Level.FAILURE


@pytest.mark.parametrize(
    ("drop_in", "level"),
    [
        (None, Level.FAILURE),
        ("ReadWritePaths=/mnt/nvme/staging", Level.OK),
        ("ReadWritePaths=/mnt/nvme\nReadWritePaths=", Level.FAILURE),
    ],
)
def test_staging_elsewhere_needs_a_drop_in(root: Path, drop_in: str | None, level: Level) -> None:
    """Unit and drop-ins are merged; an empty assignment resets the list."""
    if drop_in is not None:
        write(root / f"{DROP_INS}/staging.conf", f"[Service]\n{drop_in}\n")
    assert levels(root, "/mnt/nvme/staging")["sandbox"] is level


def test_without_a_configuration_the_other_checks_run(root: Path) -> None:
    """Another check reports the invalid configuration."""
    assert list(findings(root, None)) == ["secrets", "identity"]


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("# {ours}\n[Login]\nInhibitDelayMaxSec=24s\n", Level.OK),
        ("# {other}\nInhibitDelayMaxSec=5s\n\n# {ours}\nInhibitDelayMaxSec=24s\n", Level.OK),
        ("# {ours}\nInhibitDelayMaxSec=24s\n\n# {other}\nInhibitDelayMaxSec=5s\n", Level.WARNING),
        ("# {ours}\nInhibitDelayMaxSec=24s\n\n# {other}\n#InhibitDelayMaxSec=5s\n", Level.OK),
        ("# {ours}\n[Login]\n", Level.WARNING),
        ("", Level.WARNING),
    ],
)
def test_the_last_drop_in_sets_the_delay(
    monkeypatch: pytest.MonkeyPatch, root: Path, text: str, level: Level
) -> None:
    """The last assignment wins; comments are ignored."""
    ours = root / "zz-swansong.conf"
    ours.touch()
    monkeypatch.setattr(host, "_OVERRIDE", ours)
    shown = text.format(ours=ours, other=root / "zzz.conf")
    monkeypatch.setattr(host, "tool", lambda *_: CompletedProcess([], 0, shown, ""))
    assert host.logind_drop_in(installation()).level is level


@pytest.mark.parametrize(
    ("stderr", "level"),
    [
        ("", Level.OK),
        ("/usr/lib/systemd/system/other.service:3: Unknown key name 'X'", Level.OK),
        ("/etc/systemd/system/swansongd.service:3: Unknown key name 'X'", Level.FAILURE),
        ("swansongd.service: Command /opt/x is not executable", Level.FAILURE),
    ],
)
def test_only_our_units_count(monkeypatch: pytest.MonkeyPatch, stderr: str, level: Level) -> None:
    """Errors in units of other packages are ignored."""
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(host, "tool", lambda *_: CompletedProcess([], 0, "", stderr))
    assert host.unit_syntax(installation()).level is level
