# SPDX-License-Identifier: Apache-2.0
"""Checks of the operating system: logind's delay, the unit, and what an image must hold."""

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
from swansongd.doctor import fixes
from swansongd.doctor.accounts import DAEMON_USER, TRAINER_GROUP, Account, account, has_group
from swansongd.doctor.findings import Check, Judgement, failure, ok, skipped, warning
from swansongd.doctor.sandbox import properties, systemctl
from swansongd.sources.logind import LogindError, NoLogind, read_inhibit_delay_max_s

FAMILY = "host"

SHUTDOWN_S = {"gcp": 30.0}
"""What the cloud leaves the operating system for its shutdown, where it says so."""
UNIT = Path("/etc/systemd/system/swansongd.service")
SYSUSERS = Path("/usr/lib/sysusers.d/swansong.conf")
TMPFILES = Path("/usr/lib/tmpfiles.d/swansong.conf")

_BOOTED = fixes.BOOTED
_TIMEOUT_S = 10.0
_PROVISION = fixes.PROVISION
_DROP_IN = Path("/etc/systemd/logind.conf.d/zz-swansong.conf")
_DELAY_S = 24.0
"""Below the 30 s that GCP leaves for a shutdown."""
_PACKAGES = (
    "blake3", "boto3", "crc32c", "google.auth", "jeepney", "requests", "rich",
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
    return UNIT.exists()


def is_run_by_systemd() -> bool:
    """Whether systemd runs here and has the daemon's unit."""
    return _BOOTED.is_dir() and is_installed()


def checks(
    cloud: str, *, wanted_delay_s: float, stop_s: float, written: Sequence[Path]
) -> Iterator[Check]:
    """Of a running system.

    Args:
        wanted_delay_s: how long logind should hold a shutdown up.
        stop_s: the longest that the daemon may need to stop: longest grace period and reserve.
        written: directories that the daemon writes to, see :func:`written_directories`.
    """
    yield Check(family=FAMILY, name="logind delay", ask=lambda: _delay(cloud, wanted_delay_s))
    yield Check(family=FAMILY, name="unit", ask=lambda: _unit(stop_s))
    if is_run_by_systemd():
        yield Check(family=FAMILY, name="sandbox", ask=lambda: _sandbox(written))


def written_directories(config: Config) -> list[Path]:
    """Staging, and the directory of a ``file://`` store: the sandbox of the unit must let both be written."""
    store = urlsplit(config.store.url)
    paths = [unquote(store.path)] if store.scheme == "file" else []
    return [config.staging.path, *map(Path, paths)]


def not_writable(written: Iterable[Path], writable: Sequence[Path]) -> str:
    """The directories of ``written`` that no path of ``ReadWritePaths=`` covers, for a message."""
    refused = [
        str(path) for path in written if not any(path.is_relative_to(place) for place in writable)
    ]
    return " and ".join(refused)


def image_checks(config: Path, daemon: Account | None) -> Iterator[Check]:
    """Of an image while it is baked, whether systemd runs or not."""
    yield Check(family=FAMILY, name="packages", ask=_packages, fix=_PROVISION, limit_s=60.0)
    yield Check(family=FAMILY, name="polkit", ask=_polkit)
    yield Check(
        family=FAMILY,
        name="users",
        ask=lambda: judge_accounts(
            user=account(DAEMON_USER) is not None, group=has_group(TRAINER_GROUP)
        ),
    )
    yield Check(family=FAMILY, name="unit file", ask=_enabled)
    yield Check(family=FAMILY, name="unit syntax", ask=_syntax, needs="unit file")
    yield Check(family=FAMILY, name="logind drop-in", ask=_drop_in)
    yield Check(
        family=FAMILY,
        name="permissions",
        ask=lambda: _permissions(config, daemon),
        needs="users",
    )


# ------------------------------------------------------------ logind


def _delay(cloud: str, wanted_s: float) -> Judgement:
    try:
        delay_s = read_inhibit_delay_max_s()
    except NoLogind as error:
        return skipped(f"{error}: shutdowns are not held up")
    except LogindError as error:
        return warning(str(error), fixes.as_root("systemctl restart systemd-logind"))
    return judge_delay(delay_s, wanted_s=wanted_s, shutdown_s=SHUTDOWN_S.get(cloud))


def judge_delay(delay_s: float, *, wanted_s: float, shutdown_s: float | None) -> Judgement:
    """Whether logind holds a shutdown up long enough, and not longer than the cloud waits.

    Args:
        shutdown_s: what the cloud leaves for a shutdown, None where it does not say.
    """
    found = f"logind holds a shutdown up for {delay_s:g} s (InhibitDelayMaxUSec)"
    if delay_s < wanted_s:
        return warning(f"{found}, {wanted_s:g} s are wanted", _set_delay(wanted_s))
    if shutdown_s is not None and delay_s >= shutdown_s:
        return warning(
            f"{found}, this cloud cuts the power after {shutdown_s:g} s", _set_delay(wanted_s)
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
    return judge_unit(properties(fixes.DAEMON, _PROPERTIES), stop_s=stop_s)


def judge_unit(facts: Mapping[str, str], *, stop_s: float) -> Judgement:
    """Whether systemd lets the daemon finish.

    Args:
        facts: properties as ``systemctl show`` prints them.
        stop_s: the longest that the daemon may need to stop.
    """
    if facts.get("LoadState") == "not-found":
        return failure("systemd knows no unit swansongd", _PROVISION)
    timeout_s = seconds(facts.get("TimeoutStopUSec", ""))
    if timeout_s is not None and timeout_s < stop_s:
        return failure(
            f"systemd kills the daemon {timeout_s:g} s after asking it to stop; the longest grace "
            f"period and the reserve are {stop_s:g} s (TimeoutStopSec=)",
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
            "journalctl -u swansongd -p warning -n 50 -o cat",
        )
    return ok(found)


def _sandbox(written: Sequence[Path]) -> Judgement:
    facts = properties(fixes.DAEMON, _PROPERTIES)
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
    """Whether it is there, as far as this user may look."""
    try:
        return path.exists()
    except PermissionError:
        return True


def judge_paths(
    words: Sequence[str], written: Sequence[Path], *, is_strict: bool, missing: Sequence[str]
) -> Judgement:
    """Whether the sandbox of the unit can be set up, and lets the daemon write where it has to.

    Args:
        words: of ``ReadWritePaths=``.
        written: directories that the daemon writes to.
        is_strict: nothing else can be written.
        missing: paths of ``words`` that must exist and do not: systemd then starts nothing.
    """
    if missing:
        paths = [Path(word.lstrip("+")) for word in missing]
        names = " and ".join(map(str, paths))
        make = [fixes.directory(path, "2750" if path == written[0] else "0700") for path in paths]
        return failure(
            f"{names} of ReadWritePaths= does not exist: systemd cannot set the sandbox up",
            fixes.then(*make, fixes.restart()),
        )
    writable = [Path(word.lstrip("-+")) for word in words]
    if is_strict and (refused := not_writable(written, writable)):
        make = [
            fixes.directory(path, "2750" if path == written[0] else "0700")
            for path in written
            if not _exists(path)
        ]
        # All of them: the drop-in may take the place of one that an earlier fix made.
        paths_line = f"ReadWritePaths={' '.join(map(str, written))}"
        return failure(
            f"the sandbox of the unit does not let the daemon write to {refused} (ReadWritePaths=)",
            fixes.then(*make, fixes.drop_in("paths", paths_line)),
        )
    return ok(f"the unit may write to {' and '.join(map(str, written))}")


_UNITS_S = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "day": 86400.0,
    "w": 604800.0, "month": 2629800.0, "y": 31557600.0,
}  # fmt: skip


def seconds(span: str) -> float | None:
    """A time span as systemd shows it (``2min 30s``), in seconds; None for ``infinity`` and nonsense."""
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
        return failure(f"cannot be imported: {', '.join(missing)}", _PROVISION)
    version = ".".join(map(str, sys.version_info[:3]))
    return ok(f"all {len(_PACKAGES)} can be imported by Python {version} in {sys.prefix}")


def _polkit() -> Judgement:
    if any(
        os.access(os.path.join(directory, "pkaction"), os.X_OK)
        for directory in ("/usr/bin", "/usr/local/bin", "/bin")
    ):
        return ok("polkit is installed")
    return warning(
        "no polkit: logind will refuse the delay lock to the daemon",
        fixes.then(
            fixes.as_root("apt-get install -y polkitd"),
            fixes.as_root("systemctl restart systemd-logind") if _BOOTED.is_dir() else "",
            fixes.restart(),
        ),
    )


def judge_accounts(*, user: bool, group: bool) -> Judgement:
    """Whether the user of the daemon and the group of the trainers exist."""
    missing = [f"user {DAEMON_USER}"] * (not user) + [f"group {TRAINER_GROUP}"] * (not group)
    if missing:
        return failure(
            f"there is no {' and no '.join(missing)}",
            fixes.then(
                fixes.as_root("systemd-sysusers swansong.conf"), _tmpfiles(), fixes.restart()
            )
            if SYSUSERS.exists()
            else _PROVISION,
        )
    return ok(f"user {DAEMON_USER} and group {TRAINER_GROUP} exist")


def _enabled() -> Judgement:
    if not UNIT.exists():
        return failure(f"{UNIT} is missing", _PROVISION)
    state = systemctl("is-enabled", fixes.DAEMON)
    if state != "enabled":
        unmask = ""
        if state.startswith("masked"):
            runtime = "--runtime " if state == "masked-runtime" else ""
            unmask = fixes.as_root(f"systemctl unmask {runtime}{fixes.DAEMON}")
        enable = fixes.as_root(f"systemctl enable {fixes.DAEMON}")
        return failure(
            f"swansongd.service is {state or 'not known'}: it would not start with the VM",
            fixes.then(unmask, enable, fixes.restart()),
        )
    return ok(f"{UNIT} is enabled")


def _syntax() -> Judgement:
    if shutil.which("systemd-analyze") is None:
        return skipped("systemd-analyze is not installed")
    units = [
        path for path in UNIT.parent.glob("swansong*") if path.suffix in (".service", ".socket")
    ]
    # An instance stands for its template, and needs no file of its own.
    paths = [str(path).replace("@.", "@doctor.") for path in units]
    done = subprocess.run(  # noqa: S603 - our own unit files
        ["systemd-analyze", "verify", "--man=no", *paths],  # noqa: S607
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return judge_syntax(done.stderr, units=len(units))


def judge_syntax(said: str, *, units: int) -> Judgement:
    """Whether systemd understands our units, by what ``systemd-analyze verify`` ``said``.

    It tells of other people's units as well, and exits with 0 after most of its complaints.
    """
    ours = [line for line in said.splitlines() if "swansong" in line]
    if ours:
        return failure(f"systemd does not understand all of it: {'; '.join(ours)}", _PROVISION)
    return ok(f"systemd understands all {units} units")


def _drop_in() -> Judgement:
    if not _DROP_IN.exists():
        return warning(f"{_DROP_IN} is missing: shutdowns wait 5 s only", _set_delay())
    done = subprocess.run(
        ["systemd-analyze", "cat-config", "systemd/logind.conf"],  # noqa: S607
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return judge_drop_in(done.stdout)


def judge_drop_in(configuration: str) -> Judgement:
    """Whether logind takes the delay from our drop-in, by all its files in order, each below its name."""
    file = winner = ""
    for line in configuration.splitlines():
        if re.fullmatch(r"# /\S+", line):
            file = line.removeprefix("# ")
        elif line.partition("=")[0].strip() == "InhibitDelayMaxSec":
            winner = file
    if winner != str(_DROP_IN):
        return warning(
            f"logind takes InhibitDelayMaxSec= from {winner or 'nowhere'}, not from {_DROP_IN}",
            fixes.as_root(f"rm {winner}") if winner else _set_delay(),
        )
    return ok(f"{_DROP_IN} decides how long a shutdown waits")


def _permissions(config: Path, daemon: Account | None) -> Judgement:
    if daemon is None or (daemon.uid != os.geteuid() and os.geteuid() != 0):
        return skipped("only root can tell what the daemon's user may")
    wanted: tuple[tuple[str, Path, str], ...] = (
        ("r", config, _open_up(config, "0644")),
        ("rx", Path(sys.executable), _open_up(Path(sys.executable).resolve(), "a+rx")),
        ("rwx", _RESTORED, _tmpfiles()),
    )
    for rights, path, fix in wanted:
        if not daemon.may(rights, path):
            return failure(
                f"user {daemon.name} has not the rights {rights} to {path}",
                fixes.then(fix, fixes.restart()),
            )
    if stat.S_IMODE(config.stat().st_mode) & stat.S_IWOTH:
        return failure(
            f"anybody may write to {config}", fixes.as_root(f"chmod o-w {fixes.quoted(config)}")
        )
    if os.geteuid() == 0 and daemon.may("w", _HOME):
        return failure(
            f"user {daemon.name} may write to {_HOME}: the directories in it could be replaced",
            _tmpfiles(),
        )
    return ok(
        f"user {daemon.name} can read {config}, run {sys.executable} and write to {_RESTORED}, "
        f"but not to {_HOME}"
    )


def _open_up(path: Path, mode: str) -> str:
    """Lets every user read a file, and enter the directories above it."""
    closed = [
        place
        for place in path.parents
        if place.is_dir() and not place.stat().st_mode & stat.S_IXOTH
    ]
    enter = [fixes.as_root(f"chmod a+x {fixes.quoted(place)}") for place in reversed(closed)]
    return fixes.then(*enter, fixes.as_root(f"chmod {mode} {fixes.quoted(path)}"))


def _tmpfiles() -> str:
    """Makes the directories of the daemon as they should be."""
    if TMPFILES.exists():
        return fixes.as_root("systemd-tmpfiles --create swansong.conf")
    return fixes.then(
        fixes.as_root(f"install -d -m 0750 -g {TRAINER_GROUP} {_HOME}"),
        fixes.directory(_RESTORED, "0750", installed=True),
        fixes.directory(_HOME / "store", "0700", installed=True),
        fixes.directory(_HOME / "staging", "2750", installed=True),
    )
