# SPDX-License-Identifier: Apache-2.0
"""The promises of the units, and tests/check_system_files.sh, which fails for a unit that breaks one."""

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
from swansong_bucket.errors import EXIT_CODES, ConfigError, FencedError
from swansongd.config.config import DEFAULT_PATH
from swansongd.host import fdstore

from testkit import REPOSITORY

UNITS = REPOSITORY / "systemd"
SHUTDOWN = "swansong-shutdown.service"
STORE_CLIENTS = ["swansongd.service", "swansong-restore@.service", "swansong-prune.service"]
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
@pytest.mark.parametrize("unit", STORE_CLIENTS)
def test_no_proxy_reaches_the_metadata_client(unit: str) -> None:
    """Every variable from which requests or botocore would read a proxy is unset."""
    proxies = {
        f"{scheme}_proxy" for scheme in ("http", "https", "all", "no")
    }  # urllib.request.getproxies_environment reads them in either case
    unset = set(settings(UNITS / unit)["UnsetEnvironment"])
    assert proxies | {name.upper() for name in proxies} <= unset


@pytest.mark.fault("S16")
@pytest.mark.parametrize("unit", STORE_CLIENTS)
def test_no_variable_redirects_metadata(unit: str) -> None:
    """Every variable with which the installed SDKs move the metadata service is unset."""
    of_google = {
        value
        for name, value in vars(google.auth.environment_vars).items()
        if name.startswith("GCE_METADATA") and name.endswith(("HOST", "ROOT", "IP"))
    }
    of_botocore = {
        variable
        for _, variable, *_ in BOTOCORE_DEFAUT_SESSION_VARIABLES.values()
        if isinstance(variable, str) and "METADATA_SERVICE_ENDPOINT" in variable
    }
    assert of_google
    assert of_botocore
    unset = set(settings(UNITS / unit)["UnsetEnvironment"])
    assert of_google | of_botocore <= unset


