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
    "The VM is suspended for so long.": "It takes so long that the lease expires.",
    "At most so many parts are in flight.": "As many parts are in flight as the limit permits.",
    "It is asked so often.": "Why is it asked so often?",
    "This upload is none.": "There is none; a value is None.",
    "The epoch begins anew.": "The epoch begins again.",
    "The flush goes on.": "The flush continues.",
    "The machine goes\naway.": "The machine is terminated.",
    "A crash in mid-flush is harmless.": "A crash during a flush is harmless.",
    "The hook is kept waiting.": "The hook is held.",
    "Nobody reads the file.": "No thread reads the file as the user `nobody`.",
    "Restart it for whoever asks.": "Restart it for each client.",
    "A page for who operates VMs.": "A page for operators.",
    "It polls oftener.": "It polls more often.",
    "The peer waits in vain.": "The peer times out.",
    "Only the scan is believed.": "Only the scan counts.",
}


@pytest.mark.parametrize("kind", ["doc", "row", "docstring", "comment", "string", "shell"])
@pytest.mark.parametrize(("bad", "good"), CALQUES.items())
def test_calques(kind: str, bad: str, good: str) -> None:
    """Calques are found in every kind of text, also across a line break."""
    wrap = {
        "doc": ("p.md", lambda text: f"# A page\n\n{text}\n"),
        "row": (
            "p.md",
            lambda text: f"| key | meaning |\n| --- | --- |\n| x | {' '.join(text.split())} |\n",
        ),
        "docstring": ("m.py", lambda text: f'"""A module.\n\n{text}\n"""\n'),
        "comment": ("m.py", lambda text: "import os\n\n# " + text.replace("\n", "\n# ") + "\n"),
        "string": ("m.py", lambda text: f"import os\n\nraise OSError({text!r})\n"),
        "shell": ("u.sh", lambda text: "set -eu\n\n# " + text.replace("\n", "\n# ") + "\n"),
    }
    path, written = wrap[kind]
    assert rules(path, written(bad)) == [(3, "calque")]
    assert not rules(path, written(good))


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ("What is stored is not sent again.", "Stored parts are not sent again. What is stored?"),
        ("Who restores gets the newest commit.", "A restore returns the newest commit."),
        ("Where the disk is missing, it fails.", "If the disk is missing, it fails."),
        ("**What a script prints**: losses.", "**The output of a script**: losses."),
        ("## What limits us", "## What is a notice?"),
    ],
)
def test_opening_of_a_sentence_in_a_page(bad: str, good: str) -> None:
    """Each sentence of a page begins with the thing that acts; questions may begin otherwise."""
    assert rules("p.md", f"It is fast.\n{bad}\n") == [(2, "opening")]
    assert not rules("p.md", f"It is fast.\n{good}\n")


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ("What a flush sends.", "The bytes that a flush sends."),
        ("Whoever asks gets this.", "The answer for each client."),
        ("Of the ranks, the first.", "The first of the ranks."),
    ],
)
def test_opening_of_a_docstring(bad: str, good: str) -> None:
    """Docstrings of functions and of attributes name the thing first."""
    for text, line in ('def f() -> None:\n    """{}"""\n', 2), ('X = 1\n\n"""{}"""\n', 3):
        assert (line, "opening") in rules("m.py", text.format(bad))
        assert not rules("m.py", text.format(good))


def test_error_texts() -> None:
    """A value "is not a ...", in strings only."""
    assert rules("m.py", 'raise OSError("store.url is no URL")\n') == [(1, "error")]
    for good in ("store.url is not a URL", "it is no longer there", "there is no URL"):
        assert not rules("m.py", f"raise OSError({good!r})\n")


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ("clerk = 1\n", "committer = 1\n"),
        ("class ShardSender: ...\n", "class ShardUploader: ...\n"),
        ("def count_anew(): ...\n", "def reset_counters(): ...\n"),
        ("class Width: ...\n", "width = 1\n"),
        ("# The clerk commits.\n", "# The committer commits.\n"),
        ('log.info("rejoin")\n', 'log.info("resume")\n'),
        ("finding.mend\n", "finding.fix\n"),
        ("hello.incarnation\n", "hello.restart_id\n"),
    ],
)
def test_terms_that_the_glossary_replaces(bad: str, good: str) -> None:
    """Old terms are found in names, in prose and in log events."""
    assert {rule for _, rule in rules("m.py", bad)} <= {"term", "calque"}
    assert rules("m.py", bad)
    assert not rules("m.py", good)


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
