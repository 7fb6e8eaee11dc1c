# SPDX-License-Identifier: Apache-2.0
"""The operating system: logind's delay, the unit, packages, users, permissions; the secrets of an image."""

from __future__ import annotations

import importlib
import os
import pwd
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from swansong_bucket.config.values import directory_of
from swansongd.config.config import Config
from swansongd.sources.logind import LogindError, NoLogind, read_inhibit_delay_max_s

from swansong_tools.doctor import fixes
from swansong_tools.doctor.findings import Checklist, Judgement, failure, ok, skipped, warning
from swansong_tools.doctor.installation import (
    BOOTED,
    DAEMON_USER,
    TRAINER_GROUP,
    Installation,
    account,
    group_id,
    longest_grace_s,
    tool,
    with_trainers,
)
from swansong_tools.doctor.sandbox import of_unit, systemctl
from swansong_tools.paths import exists

SHUTDOWN_S = {"gcp": 30.0}
"""Documented time from the start of a shutdown until the cloud cuts the power."""
SYSUSERS = Path("/usr/lib/sysusers.d/swansong.conf")
TMPFILES = Path("/usr/lib/tmpfiles.d/swansong.conf")

_PROVISION = fixes.PROVISION
_DROP_IN = Path("/usr/lib/systemd/logind.conf.d/zz-swansong.conf")
_OVERRIDE = Path("/etc/systemd/logind.conf.d", _DROP_IN.name)
_DELAY_S = 24.0
"""Below the 30 s after which GCP cuts the power."""
_PACKAGES = (
    "azure.identity", "blake3", "boto3", "crc32c", "google.auth", "jeepney", "requests", "rich",
    "structlog", "swansong.protocol", "watchdog",
)  # fmt: skip
_STOP_RESERVE_S = 30.0
_HOME = Path("/var/lib/swansong")
_RESTORED = _HOME / "restored"


INSTALLED = Checklist(family="host")
"""Checks of an installed unit; systemd need not run."""
RUNNING = Checklist(family="host")
IMAGE = Checklist(family="image")


def is_installed() -> bool:
    """Whether the unit that starts a daemon with this configuration is on this machine."""
    return fixes.has_unit() and fixes.unit_file().exists()


def is_run_by_systemd() -> bool:
    """Whether systemd runs here and has the daemon's unit."""
    return BOOTED.is_dir() and is_installed()


def written_directories(config: Config) -> list[Path]:
    """The directories that the daemon writes to: staging, and that of a ``file://`` store."""
    store = directory_of(config.store.url)
    return [config.staging.path, *([] if store is None else [store])]


# ------------------------------------------------------------ logind


@RUNNING.add("logind delay")
def logind_delay(vm: Installation) -> Judgement:
    """A shutdown is delayed long enough, and less than the cloud allows."""
    try:
        delay_s = read_inhibit_delay_max_s()
    except NoLogind as error:
        return skipped(f"{error}: shutdowns are not delayed")
    except LogindError as error:
        return warning(str(error), fixes.as_root("systemctl restart systemd-logind"))
    wanted_s, shutdown_s = vm.config.deadline.shutdown_delay_s, SHUTDOWN_S.get(vm.cloud)
    found = f"logind delays a shutdown for {delay_s:g} s (InhibitDelayMaxUSec)"
    if delay_s < wanted_s:
        return warning(f"{found}, but the daemon needs {wanted_s:g} s", _set_delay(wanted_s))
    if shutdown_s is not None and delay_s >= shutdown_s:
        return warning(
            f"{found}, but this cloud cuts the power after {shutdown_s:g} s", _set_delay(wanted_s)
        )
    return ok(found)


def _set_delay(wanted_s: float = 0.0) -> str:
    return fixes.then(
        fixes.write(_OVERRIDE, "[Login]", f"InhibitDelayMaxSec={max(wanted_s, _DELAY_S):g}s"),
        _restart_logind(),
    )