# Prints what each SDK finds if the daemon's user has a home full of files that a trainer planted.
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
    """Write every file in a home from which an SDK reads credentials, addresses or code."""
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
@pytest.mark.parametrize("unit", STORE_CLIENTS)
def test_no_sdk_reads_from_a_home(unit: str, tmp_path: Path) -> None:
    """Credentials, models, a netrc and a command are planted in the home: no SDK finds one."""
    marker = tmp_path / "commanded"
    plant(tmp_path / "home", marker)
    given = settings(UNITS / unit)
    environment = {
        # As systemd sets it from the user database; a line of the unit overrides it.
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


@pytest.mark.parametrize("unit", STORE_CLIENTS)
def test_credential_files_are_where_only_root_writes(unit: str) -> None:
    """Profiles are read from /etc/swansong, and a drop-in may set another path."""
    given = dict(assignment.split("=", 1) for assignment in settings(UNITS / unit)["Environment"])
    names = {"AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "CLOUDSDK_CONFIG"}
    assert all(given[name].startswith("/etc/swansong/") for name in names)
    assert not names & set(settings(UNITS / unit)["UnsetEnvironment"])


@pytest.mark.fault("S8", "S27")
def test_only_the_daemon_writes_its_files() -> None:
    """Only the daemon can access its files; the group may read restored files, but not write them."""
    assert settings(UNITS / "swansongd.service")["UMask"] == ["0077"]
    assert settings(UNITS / "swansong-restore@.service")["UMask"] == ["0027"]


@pytest.mark.fault("D06")
def test_the_restore_unit_considers_sets_that_survived_in_staging() -> None:
    """The unit applies the daemon's rule, because it runs before the daemon."""
    assert "--local" in settings(UNITS / "swansong-restore@.service")["ExecStart"]


def test_systemd_shows_no_exit_code_under_a_wrong_name() -> None:
    """Only codes that mean what systemd calls them use an exit code for which systemd has a name."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("needs systemd-analyze")
    table = subprocess.run([tool, "exit-status"], check=True, capture_output=True, text=True).stdout
    names = {int(line.split()[1]): line.split()[0] for line in table.splitlines()[1:]}
    assert names[6] == "NOTCONFIGURED"
    used = {names[code] for code in EXIT_CODES if code in names}
    assert used == {"SUCCESS", "FAILURE", "INVALIDARGUMENT", "TEMPFAIL"}


def test_no_restart_after_a_permanent_error() -> None:
    """Only a wrong configuration and a newer generation stop the daemon permanently."""
    unit = settings(UNITS / "swansongd.service")
    final = {str(error.exit_code) for error in (ConfigError, FencedError)}
    assert set(unit["RestartPreventExitStatus"]) == final
    assert unit["Restart"] == ["always"]
    assert unit["StartLimitIntervalSec"] == ["0"]


def test_systemd_stores_the_descriptors_that_outlive_a_restart() -> None:
    """The store has room for each kind that the daemon stores, and for two delay locks."""
    kinds = {fdstore.LISTENER, fdstore.LOCK, fdstore.NOTICES, fdstore.GPUS}
    assert int(settings(UNITS / "swansongd.service")["FileDescriptorStoreMax"][0]) >= len(kinds) + 1


@pytest.mark.fault("H03")
def test_shutdown_leaves_time_for_the_flush() -> None:
    """The stop timeout exceeds the longest grace period (120 s); the delay lock stays below GCP's 30 s."""
    assert span_s(settings(UNITS / "swansongd.service")["TimeoutStopSec"][0]) > 120
    delay = settings(UNITS / "logind.conf.d" / "zz-swansong.conf")["InhibitDelayMaxSec"][0]
    assert 5 < span_s(delay) < 30


def test_daemon_stops_before_the_services_that_the_flush_needs() -> None:
    """During a shutdown network, names, mounts, containers and the trainer stop after the daemon."""
    daemon = settings(UNITS / "swansongd.service")
    assert {"network-online.target", "nss-lookup.target", "remote-fs.target"} <= set(
        daemon["After"]
    )
    assert "dbus.service" in daemon["After"]
    assert SHUTDOWN in daemon["Wants"]
    shutdown = settings(UNITS / SHUTDOWN)
    assert {"docker.service", "containerd.service"} <= set(shutdown["After"])
    stopped = ["swansongd.service", "swansongd@*.service"]
    assert shutdown["ExecStop"] == ["/bin/systemctl", "stop", *stopped]
    assert settings(UNITS / "trainer.service.d" / "swansong.conf")["Before"] == [SHUTDOWN]


def test_the_daemon_starts_before_the_trainer_and_waits_for_no_container() -> None:
    """The restore unit starts after the daemon, so the daemon has no order with the trainer, with Docker or
    with the unit for the shutdown: that would be a cycle, or a wait at the boot."""
    ready = settings(UNITS / "swansong-ready@.service")
    assert ready["Requires"] == ready["After"] == ["%i.service"]
    assert not ready["RemainAfterExit"]  # else the trainer would stop before the daemon
    assert "swansongd.service" in settings(UNITS / "swansong-restore@.service")["After"]
    for drop_in, unit in {
        "swansong": "swansong-ready@swansongd.service",
        "without-hooks": "swansong-restore@my-run.service",
    }.items():
        trainer = settings(UNITS / "trainer.service.d" / f"{drop_in}.conf")
        assert trainer["After"] == trainer["Requires"] == [unit]
    daemon, shutdown = settings(UNITS / "swansongd.service"), settings(UNITS / SHUTDOWN)
    assert not {SHUTDOWN, "docker.service", "containerd.service"} & set(daemon["After"])
    assert not daemon["Before"]
    assert not shutdown["Before"]
    assert "swansongd.service" not in shutdown["After"]


@pytest.mark.parametrize("name", ["swansongd", "swansong-prune", "swansong-verify"])
def test_a_job_has_the_units_of_the_first_one(name: str) -> None:
    """The template is the same file, so each setting stands once; without an instance it is the first job."""
    unit = UNITS / f"{name}.service"
    assert (UNITS / f"{name}@.service").resolve() == unit
    (path,) = {word for word in settings(unit)["ExecStart"] if word.endswith(".toml")}
    assert Path(path.replace("%i", "")) == DEFAULT_PATH
    if name != "swansongd":
        assert (UNITS / f"{name}@.timer").resolve() == UNITS / f"{name}.timer"


def test_all_daemons_share_their_first_runtime_directory() -> None:
    """It has the locks between daemons, and the second one has the socket of the job."""
    directories = settings(UNITS / "swansongd.service")["RuntimeDirectory"]
    assert directories == ["swansong", "swansong/%i"]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of all files that the checks read, for a test to break."""
    for name in CHECKED:
        source, target = REPOSITORY / name, tmp_path / name
        target.parent.mkdir(exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return tmp_path


def run_checks(clone: Path, *, tools: list[str], ci: bool) -> subprocess.CompletedProcess[str]:
    """Run the checks with only ``tools`` (and coreutils) in the PATH."""
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
    ("old", "new", "message"),
    [
        ("WatchdogSec=", "WatchdogSecs=", "Unknown key"),
        ("/bin/swansongd ", "/bin/swansongdd ", "syntax of swansongd.service"),
        ("PrivateMounts=yes\n", "", "exposure of swansongd.service"),
    ],
)
def test_broken_unit_is_found(clone: Path, old: str, new: str, message: str) -> None:
    """A misspelt key, a missing program and a slightly weaker sandbox each fail the checks."""
    edit(clone / "systemd" / "swansongd.service", lambda text: text.replace(old, new))
    done = run_checks(clone, tools=["systemd-analyze"], ci=False)
    assert done.returncode == 1, done.stdout
    assert message in done.stdout


def test_missing_tool_fails_in_ci_and_is_named_elsewhere(clone: Path) -> None:
    """No check is skipped silently."""
    local = run_checks(clone, tools=[], ci=False)
    assert local.returncode == 0, local.stdout + local.stderr
    shutil.rmtree(clone / "found")
    ci = run_checks(clone, tools=[], ci=True)
    assert ci.returncode == 1
    for tool in ("shellcheck", "systemd-analyze", "packer"):
        assert f"{tool} is not installed" in local.stdout
        assert f"{tool} is not installed" in ci.stdout
