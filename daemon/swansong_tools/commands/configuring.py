# SPDX-License-Identifier: Apache-2.0
"""Makes a configuration: the example of the daemon with other values, comments kept."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import swansongd
from swansongd.config.config import Config, parse

EXAMPLE = Path(swansongd.__file__).with_name("swansong.example.toml")


def is_example(path: Path) -> bool:
    """Whether the file is the unchanged example, which the package installs."""
    return path.is_file() and path.read_bytes() == EXAMPLE.read_bytes()


def configured(values: Mapping[str, str | list[str]]) -> tuple[str, Config]:
    """The text of a configuration with these values, and the configuration itself.

    Args:
        values: by key, such as ``store.url``.

    Raises:
        ConfigError: a value is not valid, as the daemon would report it.
    """
    lines, section, missing = [], "", dict(values)
    for line in EXAMPLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        found = re.match(r"(?:# )?([a-z_]+) = ", line)
        value = missing.pop(f"{section}.{found[1]}", None) if found else None
        # A JSON string or list of strings is valid TOML as well.
        text = json.dumps(value, ensure_ascii=False)
        lines.append(line if value is None or not found else f"{found[1]} = {text}")
    assert not missing, f"the example has no {missing}"
    text = "\n".join(lines) + "\n"
    return text, parse(tomllib.loads(text))
