# SPDX-License-Identifier: Apache-2.0
"""Each rule of ``tests/check_prose.py`` finds a sentence that breaks it and passes the corrected sentence."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "check_prose.py"
FINDINGS = runpy.run_path(str(PROGRAM))["findings"]


def rules(path: str, text: str) -> list[tuple[int, str]]:
    """Line and rule of each finding."""
    return [(line, rule) for line, rule, _ in FINDINGS(path, text)]


CALQUES = {
    "At most so many parts are in flight.": "As many parts are in flight as the limit permits.",
    "This upload is none.": "There is none; a value is None.",
    "The flush goes on.": "The flush continues.",
    "A crash in mid-flush is harmless.": "A crash during a flush is harmless.",
    "Nobody reads the file.": "No thread reads the file as the user `nobody`.",
    "A page for who operates VMs.": "A page for operators.",
    "The peer waits in vain.": "The peer times out.",
}


@pytest.mark.parametrize(("bad", "good"), CALQUES.items())
def test_calques(bad: str, good: str) -> None:
    assert rules("p.md", f"# A page\n\n{bad}\n") == [(3, "calque")]
    assert not rules("p.md", f"# A page\n\n{good}\n")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("p.md", "| key | meaning |\n| --- | --- |\n| x | it goes away |\n"),
        ("m.py", '"""A module.\n\nit goes\naway\n"""\n'),
        ("m.py", "import os\n\n# it goes\n# away\n"),
        ("m.py", "import os\n\nraise OSError('it goes away')\n"),
        ("u.sh", "set -eu\n\n# it goes\n# away\n"),
    ],
)
def test_calques_in_every_kind_of_text(path: str, text: str) -> None:
    """Also across a line break."""
    assert rules(path, text) == [(3, "calque")]


@pytest.mark.parametrize(
    ("path", "rule", "bad", "good"),
    [
        ("p.md", "opening", "What is sent is lost.\n", "Sent parts are lost. What is stored?\n"),
        ("p.md", "opening", "Who restores gets it.\n", "A restore returns it.\n"),
        ("p.md", "opening", "## What limits us\n", "## What is a notice?\n"),
        ("m.py", "opening", '"""Of the ranks, one."""\n', '"""One of the ranks."""\n'),
        ("m.py", "error", 'OSError("x is no URL")\n', 'OSError("x is not a URL")\n'),
        ("m.py", "error", 'OSError("x is no URL")\n', 'OSError("it is no longer there")\n'),
        ("m.py", "term", "clerk = 1\n", "committer = 1\n"),
        ("m.py", "term", "class Width: ...\n", "width = 1\n"),
        ("m.py", "term", "# The clerk commits.\n", "# The committer commits.\n"),
        ("m.py", "term", 'log.info("rejoin")\n', 'log.info("resume")\n'),
    ],
)
def test_other_rules(path: str, rule: str, bad: str, good: str) -> None:
    """Each rule finds a text that breaks it, in names, prose and strings, and passes the corrected one."""
    assert rules(path, bad) == [(1, rule)]
    assert not rules(path, good)


def test_length_of_a_sentence() -> None:
    """A sentence of a page has at most 40 words; tables, code and link targets do not count."""
    words = "Word" + " word" * 39 + " "
    assert rules("p.md", f"Short.\n{words}more.\n") == [(2, "sentence")]
    assert not rules("p.md", f"{words.rstrip()}.\nShort.\n")
    assert not rules("p.md", f"- {words}\n- {words}\n")
    assert not rules("p.md", f"| {words} more |\n\n```\n{words} more\n```\n\n    {words} more\n")
    assert not rules("p.md", f"`{words} more` and [a link](a%20target.md).\n")


def test_code_is_not_prose() -> None:
    """Code blocks, inline code and the text after them keep their lines."""
    page = "Run it:\n\n```\nit goes on\n```\n\n    it goes on\n\nUse `go on`.\nThe job goes on.\n"
    assert rules("p.md", page) == [(10, "calque")]


def test_the_program(tmp_path: Path) -> None:
    """It prints file, line and rule, exits with 1 for a finding, and checks untracked files too."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    for text, code in ("It is fast.\nIt goes on.\n", 1), ("It is fast.\nIt continues.\n", 0):
        (tmp_path / "page.md").write_text(text)
        done = subprocess.run(
            [sys.executable, str(PROGRAM)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (code, "")
        assert done.stdout.startswith("page.md:2: calque: 'goes on': use " if code else "")
