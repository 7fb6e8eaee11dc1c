# SPDX-License-Identifier: Apache-2.0
"""What the units promise, and that tests/check_system_files.sh notices when one does not keep it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import google.auth.environment_vars
import pytest
from botocore.configprovider import BOTOCORE_DEFAUT_SESSION_VARIABLES
from swansongd.cli.main import EXIT_CODES
from swansongd.errors import ConfigError, FencedError

from testkit import REPOSITORY

UNITS = REPOSITORY / "systemd"
TALKS_TO_THE_STORE = ["swansongd.service", "swansong-restore@.service"]
CHECKED = ("systemd", "packer", "constraints.txt", "tests/check_system_files.sh", ".ci/run")


def settings(path: Path) -> dict[str, list[str]]:
    """key -> all its words, over repeated lines."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found[key] += value.split()
    return found


def span_s(value: str) -> int:
    return int(value.removesuffix("s"))


@pytest.mark.fault("S15")
@pytest.mark.parametrize("unit", TALKS_TO_THE_STORE)
def test_no_proxy_reaches_the_metadata_client(unit: str) -> None:
    """Every variable by which requests or botocore would find a proxy is taken away."""
    proxies = {
        f"{scheme}_proxy" for scheme in ("http", "https", "all", "no")
    }  # what urllib.request.getproxies_environment reads, in either case
    unset = set(settings(UNITS / unit)["UnsetEnvironment"])
    assert proxies | {name.upper() for name in proxies} <= unset


@pytest.mark.fault("S16")
@pytest.mark.parametrize("unit", TALKS_TO_THE_STORE)
def test_no_variable_redirects_metadata(unit: str) -> None:
    """Every variable by which the installed SDKs move the metadata service elsewhere is taken away."""
    google_knows = {
        value
        for name, value in vars(google.auth.environment_vars).items()
        if name.startswith("GCE_METADATA") and name.endswith(("HOST", "ROOT", "IP"))
    }
    botocore_knows = {
        variable
        for _, variable, *_ in BOTOCORE_DEFAUT_SESSION_VARIABLES.values()
        if isinstance(variable, str) and "METADATA_SERVICE_ENDPOINT" in variable
    }
    assert google_knows
    assert botocore_knows
    unset = set(settings(UNITS / unit)["UnsetEnvironment"])
    assert google_knows | botocore_knows <= unset


# What each SDK finds where the daemon's user has a home full of files that a trainer planted.
LOOK = """
import json, os, sys
import boto3, google.auth, requests
from google.auth.exceptions import DefaultCredentialsError
session = boto3.Session()
credentials = session.get_credentials()
found = {
    "aws": credentials and credentials.method,
    "region": session.region_name,
    "services": "planted" in session.get_available_services(),
    "netrc": requests.utils.get_netrc_auth("https://example.org/"),
    "command": os.path.exists(sys.argv[1]),
}
try:
    found["gcp"] = str(google.auth.default()[0])
except DefaultCredentialsError:
    found["gcp"] = None
print(json.dumps(found))
"""


def plant(home: Path, marker: Path) -> None:
    """Every file that an SDK reads from a home and takes credentials, addresses or code from."""
    key = "aws_access_key_id = AKIAAAAAAAAAAAAAAAAA\naws_secret_access_key = planted\n"
    token = (
        '{"type": "authorized_user", "client_id": "x", "client_secret": "x", "refresh_token": "x"}'
    )
    files = {
        ".aws/config": f"[default]\nregion = planted-1\ncredential_process = touch {marker}\n",
        ".aws/models/planted/2020-01-01/service-2.json": "{}",
        ".boto": f"[Credentials]\n{key}",
        ".netrc": "machine example.org login planted password planted\n",
        ".config/gcloud/application_default_credentials.json": token,
    }
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)


