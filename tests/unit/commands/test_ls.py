# SPDX-License-Identifier: Apache-2.0
"""``swansong ls``: sizes, added bytes, ages and protection in 80 columns."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from swansong_bucket.format import manifest
from swansong_bucket.format.keys import RunKeys
from swansong_tools.commands import ls, main
from swansong_tools.commands.bucket_command import Opened
from swansong_tools.units import human_age

from testkit.committed import commit, configuration, file_store
from testkit.memory_store import MemoryStore

KEYS = RunKeys("r")
WORST = {
    "generation": 99_999, "step": 9_999_999_999, "final": False, "nodes": 128, "nodes_committed": 127,
    "complete": False, "kind": "emergency", "size_bytes": 999_400_000_000, "added_bytes": 999_400_000_000,
    "created": "2030-01-01T00:00:00Z", "loss": 1.23456e-9, "health": {"loss": 1.23456e-9},
    "healthy": True, "age_s": 719_999, "problem": None, "without_ranks": None,
    "protected": ["newest", "younger than 24 h", "pin paper"],
    "pins": [{"name": "paper", "note": "\\x1b[2J 漢字 " * 9}],
}  # fmt: skip


def lines(rows: list[dict[str, Any]], columns: list[Any], width: int = 80) -> list[str]:
    """The table on a terminal of this width, without trailing blanks."""
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False).print(ls._table(rows, columns))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_added_bytes_are_those_of_the_commit_itself() -> None:
    """A commit that references all shards but one adds one shard; its size is that of all."""
    store = MemoryStore()
    first = commit(
        store,
        {"a": bytes(n % 251 for n in range(3000)), "b": bytes(n % 241 for n in range(2000))},
        step=1,
    )
    own = commit(store, {"c": b"z" * 500}, step=2, nonce="a2")
    again = replace(own, shards=first.shards + own.shards)
    store.put(KEYS.commit(own.ref, 0, 1), manifest.encode(again))
    config: Any = None
    here = Opened(config, store, KEYS, threading.Event(), connections=1)
    newer, older = ls.rows_of(here, None, is_quiet=True)
    assert (newer["size_bytes"], newer["added_bytes"]) == (5500, 500)
    assert (older["size_bytes"], older["added_bytes"]) == (5000, 5000)
    assert ls.rows_of(here, 1, is_quiet=True) == [newer]


def test_a_metric_that_no_commit_has_is_named_with_those_that_exist(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By ``--best``, and by the configuration, whose commits prune then does not keep.  Not the default."""

    def noted(*words: str, more: str = "") -> str:
        config = configuration(tmp_path, store.url, more=more)
        assert main.main(["--config", str(config), *words]) == 0
        return capfd.readouterr().err

    store = file_store(tmp_path / "store")
    commit(store, {"a": b"1"}, step=1, health={})
    assert noted("ls") == noted("prune", "--dry-run", "--quiet") == ""
    assert "--best: is the metric of no commit (got 'acc'); the commits" in noted(
        "ls", "--best", "acc"
    )
    commit(store, {"a": b"2"}, step=2, nonce="a2", loss=1.0)
    assert noted("ls", "--best", "acc") == (
        "swansong: --best: is the metric of no commit (got 'acc'); choose one of loss\n"
    )
    set_so = '[retention]\nbest_metric = "acc"\n'
    for command in (["ls"], ["prune", "--dry-run", "--quiet"]):
        assert "retention.best_metric: is the metric of no commit (got 'acc')" in noted(
            *command, more=set_so
        )
        assert noted(*command, more=set_so.replace("acc", "loss")) == ""


@pytest.mark.parametrize("metric", ["loss", "validation_accuracy_of_the_best", "漢" * 64])
@pytest.mark.parametrize("changes", [{}, {"without_ranks": "12, 13", "complete": True}])
def test_the_table_fits_80_columns(metric: str, changes: dict[str, Any]) -> None:
    """The widest values are whole, and only the reasons and the name of a metric give way."""
    row = {**WORST, "health": {metric: 1.23456e-9}, **changes}
    head, *body = lines([row, row], ls._narrow([row], metric))
    assert len(body) == 2
    assert max(map(cell_len, (head, *body))) <= 80
    for value in (
        "99999",
        "9999999999",
        "emergency",
        "yes*" if changes else "127/128",
        "8.3 d",
        "999 GB",
        "1.23456e-09",
    ):
        assert value in body[0]
    assert body[0].endswith("…")


def test_a_value_that_is_not_known_is_a_dash() -> None:
    """Such as the age in a store without times, and all facts of a damaged commit."""
    unknown = dict.fromkeys(("kind", "size_bytes", "added_bytes", "loss", "age_s"))
    row = {**WORST, **unknown, "health": {}, "problem": "damaged", "protected": [], "pins": []}
    cells = lines([row], ls._narrow([row], "loss"))[1].split()
    assert cells == ["99999", "9999999999", "-", "damaged", "-", "-", "-", "-", "-"]


def test_columns_that_say_nothing_are_left_out() -> None:
    """If all commits are whole, their reasons have the room of WHOLE."""
    whole = {**WORST, "complete": True, "nodes": 1, "nodes_committed": 1}
    assert "WHOLE" not in lines([whole], ls._narrow([whole], "loss"))[0]
    damaged = {**whole, "complete": False, "problem": "the manifest is damaged"}
    assert "damaged" in lines([damaged, whole], ls._narrow([damaged, whole], "loss"))[1]


def test_the_wide_table_has_all_reasons() -> None:
    """Control characters of a note are escaped."""
    (_, row) = lines([WORST], ls._wide("accuracy"), width=400)
    assert "newest, younger than 24 h, pin paper (" in row
    assert row.endswith(")")
    assert "127/128" in row
    assert "\x1b" not in row


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (45, "45 s"), (119, "119 s"), (200, "3.3 min"), (599, "10 min"),
     (11_000, "3.1 h"), (100_000, "28 h"), (9e6, "104 d"), (1e9, "11,574 d")],
)  # fmt: skip
def test_ages_have_two_digits(seconds: float, text: str) -> None:
    """An age fits its column."""
    assert human_age(seconds) == text