def _restart_logind() -> str:
    return fixes.harmless("systemctl restart systemd-logind") if BOOTED.is_dir() else ""


# ------------------------------------------------------------ the unit


@RUNNING.add("unit", applies=lambda vm: vm.by_systemd)
def unit(vm: Installation) -> Judgement:
    """The unit's time to stop, watchdog and restarts."""
    facts = of_unit()
    stop_s = longest_grace_s(vm.config, vm.cloud) + vm.config.deadline.reserve_s
    timeout_s = seconds(facts.get("TimeoutStopUSec", ""))
    if timeout_s is not None and timeout_s < stop_s:
        return failure(
            f"systemd kills the daemon {timeout_s:g} s after SIGTERM (TimeoutStopSec=), but the longest "
            f"grace period plus the reserve is {stop_s:g} s",
            fixes.drop_in("stop", f"TimeoutStopSec={stop_s + _STOP_RESERVE_S:.0f}s"),
        )
    found = f"TimeoutStopSec={_shown(timeout_s)}"
    if (kind := facts.get("Type", "notify")) != "notify":
        return warning(
            f"{found}, Type={kind}: units after the daemon start before it is ready, and a start that hangs"
            " counts as one",
            fixes.drop_in("type", "Type=notify"),
        )
    watchdog_s = seconds(facts.get("WatchdogUSec", ""))
    # Until the first start of the unit systemd shows "infinity", whatever WatchdogSec= is.
    if watchdog_s == 0.0 or (watchdog_s is None and facts.get("ActiveState") == "active"):
        return warning(
            f"{found}, no watchdog (WatchdogSec=)", fixes.drop_in("watchdog", "WatchdogSec=45s")
        )
    if (restarts := facts.get("NRestarts", "0")) not in ("", "0"):
        return warning(
            f"{found}; restarts so far: {restarts}",
            fixes.log("-p warning -n 50"),
        )
    return ok(found)


@RUNNING.add("sandbox", applies=lambda vm: vm.by_systemd)
def sandbox(vm: Installation) -> Judgement:
    """The daemon can write to staging and to a ``file://`` store."""
    facts = of_unit()
    words = facts.get("ReadWritePaths", "").split()
    return judge_paths(
        words,
        written_directories(vm.config),
        is_strict=facts.get("ProtectSystem") == "strict",
        missing=[
            word
            for word in words
            if not word.startswith("-") and not exists(Path(word.lstrip("+")))
        ],
    )


@IMAGE.add("sandbox", applies=lambda vm: vm.configured)
def sandbox_of_image(vm: Installation) -> Judgement:
    """The unit and its drop-ins let the daemon write to staging and to a ``file://`` store."""
    unit = _below(vm.root, str(fixes.unit_file()))
    texts = (unit, *sorted(_below(vm.root, str(fixes.drop_ins())).glob("*.conf")))
    lines = [line for path in texts if path.exists() for line in path.read_text().splitlines()]
    if not lines:
        return skipped("the daemon's unit is not installed")
    words: list[str] = []
    for line in lines:
        key, _, value = line.partition("=")
        if key.strip() == "ReadWritePaths":  # an empty one resets the list
            words = [*words, *value.split()] if value.split() else []
    return judge_paths(words, written_directories(vm.config), is_strict=True, missing=[])


