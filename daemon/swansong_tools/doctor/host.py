# SPDX-License-Identifier: Apache-2.0
"""Checks of the operating system: logind's delay, the unit, packages, users and permissions."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from swansongd.config.config import Config
from swansongd.sources.logind import LogindError, NoLogind, read_inhibit_delay_max_s

from swansong_tools.doctor import fixes
from swansong_tools.doctor.accounts import DAEMON_USER, TRAINER_GROUP, Account, account, has_group
from swansong_tools.doctor.findings import Check, Judgement, failure, ok, skipped, warning
from swansong_tools.doctor.sandbox import properties, systemctl

FAMILY = "host"

SHUTDOWN_S = {"gcp": 30.0}
"""Documented time from the start of a shutdown until the cloud cuts the power."""
SYSUSERS = Path("/usr/lib/sysusers.d/swansong.conf")
TMPFILES = Path("/usr/lib/tmpfiles.d/swansong.conf")

_BOOTED = fixes.BOOTED
_TIMEOUT_S = 10.0
_PROVISION = fixes.PROVISION
_DROP_IN = Path("/etc/systemd/logind.conf.d/zz-swansong.conf")
_DELAY_S = 24.0
"""Below the 30 s after which GCP cuts the power."""
_PACKAGES = (
    "azure.identity", "blake3", "boto3", "crc32c", "google.auth", "jeepney", "requests", "rich",
    "structlog", "swansong.protocol", "watchdog",
)  # fmt: skip
_STOP_RESERVE_S = 30.0
_HOME = Path("/var/lib/swansong")
_RESTORED = _HOME / "restored"
_PROPERTIES = (
    "LoadState", "NRestarts", "TimeoutStopUSec", "WatchdogUSec", "ReadWritePaths", "ProtectSystem",
)  # fmt: skip


def is_installed() -> bool:
    """Whether the daemon's unit is on this machine."""
    return fixes.unit().exists()


def is_run_by_systemd() -> bool:
    """Whether systemd runs here and has the daemon's unit."""
    return _BOOTED.is_dir() and is_installed()


def checks(
    cloud: str, *, wanted_delay_s: float, stop_s: float, written: Sequence[Path]
) -> Iterator[Check]:
    """The checks of a running system.

    Args:
        wanted_delay_s: time that logind should delay a shutdown.
        stop_s: longest time that the daemon needs to stop: longest grace period plus reserve.
        written: directories that the daemon writes to, see :func:`written_directories`.
    """
    yield Check(family=FAMILY, name="logind delay", judge=lambda: _delay(cloud, wanted_delay_s))
    yield Check(family=FAMILY, name="unit", judge=lambda: _unit(stop_s))
    if is_run_by_systemd():
        yield Check(family=FAMILY, name="sandbox", judge=lambda: _sandbox(written))


def written_directories(config: Config) -> list[Path]:
    """The directories that the daemon writes to: staging, and that of a ``file://`` store."""
    store = urlsplit(config.store.url)
    paths = [unquote(store.path)] if store.scheme == "file" else []
    return [config.staging.path, *map(Path, paths)]


def not_writable(written: Iterable[Path], writable: Sequence[Path]) -> str:
    """The directories of ``written`` that no path of ``ReadWritePaths=`` contains, joined for a message."""
    refused = [
        str(path) for path in written if not any(path.is_relative_to(place) for place in writable)
    ]
    return " and ".join(refused)


def image_checks(config: Path, daemon: Account | None) -> Iterator[Check]:
    """The checks that also work during the build of an image, without a running systemd."""
    yield Check(family=FAMILY, name="packages", judge=_packages, fix=_PROVISION, limit_s=60.0)
    yield Check(family=FAMILY, name="polkit", judge=_polkit)
    yield Check(
        family=FAMILY,
        name="users",
        judge=lambda: judge_accounts(
            user=account(DAEMON_USER) is not None, group=has_group(TRAINER_GROUP)
        ),
    )
    yield Check(family=FAMILY, name="unit file", judge=_enabled)
    yield Check(family=FAMILY, name="unit syntax", judge=_syntax, needs="unit file")
    yield Check(family=FAMILY, name="logind drop-in", judge=_drop_in)
    yield Check(
        family=FAMILY,
        name="permissions",
        judge=lambda: _permissions(config, daemon),
        needs="users",
    )


# ------------------------------------------------------------ logind


