# SPDX-License-Identifier: Apache-2.0
"""A folder of wheels for provisioning without a package index, made from the packages of the test run."""

from __future__ import annotations

import hashlib
import re
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from testkit import REPOSITORY


def _write_wheel(wheels: Path, name: str, version: str, source: Path) -> None:
    """Write a wheel of the packages in ``source``, with the metadata that pip needs."""
    stem = f"{name.replace('-', '_')}-{version}"
    facts = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(wheels / f"{stem}-py3-none-any.whl", "w") as wheel:
        about = tomllib.loads((source / "pyproject.toml").read_text())["project"]
        facts += "".join(f"Requires-Dist: {need}\n" for need in about["dependencies"])
        scripts = "".join(f"{k} = {v}\n" for k, v in about.get("scripts", {}).items())
        wheel.writestr(f"{stem}.dist-info/entry_points.txt", f"[console_scripts]\n{scripts}")
        for package in sorted(init.parent for init in source.glob("*/__init__.py")):
            for file in sorted(package.rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    wheel.write(file, file.relative_to(source))
        wheel.writestr(f"{stem}.dist-info/METADATA", facts)
        wheel.writestr(
            f"{stem}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def _find(name: str, extras: set[str], found: dict[str, metadata.Distribution]) -> None:
    """Add the installed distribution ``name`` and all its dependencies to ``found``."""
    if name in found:
        return
    found[name] = metadata.distribution(name)
    for line in found[name].requires or []:
        need = Requirement(line)
        if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in {"", *extras}):
            _find(canonicalize_name(need.name), need.extras, found)


def _repack(wheels: Path, distribution: metadata.Distribution) -> None:
    """Write a wheel of an installed distribution, without its commands."""
    stem = f"{distribution.name.replace('-', '_')}-{distribution.version}"
    tags = set(re.findall(r"^Tag: (\S+)$", distribution.read_text("WHEEL") or "", re.MULTILINE))
    tag = next(str(tag) for tag in sys_tags() if str(tag) in tags)
    with zipfile.ZipFile(wheels / f"{stem}-{tag}.whl", "w") as wheel:
        for file in distribution.files or []:
            if not {"..", "__pycache__", "INSTALLER", "REQUESTED"} & set(file.parts):
                wheel.write(str(file.locate()), file)


def installed_dependencies() -> dict[str, metadata.Distribution]:
    """The runtime and build dependencies of our two distributions, as installed here."""
    found: dict[str, metadata.Distribution] = {}
    for folder in ("training_hooks", "daemon"):
        about = tomllib.loads((REPOSITORY / folder / "pyproject.toml").read_text())
        needs = [*about["project"]["dependencies"], *about["build-system"]["requires"]]
        for need in map(Requirement, needs):
            if need.name != "swansong":
                _find(canonicalize_name(need.name), need.extras, found)
    return found


def write_wheelhouse(wheels: Path, lock: Path) -> None:
    """Write wheels of our two distributions and of their installed dependencies, and a lock with the hashes.

    ``lock`` replaces constraints.txt: a repacked wheel has other bytes than the one on the package index.
    """
    wheels.mkdir()
    for distribution in installed_dependencies().values():
        _repack(wheels, distribution)
    lines = []
    for wheel in sorted(wheels.iterdir()):
        name, version, *_ = parse_wheel_filename(wheel.name)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{name}=={version} --hash=sha256:{digest}\n")
    lock.write_text("".join(lines))
    for folder in ("training_hooks", "daemon"):
        about = tomllib.loads((REPOSITORY / folder / "pyproject.toml").read_text())["project"]
        init = REPOSITORY / folder / about["name"] / "__init__.py"
        version = re.search(r'^__version__ = "(.*)"', init.read_text(), re.MULTILINE)
        assert version
        _write_wheel(wheels, about["name"], version[1], REPOSITORY / folder)