def judge_paths(
    words: Sequence[str], written: Sequence[Path], *, is_strict: bool, missing: Sequence[str]
) -> Judgement:
    """Whether systemd can set up the unit's sandbox, and whether the daemon may write to its directories.

    Args:
        words: values of ``ReadWritePaths=``.
        written: directories that the daemon writes to.
        is_strict: whether all other paths are read-only.
        missing: required paths of ``words`` that do not exist: systemd does not start the unit then.
    """
    if missing:
        paths = [Path(word.lstrip("+")) for word in missing]
        names = " and ".join(map(str, paths))
        make = _made(paths, written)
        return failure(
            f"{names} of ReadWritePaths= does not exist: systemd cannot set up the sandbox",
            fixes.then(*make, fixes.restart()),
        )
    writable = [Path(word.lstrip("-+")) for word in words]
    refused = [each for each in written if not any(each.is_relative_to(at) for at in writable)]
    if is_strict and refused:
        make = _made([path for path in written if not exists(path)], written)
        # List all directories: this drop-in may replace one that an earlier fix wrote.
        paths_line = f"ReadWritePaths={' '.join(map(str, written))}"
        return failure(
            f"the sandbox of the unit prevents writes to {' and '.join(map(str, refused))} (ReadWritePaths=)",
            fixes.then(*make, fixes.drop_in("paths", paths_line)),
        )
    return ok(f"the sandbox allows writes to {' and '.join(map(str, written))}")


def _made(paths: Iterable[Path], written: Sequence[Path]) -> list[str]:
    """Commands that make these directories; the first one of ``written`` is staging."""
    return [fixes.directory(path, "2750" if path == written[0] else "0700") for path in paths]


_UNITS_S = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "day": 86400.0,
    "w": 604800.0, "month": 2629800.0, "y": 31557600.0,
}  # fmt: skip


def seconds(span: str) -> float | None:
    """Parse a time span of systemd (``2min 30s``); None for ``infinity`` and invalid spans."""
    total_s = 0.0
    for word in span.split():
        number = word.rstrip("abcdefghijklmnopqrstuvwxyz")
        try:
            total_s += float(number) * (_UNITS_S[word[len(number) :]] if number != word else 1e-6)
        except (ValueError, KeyError):
            return None
    return total_s if span else None


def _shown(timeout_s: float | None) -> str:
    return "infinity" if timeout_s is None else f"{timeout_s:g}s"


# ------------------------------------------------------------ the image


@INSTALLED.add("packages", fix=lambda _: _PROVISION, limit_s=60.0)
def packages(_: Installation) -> Judgement:
    """All packages can be imported."""
    missing = []
    for name in _PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        return failure(f"importing packages failed: {', '.join(missing)}", _PROVISION)
    version = ".".join(map(str, sys.version_info[:3]))
    return ok(f"all {len(_PACKAGES)} packages are installed in {sys.prefix} (Python {version})")


@INSTALLED.add("polkit")
def polkit(_: Installation) -> Judgement:
    """Polkit is installed; without it logind refuses the delay lock."""
    if shutil.which("pkaction", path="/usr/bin:/usr/local/bin:/bin"):
        return ok("polkit is installed")
    return warning(
        "polkit is not installed: logind will refuse the daemon's delay lock",
        fixes.then(
            fixes.as_root("apt-get install -y polkitd"),
            _restart_logind(),
            fixes.restart(),
        ),
    )


@INSTALLED.add("users")
def users(_: Installation) -> Judgement:
    """The user of the daemon, and the group of the trainers."""
    missing = [] if account(DAEMON_USER) else [f"user {DAEMON_USER}"]
    missing += [f"group {TRAINER_GROUP}"] if group_id(TRAINER_GROUP) is None else []
    if missing:
        make = fixes.harmless("systemd-sysusers swansong.conf")
        fix = fixes.then(make, _tmpfiles(), fixes.restart()) if SYSUSERS.exists() else _PROVISION
        verb = "do" if len(missing) > 1 else "does"
        return failure(f"{' and '.join(missing)} {verb} not exist", fix)
    return ok(f"user {DAEMON_USER} and group {TRAINER_GROUP} exist")


@INSTALLED.add("unit file")
def unit_file(_: Installation) -> Judgement:
    """The unit exists and starts at boot."""
    unit = fixes.unit()
    if not fixes.unit_file().exists():
        return failure(f"{fixes.unit_file()} is missing", _PROVISION)
    state = systemctl("is-enabled", unit.name)
    if state != "enabled":
        unmask = ""
        if state.startswith("masked"):
            runtime = "--runtime " if state == "masked-runtime" else ""
            unmask = fixes.harmless(f"systemctl unmask {runtime}{unit.name}")
        enable = fixes.harmless(f"systemctl enable {unit.name}")
        return failure(
            f"{unit.name} is {state or 'unknown'}: the daemon would not start at boot",
            fixes.then(unmask, enable, fixes.restart()),
        )
    return ok(f"{unit} is enabled")