def _delay(cloud: str, wanted_s: float) -> Judgement:
    try:
        delay_s = read_inhibit_delay_max_s()
    except NoLogind as error:
        return skipped(f"{error}: shutdowns are not delayed")
    except LogindError as error:
        return warning(str(error), fixes.as_root("systemctl restart systemd-logind"))
    return judge_delay(delay_s, wanted_s=wanted_s, shutdown_s=SHUTDOWN_S.get(cloud))


def judge_delay(delay_s: float, *, wanted_s: float, shutdown_s: float | None) -> Judgement:
    """Whether logind delays a shutdown long enough, and less than the cloud allows.

    Args:
        shutdown_s: time until the cloud cuts the power; None if the cloud documents none.
    """
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
        fixes.write(_DROP_IN, "[Login]", f"InhibitDelayMaxSec={max(wanted_s, _DELAY_S):g}s"),
        fixes.as_root("systemctl restart systemd-logind") if _BOOTED.is_dir() else "",
    )


# ------------------------------------------------------------ the unit


def _unit(stop_s: float) -> Judgement:
    if not _BOOTED.is_dir():
        return skipped("systemd does not run here")
    return judge_unit(properties(fixes.unit().name, _PROPERTIES), stop_s=stop_s)


def judge_unit(facts: Mapping[str, str], *, stop_s: float) -> Judgement:
    """Whether systemd gives the daemon enough time to stop, and supervises it.

    Args:
        facts: properties from ``systemctl show``.
        stop_s: longest time that the daemon needs to stop.
    """
    if facts.get("LoadState") == "not-found":
        return failure(f"the unit {fixes.unit().name} does not exist", _PROVISION)
    timeout_s = seconds(facts.get("TimeoutStopUSec", ""))
    if timeout_s is not None and timeout_s < stop_s:
        return failure(
            f"systemd kills the daemon {timeout_s:g} s after SIGTERM (TimeoutStopSec=), but the longest "
            f"grace period plus the reserve is {stop_s:g} s",
            fixes.drop_in("stop", f"TimeoutStopSec={stop_s + _STOP_RESERVE_S:.0f}s"),
        )
    found = f"TimeoutStopSec={_shown(timeout_s)}"
    if seconds(facts.get("WatchdogUSec", "")) in (None, 0.0):
        return warning(
            f"{found}, no watchdog (WatchdogSec=)", fixes.drop_in("watchdog", "WatchdogSec=45s")
        )
    if (restarts := facts.get("NRestarts", "0")) not in ("", "0"):
        return warning(
            f"{found}, {restarts} restarts so far",
            fixes.log("-p warning -n 50"),
        )
    return ok(found)


def _sandbox(written: Sequence[Path]) -> Judgement:
    facts = properties(fixes.unit().name, _PROPERTIES)
    words = facts.get("ReadWritePaths", "").split()
    return judge_paths(
        words,
        written,
        is_strict=facts.get("ProtectSystem") == "strict",
        missing=[
            word
            for word in words
            if not word.startswith("-") and not _exists(Path(word.lstrip("+")))
        ],
    )


def _exists(path: Path) -> bool:
    """Whether the path exists; True if this user may not look."""
    try:
        return path.exists()
    except PermissionError:
        return True


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
        make = [fixes.directory(path, "2750" if path == written[0] else "0700") for path in paths]
        return failure(
            f"{names} of ReadWritePaths= does not exist: systemd cannot set up the sandbox",
            fixes.then(*make, fixes.restart()),
        )
    writable = [Path(word.lstrip("-+")) for word in words]
    if is_strict and (refused := not_writable(written, writable)):
        make = [
            fixes.directory(path, "2750" if path == written[0] else "0700")
            for path in written
            if not _exists(path)
        ]
        # List all directories: this drop-in may replace one that an earlier fix wrote.
        paths_line = f"ReadWritePaths={' '.join(map(str, written))}"
        return failure(
            f"the sandbox of the unit prevents writes to {refused} (ReadWritePaths=)",
            fixes.then(*make, fixes.drop_in("paths", paths_line)),
        )
    return ok(f"the sandbox allows writes to {' and '.join(map(str, written))}")


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


def _packages() -> Judgement:
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


def _polkit() -> Judgement:
    if any(
        os.access(os.path.join(directory, "pkaction"), os.X_OK)
        for directory in ("/usr/bin", "/usr/local/bin", "/bin")
    ):
        return ok("polkit is installed")
    return warning(
        "polkit is not installed: logind will refuse the daemon's delay lock",
        fixes.then(
            fixes.as_root("apt-get install -y polkitd"),
            fixes.as_root("systemctl restart systemd-logind") if _BOOTED.is_dir() else "",
            fixes.restart(),
        ),
    )


