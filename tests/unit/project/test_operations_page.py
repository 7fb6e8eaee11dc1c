# SPDX-License-Identifier: Apache-2.0
"""The pages in docs/operations match the code: phases, verdicts, columns, sources, limits, names."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module

import pytest
from swansong_bucket.model import PEER_SOURCE, Health, Severity, Verdict
from swansong_tools.commands import ls
from swansongd import sources
from swansongd.config.config import METADATA_TIMEOUT_S
from swansongd.core import notices, state
from swansongd.observe.status import DaemonStatus
from swansongd.sources import gcp, metadata

from testkit import REPOSITORY
from testkit.reference.configuration import section_keys

SOURCES = sorted((REPOSITORY / "daemon").glob("*/**/*.py"))
PAGES = {
    path.stem: path.read_text() for path in sorted((REPOSITORY / "docs/operations").glob("*.md"))
}
OF_THE_KERNEL = {"Read-only file system"}
OTHER_NAMES = {"credential_process", "log_dropped", "nvme_card", "runbook_url"}
"""Names of AWS, of the writer thread's log event, of disks and of Prometheus."""


# ---------------------------------------------------------------- reading the pages


def section(page: str, title: str) -> str:
    """The text below the heading, up to the next heading of the same depth or above."""
    found = re.search(
        rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,2}} |\Z)", PAGES[page], re.MULTILINE | re.DOTALL
    )
    assert found, f"{page}.md has no section {title}"
    text = found[2]
    return text.partition("\n### ")[0] if found[1] == "###" else text


def rows(text: str) -> Iterator[list[str]]:
    """Cells of the rows of all tables, without heads and rules."""
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        is_head = following.startswith("| ---")
        if line.startswith("|") and not line.startswith("| ---") and not is_head:
            yield [cell.strip() for cell in line.split("|")[1:-1]]


def words(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def first_cells(text: str) -> list[str]:
    """The words in backticks in the first column of all tables."""
    return [word for cells in rows(text) for word in words(cells[0])]


# ---------------------------------------------------------------- reading the code


@cache
def code() -> str:
    """The text of the code, in which strings over several lines are one string."""
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in SOURCES))


def strings(node: ast.AST) -> set[str]:
    """All values of an argument that is a constant or a choice of constants."""
    match node:
        case ast.Constant(value=str(value)):
            return {value}
        case ast.IfExp():
            return strings(node.body) | strings(node.orelse)
        case _:
            return set()


def phases() -> set[str]:
    """The phases of the timeline of an evacuation."""
    texts = [text for path in SOURCES if "mark(" in (text := path.read_text())]
    return {
        phase
        for call in (node for text in texts for node in ast.walk(ast.parse(text)))
        if isinstance(call, ast.Call) and re.search(r"\b_?mark$", ast.unparse(call.func))
        for argument in call.args
        for given in (argument.args if isinstance(argument, ast.Call) else (argument,))
        for phase in strings(given)
    }


def notice_sources() -> set[str]:
    """The names of all sources of notices."""
    found = {PEER_SOURCE}
    for info in pkgutil.iter_modules(sources.__path__):
        module = import_module(f"swansongd.sources.{info.name}")
        found |= {
            vars(module)[name] for name in ("NAME", "MANUAL", "DRILL") if name in vars(module)
        }
        classes = [item for item in vars(module).values() if inspect.isclass(item)]
        found |= {
            item.name
            for item in classes
            if isinstance(getattr(item, "name", None), str) and item.__module__ == module.__name__
        }
    return found


def unit(name: str, file: str = "systemd/swansongd.service") -> str:
    """The value of a setting in a file of systemd."""
    found = re.search(rf"^{name}=(.*)$", (REPOSITORY / file).read_text(), re.MULTILINE)
    assert found, f"{file} has no {name}="
    return found[1]


# ---------------------------------------------------------------- tables and limits


def columns_of_ls() -> set[str]:
    """With ``--wide`` and without."""
    shown = (*ls._narrow([{"complete": False}], "loss"), *ls._wide("loss"))
    return {column.head for column in shown}