@INSTALLED.add("unit syntax", needs=("unit file",))
def unit_syntax(_: Installation) -> Judgement:
    """Systemd accepts all units."""
    if shutil.which("systemd-analyze") is None:
        return skipped("systemd-analyze is not installed")
    units = [
        path
        for path in fixes.unit().parent.glob("swansong*")
        if path.suffix in (".service", ".socket")
    ]
    # systemd-analyze verifies a template by an instance of it, which needs no file.  The instance of
    # swansong-ready@ is another unit.
    paths = [str(path).replace("@.", "@swansongd.") for path in units]
    # The tool also reports units of other packages, and exits with 0 after most errors.
    lines = tool("systemd-analyze", "verify", "--man=no", *paths).stderr.splitlines()
    if ours := [line for line in lines if "swansong" in line]:
        return failure(f"systemd rejects settings: {'; '.join(ours)}", _PROVISION)
    return ok(f"systemd accepts all {len(units)} units")


@INSTALLED.add("logind drop-in")
def logind_drop_in(_: Installation) -> Judgement:
    """Our drop-in sets the delay of a shutdown."""
    if not _DROP_IN.exists() and not _OVERRIDE.exists():
        return warning(f"{_DROP_IN} is missing: logind delays shutdowns for 5 s only", _set_delay())
    # All files in order, each below its name.
    configuration = tool("systemd-analyze", "cat-config", "systemd/logind.conf").stdout
    file = winner = ""
    for line in configuration.splitlines():
        if re.fullmatch(r"# /\S+", line):
            file = line.removeprefix("# ")
        elif line.partition("=")[0].strip() == "InhibitDelayMaxSec":
            winner = file
    if winner not in (str(_DROP_IN), str(_OVERRIDE)):
        return warning(
            f"{winner or 'no file'} sets InhibitDelayMaxSec= of logind, not {_DROP_IN}",
            fixes.as_root(f"rm {winner}") if winner else _set_delay(),
        )
    return ok(f"{winner} sets the delay of a shutdown")


@INSTALLED.add("permissions", needs=("users",))
def permissions(vm: Installation) -> Judgement:
    """The rights of the daemon's user."""
    config, user = vm.path, account(DAEMON_USER)
    daemon = user and with_trainers(user)
    if daemon is None or (daemon.uid != os.geteuid() and os.geteuid() != 0):
        return skipped("checking the permissions of the daemon's user requires root")
    wanted: tuple[tuple[str, Path, str], ...] = (
        ("r", config, _open_up(config, "0644")),
        ("rx", Path(sys.executable), _open_up(Path(sys.executable).resolve(), "a+rx")),
        ("rwx", _RESTORED, _tmpfiles()),
    )
    for rights, path, fix in wanted:
        if not daemon.may(rights, path):
            return failure(
                f"user {daemon.name} lacks the permissions {rights} on {path}",
                fixes.then(fix, fixes.restart()),
            )
    if stat.S_IMODE(config.stat().st_mode) & stat.S_IWOTH:
        return failure(
            f"{config} is world-writable", fixes.harmless(f"chmod o-w {fixes.quoted(config)}")
        )
    if os.geteuid() == 0 and daemon.may("w", _HOME):
        return failure(
            f"user {daemon.name} may write to {_HOME} and could replace the directories in it",
            _tmpfiles(),
        )
    return ok(
        f"user {daemon.name} can read {config}, run {sys.executable} and write to {_RESTORED}, "
        f"but not to {_HOME}"
    )


