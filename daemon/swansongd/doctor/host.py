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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from swansongd.config import Config
from swansongd.doctor.accounts import DAEMON_USER, TRAINER_GROUP, Account, account, has_group
from swansongd.doctor.findings import Check, Judgement, failure, ok, skipped, warning
from swansongd.sources.logind import LogindError, NoLogind, read_inhibit_delay_max_s

FAMILY = "host"

SHUTDOWN_S = {"gcp": 30.0}
"""What the cloud leaves the operating system for its shutdown, where it says so."""
UNIT = Path("/etc/systemd/system/swansongd.service")

_BOOTED = Path("/run/systemd/system")
_TIMEOUT_S = 5.0
_PROVISION = "packer/provision.sh"
_DROP_IN = Path("/etc/systemd/logind.conf.d/zz-swansong.conf")
_EDIT_DELAY = f"sudoedit {_DROP_IN} && systemctl restart systemd-logind"
_EDIT_UNIT = "systemctl edit swansongd"
_PACKAGES = (
    "blake3", "boto3", "crc32c", "google.auth", "jeepney", "requests", "rich",
    "structlog", "swansong.protocol", "watchdog",
)  # fmt: skip
_HOME = Path("/var/lib/swansong")
_RESTORED = _HOME / "restored"
_TMPFILES = "systemd-tmpfiles --create swansong.conf"
_PROPERTIES = (
    "LoadState", "ActiveState", "NRestarts", "TimeoutStopUSec", "WatchdogUSec", "ReadWritePaths",
)  # fmt: skip


def is_installed() -> bool:
    """Whether the daemon's unit is on this machine."""
    return UNIT.exists()


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
    yield Check(family=FAMILY, name="unit", ask=lambda: _unit(stop_s, written), mend=_EDIT_UNIT)


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
    yield Check(family=FAMILY, name="packages", ask=_packages, mend=_PROVISION, limit_s=60.0)
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
        return warning(str(error), "systemctl status systemd-logind")
    return judge_delay(delay_s, wanted_s=wanted_s, shutdown_s=SHUTDOWN_S.get(cloud))


def judge_delay(delay_s: float, *, wanted_s: float, shutdown_s: float | None) -> Judgement:
    """Whether logind holds a shutdown up long enough, and not longer than the cloud waits.

    Args:
        shutdown_s: what the cloud leaves for a shutdown, None where it does not say.
    """
    found = f"logind holds a shutdown up for {delay_s:g} s (InhibitDelayMaxUSec)"
    if delay_s < wanted_s:
        return warning(f"{found}, {wanted_s:g} s are wanted", _EDIT_DELAY)
    if shutdown_s is not None and delay_s >= shutdown_s:
        return warning(f"{found}, this cloud cuts the power after {shutdown_s:g} s", _EDIT_DELAY)
    return ok(found)


# ------------------------------------------------------------ the unit


def _systemctl(*arguments: str) -> str:
    done = subprocess.run(  # noqa: S603 - fixed arguments
        ["systemctl", *arguments],  # noqa: S607 - wherever the distribution has it
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return done.stdout.strip()


def _unit(stop_s: float, written: Sequence[Path]) -> Judgement:
    if not _BOOTED.is_dir():
        return skipped("systemd does not run here")
    shown = _systemctl("show", "swansongd", "--property", ",".join(_PROPERTIES))
    properties = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    return judge_unit(properties, stop_s=stop_s, written=written)


def judge_unit(
    properties: Mapping[str, str], *, stop_s: float, written: Sequence[Path]
) -> Judgement:
    """Whether systemd lets the daemon work and finish.

    Args:
        properties: as ``systemctl show`` prints them.
        stop_s: the longest that the daemon may need to stop.
        written: directories that the daemon writes to.
    """
    if properties.get("LoadState") != "loaded":
        return failure("systemd knows no unit swansongd", _PROVISION)
    timeout_s = seconds(properties.get("TimeoutStopUSec", ""))
    if timeout_s is not None and timeout_s < stop_s:
        return failure(
            f"systemd kills the daemon {timeout_s:g} s after asking it to stop; the longest grace "
            f"period and the reserve are {stop_s:g} s (TimeoutStopSec=)",
            _EDIT_UNIT,
        )
    writable = [Path(word.lstrip("-+")) for word in properties.get("ReadWritePaths", "").split()]
    if writable and (refused := not_writable(written, writable)):
        return failure(
            f"the sandbox of the unit does not let the daemon write to {refused} (ReadWritePaths=)",
            _EDIT_UNIT,
        )
    state, restarts = properties.get("ActiveState", ""), properties.get("NRestarts", "0")
    found = f"{state}, {restarts} restarts, TimeoutStopSec={_shown(timeout_s)}"
    if seconds(properties.get("WatchdogUSec", "")) in (None, 0.0):
        return warning(f"{found}, no watchdog (WatchdogSec=)", _EDIT_UNIT)
    if state != "active":
        return warning(found, "systemctl start swansongd")
    if restarts not in ("", "0"):
        return warning(found, "journalctl -u swansongd -p warning -n 50")
    return ok(found)


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
        "no polkit: logind will refuse the delay lock to the daemon", "apt-get install polkitd"
    )


def judge_accounts(*, user: bool, group: bool) -> Judgement:
    """Whether the user of the daemon and the group of the trainers exist."""
    missing = [f"user {DAEMON_USER}"] * (not user) + [f"group {TRAINER_GROUP}"] * (not group)
    if missing:
        return failure(f"there is no {' and no '.join(missing)}", "systemd-sysusers swansong.conf")
    return ok(f"user {DAEMON_USER} and group {TRAINER_GROUP} exist")


def _enabled() -> Judgement:
    if not UNIT.exists():
        return failure(f"{UNIT} is missing", _PROVISION)
    state = _systemctl("is-enabled", "swansongd.service")
    if state != "enabled":
        return failure(
            f"swansongd.service is {state or 'not known'}: it would not start with the VM",
            "systemctl enable swansongd.service",
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
        return warning(f"{_DROP_IN} is missing: shutdowns wait 5 s only", _PROVISION)
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
            f"rm {winner}" if winner else _PROVISION,
        )
    return ok(f"{_DROP_IN} decides how long a shutdown waits")


def _permissions(config: Path, daemon: Account | None) -> Judgement:
    if daemon is None or (daemon.uid != os.geteuid() and os.geteuid() != 0):
        return skipped("only root can tell what the daemon's user may")
    wanted: tuple[tuple[str, Path, Callable[[Path], str]], ...] = (
        ("r", config, lambda path: f"chmod 0644 {path}"),
        ("rx", Path(sys.executable), lambda path: f"chmod a+rx {path}"),
        ("rwx", _RESTORED, lambda _: _TMPFILES),
    )
    for rights, path, mend in wanted:
        if not daemon.may(rights, path):
            return failure(f"user {daemon.name} has not the rights {rights} to {path}", mend(path))
    if stat.S_IMODE(config.stat().st_mode) & stat.S_IWOTH:
        return failure(f"anybody may write to {config}", f"chmod o-w {config}")
    if os.geteuid() == 0 and daemon.may("w", _HOME):
        return failure(
            f"user {daemon.name} may write to {_HOME}: the directories in it could be replaced",
            _TMPFILES,
        )
    return ok(
        f"user {daemon.name} can read {config}, run {sys.executable} and write to {_RESTORED}, "
        f"but not to {_HOME}"
    )