@pytest.mark.parametrize(
    ("page", "title", "values"),
    [
        # Functions: every worker imports this file, and only one needs the syntax trees of the code.
        ("monitoring", "Phases", phases),
        ("runbook", "Verdicts", lambda: set(Verdict)),
        ("notices", "Health of a source", lambda: set(Health)),
        ("notices", "Sources", notice_sources),
        ("restore", "ls", columns_of_ls),
    ],
)
def test_a_table_explains_every_value(
    page: str, title: str, values: Callable[[], set[str]]
) -> None:
    """Each value has a row, and each row a value."""
    cells = [cells[0] for cells in rows(section(page, title))]
    explained = [name.strip("`") for cell in cells for name in re.split(r", (?=`|[A-Z])", cell)]
    assert sorted(explained) == sorted(values())


STATED = [
    ("notices", f"A time above {state.SCHEDULED_LEAD_S:.0f} s is a scheduled end"),
    ("notices", f'"When the time is near" is {state.SCHEDULED_LEAD_S:.0f} s before'),
    ("notices", f"one every {notices.EVERY_S:.0f} s"),
    ("notices", f"at most one extra checkpoint every {notices.PRECAUTION_EVERY_S / 60:.0f} min"),
    ("notices", f"Up to {notices.BY_HAND_MAX} notices by hand"),
    ("notices", f"has outlived them by {notices.OUTLIVED_S:.0f} s"),
    ("notices", f"still runs {gcp.LEARN_AFTER_S:.0f} s after the notice"),
    ("shutdown", f"{unit('TimeoutStopSec').removesuffix('s')} s, and longer"),
    ("shutdown", f"restarts the daemon {unit('RestartSec').removesuffix('s')} s after"),
    ("shutdown", f"has not reported for {unit('WatchdogSec').removesuffix('s')} s"),
]


@pytest.mark.parametrize(("page", "statement"), STATED)
def test_numbers_are_those_of_the_code(page: str, statement: str) -> None:
    """Each number that is a constant of the code or of a unit."""
    assert statement in PAGES[page]


def test_the_delay_of_logind_is_that_of_its_drop_in() -> None:
    """The page and the drop-in have the same delay."""
    delay = unit("InhibitDelayMaxSec", "systemd/logind.conf.d/zz-swansong.conf")
    assert f"| {delay.removesuffix('s')} s at most |" in PAGES["shutdown"]
    assert METADATA_TIMEOUT_S > metadata.TIMEOUT_S


# ---------------------------------------------------------------- names, messages and links


def test_every_quoted_message_is_of_the_code() -> None:
    """An operator who searches the pages for an error message finds its present words."""
    quoted = {
        word
        for word in first_cells(PAGES["runbook"])
        if " " in word and not word.startswith(("swansong ", "systemctl "))
    } - OF_THE_KERNEL
    assert len(quoted) >= 5
    assert {word for word in quoted if word not in code()} == set()


def test_every_name_in_the_pages_exists() -> None:
    """Keys of the configuration, and names with an underscore, are of the code."""
    keys = {f"{name}.{key}" for name, known in section_keys().items() for key in known}
    known = {
        *re.findall(r"\b(\w+)=", code()),
        *re.findall(r'"(\w+)"', code()),
        *OTHER_NAMES,
        *(severity.name.lower() for severity in Severity),
        *(field.name for field in dataclasses.fields(DaemonStatus)),
    }
    for page, text in PAGES.items():
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        named = {word.removesuffix("[]") for word in words(prose)}
        of_sections = rf"({'|'.join(section_keys())})\.[a-z_]+"
        assert {word for word in named if re.fullmatch(of_sections, word)} <= keys, page
        assert {word for word in named if re.fullmatch(r"[a-z]+(_[a-z]+)+", word)} <= known, page


def test_every_make_target_exists() -> None:
    """A command of the pages is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    texts = [*PAGES.values(), (REPOSITORY / "packer/README.md").read_text()]
    named = {
        name for text in texts for name in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
    }
    assert len(named) >= 6
    assert named <= targets


def test_the_index_names_every_page() -> None:
    """No page of docs is hidden."""
    docs = REPOSITORY / "docs"
    index = (docs / "README.md").read_text()
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()
