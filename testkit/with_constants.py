# SPDX-License-Identifier: Apache-2.0
"""A program of Swansong with other constants: ``with_constants.py '{"MODULE.NAME": 0.5}' PROGRAM ARGUMENTS``.

Tests shorten the limits that no setting has.
"""

from __future__ import annotations

import importlib
import inspect
import json
import runpy
import sys


def _replace(path: str, value: float) -> None:
    """Change a constant, its copies in other modules, and the defaults of parameters with its name."""
    module, _, name = path.rpartition(".")
    home = importlib.import_module(module)
    before = getattr(home, name)
    for each in list(sys.modules.values()):
        if each.__name__.startswith("swansong") and vars(each).get(name) is before:
            setattr(each, name, value)
    for each in vars(home).values():
        for made in vars(each).values() if inspect.isclass(each) else [each]:
            defaults = getattr(made, "__kwdefaults__", None) or {}
            for parameter in defaults:
                if defaults[parameter] is before and name.lower().endswith(parameter):
                    defaults[parameter] = value


if __name__ == "__main__":
    for path, value in json.loads(sys.argv[1]).items():
        _replace(path, value)
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