@pytest.mark.fault("S16", "S27")
@pytest.mark.parametrize("unit", TALKS_TO_THE_STORE)
def test_no_sdk_reads_from_a_home(unit: str, tmp_path: Path) -> None:
    """Credentials, models, a netrc and a command to run are planted in the home: no SDK finds one."""
    marker = tmp_path / "commanded"
    plant(tmp_path / "home", marker)
    given = settings(UNITS / unit)
    environment = {
        # As systemd takes it from the user database; a line of the unit replaces it.
        "HOME": str(tmp_path / "home"),
        **dict(assignment.split("=", 1) for assignment in given["Environment"]),
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_GCE_CHECK": "true",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOK, marker],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not any(found.values()), found


@pytest.mark.parametrize("unit", TALKS_TO_THE_STORE)
def test_credential_files_are_where_only_root_writes(unit: str) -> None:
    """Profiles are read from /etc/swansong, and a drop-in may name another place."""
    given = dict(assignment.split("=", 1) for assignment in settings(UNITS / unit)["Environment"])
    names = {"AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "CLOUDSDK_CONFIG"}
    assert all(given[name].startswith("/etc/swansong/") for name in names)
    assert not names & set(settings(UNITS / unit)["UnsetEnvironment"])


@pytest.mark.fault("S8", "S27")
def test_nobody_else_writes_what_the_daemon_wrote() -> None:
    """The daemon's files are its own; restored files are the group's to read, and not to write."""
    assert settings(UNITS / "swansongd.service")["UMask"] == ["0077"]
    assert settings(UNITS / "swansong-restore@.service")["UMask"] == ["0027"]


@pytest.mark.fault("D06")
def test_the_restore_unit_considers_what_survived_in_staging() -> None:
    """By the rule of the daemon, which is not up yet when the unit runs."""
    assert "--local" in settings(UNITS / "swansong-restore@.service")["ExecStart"]


def test_systemd_shows_no_exit_code_under_a_wrong_name() -> None:
    """Of the codes that systemd has names for we use those of success, failure and wrong arguments alone."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("needs systemd-analyze")
    table = subprocess.run([tool, "exit-status"], check=True, capture_output=True, text=True).stdout
    names = {int(line.split()[1]): line.split()[0] for line in table.splitlines()[1:]}
    assert names[6] == "NOTCONFIGURED"
    used = {names[code] for code in EXIT_CODES if code in names}
    assert used == {"SUCCESS", "FAILURE", "INVALIDARGUMENT"}


def test_no_restart_where_it_would_change_nothing() -> None:
    """A wrong configuration and a newer generation end the daemon for good, and nothing else does."""
    unit = settings(UNITS / "swansongd.service")
    final = {str(error.exit_code) for error in (ConfigError, FencedError)}
    assert set(unit["RestartPreventExitStatus"]) == final
    assert unit["Restart"] == ["always"]
    assert unit["StartLimitIntervalSec"] == ["0"]


def test_systemd_keeps_what_outlives_a_restart() -> None:
    """There is room for the listening socket, the delay lock (old and new) and the live notices."""
    assert int(settings(UNITS / "swansongd.service")["FileDescriptorStoreMax"][0]) >= 4


@pytest.mark.fault("H03")
def test_shutdown_leaves_time_for_the_flush() -> None:
    """The stop outlasts the longest grace period (120 s); the delay lock leaves GCP's 30 s a rest."""
    assert span_s(settings(UNITS / "swansongd.service")["TimeoutStopSec"][0]) > 120
    delay = settings(UNITS / "logind.conf.d" / "zz-swansong.conf")["InhibitDelayMaxSec"][0]
    assert 5 < span_s(delay) < 30


def test_daemon_stops_before_what_the_flush_needs() -> None:
    """On the way down the network, names, mounts, containers and the trainer outlive the daemon."""
    after = set(settings(UNITS / "swansongd.service")["After"])
    assert {"network-online.target", "nss-lookup.target", "remote-fs.target"} <= after
    assert {"docker.service", "containerd.service", "dbus.service"} <= after
    trainer = settings(UNITS / "trainer.service.d" / "swansong.conf")
    assert trainer["Before"] == ["swansongd.service"]
    assert trainer["After"] == trainer["Requires"] == ["swansong-restore@my-run.service"]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of all that the checks read, to be broken."""
    for name in CHECKED:
        source, target = REPOSITORY / name, tmp_path / name
        target.parent.mkdir(exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return tmp_path


def run_checks(clone: Path, *, tools: list[str], ci: bool) -> subprocess.CompletedProcess[str]:
    """The checks, with nothing but ``tools`` (and coreutils) to be found."""
    found = clone / "found"
    found.mkdir()
    basics = ["bash", "cp", "dirname", "env", "find", "grep", "install", "ln", "mkdir", "mktemp"]
    for tool in [*basics, "rm", "sed", "touch", *tools]:
        path = shutil.which(tool)
        if path is None and not os.environ.get("CI"):
            pytest.skip(f"needs {tool}")
        assert path is not None, f"needed in CI: {tool}"
        (found / tool).symlink_to(path)
    return subprocess.run(
        [clone / "tests" / "check_system_files.sh"],
        env={"PATH": str(found), **({"CI": "true"} if ci else {})},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def edit(path: Path, change: Callable[[str], str]) -> None:
    before = path.read_text()
    after = change(before)
    assert after != before
    path.write_text(after)


@pytest.mark.fault("S27")
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("WatchdogSec=", "WatchdogSecs=", "Unknown key"),
        ("ProtectSystem=strict", "ProtectSystem=stritc", "swansongd.service is understood"),
        ("/bin/swansongd ", "/bin/swansongdd ", "swansongd.service is understood"),
        ("CapabilityBoundingSet=CAP_KILL\n", "", "exposure of swansongd.service"),
        ("SystemCallFilter=", "# SystemCallFilter=", "exposure of swansongd.service"),
        ("PrivateMounts=yes\n", "", "exposure of swansongd.service"),
    ],
)
def test_broken_unit_is_found(clone: Path, old: str, new: str, says: str) -> None:
    """A misspelt key, a bad value, a missing program and a weaker sandbox each fail the checks."""
    edit(clone / "systemd" / "swansongd.service", lambda text: text.replace(old, new))
    done = run_checks(clone, tools=["systemd-analyze"], ci=False)
    assert done.returncode == 1, done.stdout
    assert says in done.stdout


def test_missing_tool_fails_in_ci_and_is_named_elsewhere(clone: Path) -> None:
    """Nothing is passed over in silence."""
    local = run_checks(clone, tools=[], ci=False)
    assert local.returncode == 0, local.stdout + local.stderr
    shutil.rmtree(clone / "found")
    ci = run_checks(clone, tools=[], ci=True)
    assert ci.returncode == 1
    for tool in ("shellcheck", "systemd-analyze", "packer"):
        assert f"{tool} is not installed" in local.stdout
        assert f"{tool} is not installed" in ci.stdout
