# SPDX-License-Identifier: Apache-2.0
"""Checks of an image: no secrets, no machine identity, and usable staging."""

from __future__ import annotations

import pwd
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from swansongd.config.config import Config

from swansong_tools.doctor import fixes, host
from swansong_tools.doctor.findings import Check, Judgement, failure, ok, skipped

FAMILY = "image"

_IDENTITIES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_CREDENTIAL_FILES = (
    ".aws/credentials", ".aws/sso/cache/*", ".aws/cli/cache/*", ".boto",
    ".config/gcloud/application_default_credentials.json", ".config/gcloud/*.db",
    ".config/gcloud/legacy_credentials/*", ".netrc", ".pypirc", ".git-credentials",
    ".cache/huggingface/token", ".ssh/id_*[!b]",
)  # fmt: skip
"""Below a home directory; the pattern for SSH keys excludes ``.pub``."""
_OF_THE_UNIT = ("/etc/swansong/aws/credentials", "/etc/swansong/gcloud/*")
"""Credential files that the units pass to the SDKs, which do not read those of a home directory."""
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


def checks(config: Config | None, root: Path = Path("/")) -> Iterator[Check]:
    """The checks of an image.

    Args:
        config: None if the configuration is not valid.
        root: root directory of the image.
    """
    if config is not None:
        written = host.written_directories(config)
        yield Check(
            family=FAMILY, name="sandbox", judge=lambda: judge_sandbox(_unit(root), written)
        )
    yield Check(family=FAMILY, name="secrets", judge=lambda: _secrets(root))
    yield Check(family=FAMILY, name="identity", judge=lambda: _identity(root))


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _unit(root: Path) -> str:
    """The daemon's unit with its drop-ins, merged in systemd's order."""
    unit = _below(root, str(fixes.unit()))
    drop_ins = unit.with_name(f"{unit.name}.d").glob("*.conf")
    return "\n".join(path.read_text() for path in (unit, *sorted(drop_ins)) if path.exists())


def judge_sandbox(unit: str, written: Sequence[Path]) -> Judgement:
    """Whether the sandbox of the unit allows the daemon to write to its directories.

    Args:
        unit: text of the unit and its drop-ins.
        written: directories that the daemon writes to.
    """
    writable: list[Path] = []
    for line in unit.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "ReadWritePaths":
            # An empty assignment resets the list.
            paths = [Path(word.lstrip("-+")) for word in value.split()]
            writable = [*writable, *paths] if paths else []
    if not unit:
        return skipped("the daemon's unit is not installed")
    if refused := host.not_writable(written, writable):
        return failure(
            f"the sandbox of the unit prevents writes to {refused} (ReadWritePaths=)",
            fixes.drop_in("paths", f"ReadWritePaths={' '.join(map(str, written))}"),
        )
    return ok(f"the sandbox allows writes to {' and '.join(map(str, written))}")


def _homes(root: Path) -> Iterable[Path]:
    homes = {user.pw_dir for user in pwd.getpwall()} - {"/", "/nonexistent"}
    return sorted(_below(root, home) for home in homes)


def _secrets(root: Path) -> Judgement:
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


def _identity(root: Path) -> Judgement:
    known = [
        name
        for name in _IDENTITIES
        if (path := _below(root, name)).is_file()
        and path.read_text().strip() not in ("", "uninitialized")
    ]
    if known:
        return failure(
            f"all VMs of the image would share one machine id: {', '.join(known)}",
            fixes.as_root(f"truncate --size=0 {' '.join(known)}"),
        )
    return ok("no machine id: the first boot creates one")