def judge_accounts(*, user: bool, group: bool) -> Judgement:
    """Whether the daemon's user and the trainers' group exist."""
    missing = [f"user {DAEMON_USER}"] * (not user) + [f"group {TRAINER_GROUP}"] * (not group)
    if missing:
        return failure(
            f"{' and '.join(missing)} {'do' if len(missing) > 1 else 'does'} not exist",
            fixes.then(
                fixes.as_root("systemd-sysusers swansong.conf"), _tmpfiles(), fixes.restart()
            )
            if SYSUSERS.exists()
            else _PROVISION,
        )
    return ok(f"user {DAEMON_USER} and group {TRAINER_GROUP} exist")


def _enabled() -> Judgement:
    unit = fixes.unit()
    if not unit.exists():
        return failure(f"{unit} is missing", _PROVISION)
    state = systemctl("is-enabled", unit.name)
    if state != "enabled":
        unmask = ""
        if state.startswith("masked"):
            runtime = "--runtime " if state == "masked-runtime" else ""
            unmask = fixes.as_root(f"systemctl unmask {runtime}{unit.name}")
        enable = fixes.as_root(f"systemctl enable {unit.name}")
        return failure(
            f"{unit.name} is {state or 'unknown'}: the daemon would not start at boot",
            fixes.then(unmask, enable, fixes.restart()),
        )
    return ok(f"{unit} is enabled")


def _syntax() -> Judgement:
    if shutil.which("systemd-analyze") is None:
        return skipped("systemd-analyze is not installed")
    units = [
        path
        for path in fixes.unit().parent.glob("swansong*")
        if path.suffix in (".service", ".socket")
    ]
    # systemd-analyze verifies a template by an instance of it, which needs no file.
    paths = [str(path).replace("@.", "@doctor.") for path in units]
    done = subprocess.run(  # noqa: S603 - our own unit files
        ["systemd-analyze", "verify", "--man=no", *paths],  # noqa: S607
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return judge_syntax(done.stderr, units=len(units))


def judge_syntax(stderr: str, *, units: int) -> Judgement:
    """Whether ``systemd-analyze verify`` accepts our units, by its standard error.

    The tool also reports units of other packages, and exits with 0 after most errors.
    """
    ours = [line for line in stderr.splitlines() if "swansong" in line]
    if ours:
        return failure(f"systemd rejects settings: {'; '.join(ours)}", _PROVISION)
    return ok(f"systemd accepts all {units} units")


def _drop_in() -> Judgement:
    if not _DROP_IN.exists():
        return warning(f"{_DROP_IN} is missing: logind delays shutdowns for 5 s only", _set_delay())
    done = subprocess.run(
        ["systemd-analyze", "cat-config", "systemd/logind.conf"],  # noqa: S607
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return judge_drop_in(done.stdout)


def judge_drop_in(configuration: str) -> Judgement:
    """Whether our drop-in sets logind's delay.

    Args:
        configuration: output of ``systemd-analyze cat-config``: all files in order, each below its name.
    """
    file = winner = ""
    for line in configuration.splitlines():
        if re.fullmatch(r"# /\S+", line):
            file = line.removeprefix("# ")
        elif line.partition("=")[0].strip() == "InhibitDelayMaxSec":
            winner = file
    if winner != str(_DROP_IN):
        return warning(
            f"{winner or 'no file'} sets InhibitDelayMaxSec= of logind, not {_DROP_IN}",
            fixes.as_root(f"rm {winner}") if winner else _set_delay(),
        )
    return ok(f"{_DROP_IN} sets the delay of a shutdown")


def _permissions(config: Path, daemon: Account | None) -> Judgement:
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
            f"{config} is world-writable", fixes.as_root(f"chmod o-w {fixes.quoted(config)}")
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
        return fixes.as_root("systemd-tmpfiles --create swansong.conf")
    return fixes.then(
        fixes.as_root(f"install -d -m 0750 -g {TRAINER_GROUP} {_HOME}"),
        fixes.directory(_RESTORED, "0750", installed=True),
        fixes.directory(_HOME / "store", "0700", installed=True),
        fixes.directory(_HOME / "staging", "2750", installed=True),
    )
