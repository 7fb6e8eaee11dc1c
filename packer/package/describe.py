# SPDX-License-Identifier: Apache-2.0
"""Write commands, man pages, completions, licences and the list of the bundled packages.

``python packer/package/describe.py TARGET``, run by stage.sh with the Python that has the packages.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import sys
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from swansong_bucket.errors import DAEMON_EXIT_CODES, EXIT_CODES
from swansong_tools.commands import main as tools

BUILD_ONLY = {"pip", "setuptools"}
LICENCE_MAX = 60
"""Characters; a longer field is the text of the licence."""
COMPLETIONS = {
    "bash": "bash-completion/completions/swansong",
    "zsh": "zsh/vendor-completions/_swansong",
    "fish": "fish/vendor_completions.d/swansong.fish",
}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# ------------------------------------------------------------ commands and their pages


def commands(root: Path) -> None:
    """The scripts of our packages; those of all others are left out."""
    for script in metadata.distribution("swansongd").entry_points.select(group="console_scripts"):
        path = root / "opt/swansong/bin" / script.name
        text = f"import sys\n\nfrom {script.module} import {script.attr}\n\nsys.exit({script.attr}())\n"
        write(path, f"#!/opt/swansong/bin/python\n{text}")
        path.chmod(0o755)


def completions(share: Path) -> None:
    for shell, name in COMPLETIONS.items():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            tools.main(["completion", shell])
        write(share / name, printed.getvalue())


def man_page(share: Path, name: str, section: int, purpose: str, body: list[str]) -> None:
    version = metadata.version("swansongd")
    head = f'.TH {name.upper()} {section} "" "Swansong {version}"\n.SH NAME\n{name} \\- {purpose}\n'
    path = share / f"man/man{section}/{name}.{section}.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress((head + "\n".join(body) + "\n").encode(), mtime=0))


def man_pages(share: Path) -> None:
    top = tools.parser(tools.COMMANDS)
    actions = top._actions  # noqa: SLF001 - argparse has no public list of them
    (choices,) = (a.choices for a in actions if isinstance(a, argparse._SubParsersAction))  # noqa: SLF001
    body = [".SH SYNOPSIS", ".B swansong", "[options] command ...", ".SH DESCRIPTION"]
    body += [escaped(top.description or ""), ".SH OPTIONS", *options(top), ".SH COMMANDS"]
    for name, command in choices.items():
        body += [f".SS {name}", *verbatim(command.description or ""), *options(command)]
        body += verbatim(command.epilog or "")
    codes = [f"{code:<4} {text}" for code, text in EXIT_CODES.items()]
    body += [".SH EXIT STATUS", *verbatim("\n".join(codes))]
    body += [".SH SEE ALSO", ".BR swansongd (8),", ".BR swansong.toml (5)"]
    man_page(share, "swansong", 1, "checkpoints of training runs on spot VMs", body)

    codes = [f"{code:<4} {EXIT_CODES[code]}" for code in DAEMON_EXIT_CODES]
    body = [".SH SYNOPSIS", ".B swansongd", "[--config FILE] [--check] [--version]"]
    body += [
        ".SH DESCRIPTION",
        "Uploads the checkpoints of a training run before this VM is terminated.",
    ]
    body += [".SH EXIT STATUS", *verbatim("\n".join(codes))]
    body += [".SH SEE ALSO", ".BR swansong (1),", ".BR swansong.toml (5)"]
    man_page(share, "swansongd", 8, "daemon that saves checkpoints before a preemption", body)

    example = files("swansongd").joinpath("swansong.example.toml")
    body = [".SH DESCRIPTION", "All sections and keys with their defaults:"]
    body += [*verbatim(example.read_text(encoding="utf-8")), ".SH SEE ALSO", ".BR swansongd (8)"]
    man_page(share, "swansong.toml", 5, "configuration of swansongd", body)


def options(parser: argparse.ArgumentParser) -> list[str]:
    """The options and arguments of a command, with their help."""
    lines = []
    for action in parser._actions:  # noqa: SLF001
        if action.dest in ("help", "command"):
            continue
        value = action.metavar or "|".join(map(str, action.choices or ()))
        usage = " ".join(filter(None, (", ".join(action.option_strings), str(value))))
        lines += [".TP", f".B {escaped(usage)}", escaped((action.help or "").replace("%%", "%"))]
    return lines


def verbatim(text: str) -> list[str]:
    return [".PP", ".nf", *(escaped(line) for line in text.splitlines()), ".fi"]


def escaped(text: str) -> str:
    """A line of text for roff: no macro, and hyphens that can be copied."""
    line = text.replace("\\", "\\e").replace("-", "\\-").replace("\n", " ")
    return f"\\&{line}" if line.startswith((".", "'")) else line


# ------------------------------------------------------------ the bundled packages


def licence(each: metadata.Distribution) -> str:
    """The licence in the words of the package: an SPDX expression, a short text, or classifiers."""
    about = each.metadata.json
    given = str(about.get("license_expression") or about.get("license") or "")
    if given and "\n" not in given and len(given) < LICENCE_MAX:
        return given
    kinds = [
        c.rpartition(" :: ")[2] for c in about.get("classifier", ()) if c.startswith("License")
    ]
    return ", ".join(kinds) or "see its files"


def parts() -> list[metadata.Distribution]:
    """The bundled packages, ours included, by name."""
    found = [d for d in metadata.distributions() if d.name.lower() not in BUILD_ONLY]
    return sorted(found, key=lambda each: each.name.lower())


def copyright_file(found: list[metadata.Distribution]) -> str:
    minor = "{}.{}".format(*sys.version_info)
    rows = "".join(f"  {d.name} {d.version}: {licence(d)}\n" for d in found)
    return (
        "Copyright 2026 the authors of Swansong\n"
        "License: Apache License 2.0, /usr/share/common-licenses/Apache-2.0\n\n"
        f"It contains these Python packages.  Their licence texts are in\n"
        f"/opt/swansong/lib/python{minor}/site-packages/*.dist-info/.\n\n{rows}"
    )


def bill_of_materials(found: list[metadata.Distribution]) -> str:
    """The bundled packages as CycloneDX 1.5."""
    ours = metadata.version("swansongd")

    def component(each: metadata.Distribution) -> dict[str, Any]:
        name = each.name.lower().replace("_", "-")
        return {
            "type": "library",
            "name": each.name,
            "version": each.version,
            "purl": f"pkg:pypi/{name}@{each.version}",
            "licenses": [{"license": {"name": licence(each)}}],
        }

    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "swansong", "version": ours}},
        "components": [component(each) for each in found],
    }
    return json.dumps(document, indent=1) + "\n"


def main() -> None:
    root = Path(sys.argv[1])
    share = root / "usr/share"
    commands(root)
    completions(share)
    man_pages(share)
    found = parts()
    write(share / "doc/swansong/copyright", copyright_file(found))
    write(share / "doc/swansong/sbom.cdx.json", bill_of_materials(found))


if __name__ == "__main__":
    main()