def _open_up(path: Path, mode: str) -> str:
    """Make a file readable for all users, and the directories above it accessible."""
    closed = [
        place
        for place in path.parents
        if place.is_dir() and not place.stat().st_mode & stat.S_IXOTH
    ]
    enter = [fixes.as_root(f"chmod a+x {fixes.quoted(place)}") for place in reversed(closed)]
    return fixes.then(*enter, fixes.as_root(f"chmod {mode} {fixes.quoted(path)}"))


def _tmpfiles() -> str:
    """Create the daemon's directories with their owners and modes."""
    if TMPFILES.exists():
        return fixes.harmless("systemd-tmpfiles --create swansong.conf")
    return fixes.then(
        fixes.as_root(f"install -d -m 0750 -g {TRAINER_GROUP} {_HOME}"),
        fixes.directory(_RESTORED, "0750", installed=True),
        fixes.directory(_HOME / "store", "0700", installed=True),
        fixes.directory(_HOME / "staging", "2750", installed=True),
    )


# ------------------------------------------------------------ secrets and identity of an image

_IDENTITIES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_CREDENTIAL_FILES = (
    ".aws/credentials", ".aws/sso/cache/*", ".aws/cli/cache/*", ".boto",
    ".config/gcloud/application_default_credentials.json", ".config/gcloud/*.db",
    ".config/gcloud/legacy_credentials/*", ".netrc", ".pypirc", ".git-credentials",
    ".cache/huggingface/token", ".ssh/id_*[!b]",
)  # fmt: skip
"""Below a home directory; the pattern for SSH keys excludes ``.pub``."""
_OF_THE_UNIT = ("/etc/swansong/aws/credentials", "/etc/swansong/gcloud/*")
"""Credential files that the units pass to the SDKs, which read none in a home directory."""
_TEXTS = (
    "/etc/swansong/*", "/etc/swansong/*/*", "/etc/systemd/system/swansong*.d/*", "/etc/environment",
    "/etc/pip.conf", "/opt/swansong/pip.conf",
)  # fmt: skip
_SECRET = re.compile(
    rb"A[KS]IA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/\s@]+:[^/\s@]+@"
    rb"|aws_(secret_access_key|session_token)",
    re.IGNORECASE,
)
_TEXT_BYTES_MAX = 2**20


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _homes(root: Path) -> Iterable[Path]:
    homes = {user.pw_dir for user in pwd.getpwall()} - {"/", "/nonexistent"}
    return sorted(_below(root, home) for home in homes)


@IMAGE.add("secrets")
def secrets(vm: Installation) -> Judgement:
    """No credential in any home, in `/etc/swansong` or in drop-ins."""
    root = vm.root
    places = [(home, pattern) for home in _homes(root) for pattern in _CREDENTIAL_FILES]
    places += [(root, pattern.lstrip("/")) for pattern in _OF_THE_UNIT]
    found = [
        path
        for directory, pattern in places
        for path in directory.glob(pattern)
        if path.is_file() and path.stat().st_size
    ]
    for pattern in _TEXTS:
        for path in root.glob(pattern.lstrip("/")):
            if path.is_file() and path.stat().st_size <= _TEXT_BYTES_MAX:
                found += [path] * bool(_SECRET.search(path.read_bytes()))
    if found:
        names = sorted({f"/{path.relative_to(root)}" for path in found})
        return failure(
            f"the image would contain credentials: {', '.join(names)}",
            fixes.as_root(f"rm {' '.join(map(fixes.quoted, names))}"),
        )
    return ok(
        "no credentials in home directories, in the configuration or in the unit's environment"
    )


@IMAGE.add("identity")
def identity(vm: Installation) -> Judgement:
    """The image has no machine id."""
    known = [
        name
        for name in _IDENTITIES
        if (path := _below(vm.root, name)).is_file()
        and path.read_text().strip() not in ("", "uninitialized")
    ]
    if known:
        return failure(
            f"all VMs of the image would share one machine id: {', '.join(known)}",
            fixes.as_root(f"truncate --size=0 {' '.join(known)}"),
        )
    return ok("no machine id: the first boot creates one")
