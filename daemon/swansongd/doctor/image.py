# SPDX-License-Identifier: Apache-2.0
"""Checks of what becomes an image: nothing secret in it, no identity, and staging that can be used."""

from __future__ import annotations

import pwd
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from swansongd.config.config import Config
from swansongd.doctor import fixes, host
from swansongd.doctor.findings import Check, Judgement, failure, ok, skipped

FAMILY = "image"

_IDENTITIES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_CREDENTIAL_FILES = (
    ".aws/credentials", ".aws/sso/cache/*", ".aws/cli/cache/*", ".boto",
    ".config/gcloud/application_default_credentials.json", ".config/gcloud/*.db",
    ".config/gcloud/legacy_credentials/*", ".netrc", ".pypirc", ".git-credentials",
    ".cache/huggingface/token", ".ssh/id_*[!b]",
)  # fmt: skip
"""In a home; of the keys of ssh those that do not end in ``.pub``."""
_OF_THE_UNIT = ("/etc/swansong/aws/credentials", "/etc/swansong/gcloud/*")
"""Credential files that the units name to the SDKs; those of a home are not read."""
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
    """All of them.

    Args:
        config: None where it cannot be used.
        root: of the image.
    """
    if config is not None:
        written = host.written_directories(config)
        yield Check(family=FAMILY, name="sandbox", ask=lambda: judge_sandbox(_unit(root), written))
    yield Check(family=FAMILY, name="secrets", ask=lambda: _secrets(root))
    yield Check(family=FAMILY, name="identity", ask=lambda: _identity(root))


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _unit(root: Path) -> str:
    """The unit of the daemon with its drop-ins, as systemd puts them together."""
    unit = _below(root, str(host.UNIT))
    drop_ins = unit.with_name(f"{unit.name}.d").glob("*.conf")
    return "\n".join(path.read_text() for path in (unit, *sorted(drop_ins)) if path.exists())


def judge_sandbox(unit: str, written: Sequence[Path]) -> Judgement:
    """Whether the sandbox of the unit lets the daemon write where it has to.

    Args:
        unit: its file and drop-ins.
        written: directories that the daemon writes to.
    """
    writable: list[Path] = []
    for line in unit.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "ReadWritePaths":
            # An empty assignment takes the earlier ones back.
            paths = [Path(word.lstrip("-+")) for word in value.split()]
            writable = [*writable, *paths] if paths else []
    if not unit:
        return skipped("there is no unit")
    if refused := host.not_writable(written, writable):
        return failure(
            f"the sandbox of the unit does not let the daemon write to {refused} (ReadWritePaths=)",
            fixes.drop_in("paths", f"ReadWritePaths={' '.join(map(str, written))}"),
        )
    return ok(f"the unit may write to {' and '.join(map(str, written))}")


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
            f"credentials would go into the image: {', '.join(names)}",
            fixes.as_root(f"rm {' '.join(map(fixes.quoted, names))}"),
        )
    return ok("no credential in any home, in the configuration or in the environment of the unit")


def _identity(root: Path) -> Judgement:
    known = [
        name
        for name in _IDENTITIES
        if (path := _below(root, name)).is_file()
        and path.read_text().strip() not in ("", "uninitialized")
    ]
    if known:
        return failure(
            f"all VMs of the image would be the same machine: {', '.join(known)}",
            fixes.as_root(f"truncate --size=0 {' '.join(known)}"),
        )
    return ok("the first boot makes a machine id")
