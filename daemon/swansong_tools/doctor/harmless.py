# SPDX-License-Identifier: Apache-2.0
"""The fixes that ``swansong doctor --fix`` may run: they start, create and enable, and cannot lose anything.

A fix is harmless if each of its commands is one of a few forms.  All others are left to the operator: they
delete, change an owner, open a directory, install a package, or edit the configuration.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

_SEPARATORS = {"&&", "|"}
_OPERATORS = {*_SEPARATORS, ">"}
_UNIT = re.compile(r"swansong[\w@.-]*|systemd-logind|systemd-timesyncd")
_OUR_DROP_IN = re.compile(
    r"/etc/systemd/(system/swansongd[\w@.-]*\.d|logind\.conf\.d)/(zz-)?swansong[\w-]*\.conf"
)
_REMOVED_RIGHTS = {"go-w", "o-w"}


def is_harmless(command: str) -> bool:
    """Whether each command of a fix may run without the operator's decision.

    The file system is examined: ``install -d`` sets owner and mode of a directory that exists.
    """
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        words = list(lexer)
    except ValueError:  # an open quote
        return False
    # The shell expands nothing in a command that is its own quotation: each word means itself.
    literal = " ".join(word if word in _OPERATORS else shlex.quote(word) for word in words)
    if literal.replace("> ", ">") != command:
        return False
    commands: list[list[str]] = [[]]
    for word in words:
        if word in _SEPARATORS:
            commands.append([])
        else:
            commands[-1].append(word)
    return all(_is_known(each) for each in commands)


def _is_known(words: list[str]) -> bool:
    program, *arguments = words[words[:1] == ["sudo"] :] or [""]
    judge = _PROGRAMS.get(program)
    return judge is not None and judge(arguments)


def _systemctl(arguments: list[str]) -> bool:
    if arguments == ["daemon-reload"]:
        return True
    words = [word for word in arguments if word != "--runtime"]
    is_known = len(words) == 2 and words[0] in ("enable", "unmask", "start", "restart")
    return is_known and _UNIT.fullmatch(words[1]) is not None


def _install(arguments: list[str]) -> bool:
    options, directory = arguments[:-1], Path(*arguments[-1:])
    return options[:1] == ["-d"] and (len(options) == 1 or not directory.exists())


def _tee(arguments: list[str]) -> bool:
    return arguments[1:] == [">", "/dev/null"] and _OUR_DROP_IN.fullmatch(arguments[0]) is not None


_PROGRAMS: dict[str, Callable[[list[str]], bool]] = {
    "chronyc": lambda arguments: arguments == ["makestep"],
    "chmod": lambda arguments: len(arguments) == 2 and arguments[0] in _REMOVED_RIGHTS,
    "install": _install,
    "printf": lambda arguments: arguments[:1] == ["%s\\n"] and ">" not in arguments,
    "systemctl": _systemctl,
    "systemd-sysusers": lambda arguments: arguments == ["swansong.conf"],
    "systemd-tmpfiles": lambda arguments: arguments == ["--create", "swansong.conf"],
    "tee": _tee,
    "timedatectl": lambda arguments: arguments == ["set-ntp", "true"],
    "usermod": lambda arguments: arguments[:2] == ["--append", "--groups"],
}
