# SPDX-License-Identifier: Apache-2.0
"""``swansong advise``: the page, the terminal, and errors of the command line."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from swansong_tools.commands import main

from testkit import REPOSITORY

PAGE = (REPOSITORY / "docs/operations/loss.md").read_text(encoding="utf-8")
PLAN = ("--size", "84GB", "--bandwidth", "2GB/s", "--notice", "30s", "--gpus", "8")


def shown(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.main(["--config", "/nonexistent", "advise", *words]) == 0
    return capfd.readouterr().out


def test_the_example_of_the_page_is_the_output(capfd: pytest.CaptureFixture[str]) -> None:
    """Each number of the worked example is recomputed; no configuration is read."""
    examples = re.findall(
        r"^```\n\$ swansong advise (.*)\n((?:.*\n)*?)\.\.\.\n```$", PAGE, re.MULTILINE
    )
    assert len(examples) == 2
    for words, output in examples:
        found = [line.rstrip() for line in shown(capfd, *shlex.split(words)).splitlines()]
        assert found[: output.count("\n")] == output.splitlines()


def test_the_figure_of_the_readme_is_the_output(capfd: pytest.CaptureFixture[str]) -> None:
    """The largest state for a notice of 30 s, by the command in the same line."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    [(size, words)] = re.findall(r"\| (\d+) GB with .*`swansong advise (.*?)`", readme)
    output = " ".join(shown(capfd, *shlex.split(words)).split())
    [found] = re.findall(r"Any one of these makes it fit: a state of ([\d.]+) GB", output)
    assert size == f"{float(found):.0f}"


def test_every_field_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """The page names each field of the JSON."""
    fields = set(json.loads(shown(capfd, *PLAN, "--json", "--steps", "1000")))
    assert fields - set(re.findall(r"`(\w+)`", PAGE)) == set()


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--price", "spot=1234.5", "--price", "on_demand=9999", "--price", "currency=EUR"),
        ("--interval", "5h", "--stall", "90s", "--steps", "999999999", "--price", "spot=1"),
    ],
)
def test_the_output_fits_into_80_columns(
    capfd: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """The verdict comes first, for large amounts as well."""
    text = shown(capfd, *PLAN, *more)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80, text
    assert text.startswith("A preemption with 30 s of notice is ")


def test_the_prices_that_are_missing_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    """With the examples in the output, no price is missing."""
    text = " ".join(shown(capfd, *PLAN, "--price", "spot=1").split())
    assert "give them as in --price on_demand=3.90 --price gb_month=0.023 --price writes=" in text
    given = re.findall(r"--price|\w+=[\d.]*\d", text.partition("Unknown prices")[2])
    assert "Unknown prices" not in shown(capfd, *PLAN, "--price", "spot=1", *given)


def test_a_checkpoint_that_does_not_fit_names_what_makes_it_fit(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The state, the rate and the notice of the sentence each suffice."""
    text = " ".join(shown(capfd, *PLAN).split())
    found = re.search(r"fit: a state of ([\d.]+) GB, ([\d.]+) GB/s to the store, ([\d.]+) s", text)
    assert found, text
    size, rate, notice = (float(number) for number in found.groups())
    for words in (
        ("--size", f"{size - 0.1:.1f}GB", "--bandwidth", "2GB/s", "--notice", "30s"),
        ("--size", "84GB", "--bandwidth", f"{rate + 0.01:.2f}GB/s", "--notice", "30s"),
        ("--size", "84GB", "--bandwidth", "2GB/s", "--notice", f"{notice + 0.1:.1f}s"),
    ):
        assert "would be SAFE" in shown(capfd, *words, "--gpus", "8")


def test_a_run_that_makes_no_progress_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """5 TB over 100 MB/s, with 50 interruptions a day."""
    words = ("--size", "5TB", "--bandwidth", "100MB/s", "--notice", "30s")
    text = shown(capfd, *words, "--interruptions-per-day", "50")
    assert "a day loses all of its training" in text
    quiet = shown(capfd, *PLAN, "--interruptions-per-day", "0")
    assert "no uncovered interruption is expected" in " ".join(quiet.split())


def test_without_a_notice_half_an_interval_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    """``--notice 0s``: without a margin, the verdict is the cost of the interval and of the best one."""
    words = ("--size", "1GB", "--bandwidth", "1GB/s", "--notice", "0s", "--interval")
    found = json.loads(shown(capfd, *words, "10m", "--json"))
    assert found["margins"] == []
    assert found["job"]["uncovered_per_day"] == found["job"]["interruptions_per_day"] == 6
    best_s = found["interval"]["recommended_s"]
    assert best_s == found["interval"]["daly_s"] < 600
    best = json.loads(shown(capfd, *words, f"{best_s}s", "--json"))
    costs = {
        each["interval"]["in_use_s"]: (day["saves_s"] + day["redone_s"]) / 864
        for each in (found, best)
        for day in [each["expected_per_day"]]
    }
    assert costs[best_s] < costs[600]
    for words in ("repeats 5.03 min of training", "every 10 min.", f"costs {costs[600]:.2g} % of"):
        assert words in found["verdict"]
    assert found["verdict"].endswith(f"the best interval, it would cost {costs[best_s]:.2g} %.")
    assert "no other interval costs less" in best["verdict"]


@pytest.mark.fault("OA02")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--size", "1GB"), "--size: needs --bandwidth and --notice"),
        (("--gpus", "8"), "--gpus: needs --size and --bandwidth and --notice"),
        ((*PLAN, "--run", "r"), "--run: excludes --size (got 'r')"),
        ((*PLAN, "--price", "spot=x"), "--price.spot: is not a price (got 'x')"),
    ],
)
def test_a_wrong_combination_is_a_clear_error(
    capfd: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    """One line, and the exit code of a wrong command line."""
    assert main.main(["advise", *words]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.fault("OA02")
@pytest.mark.parametrize(
    "words",
    [
        ("--size", "0"),
        ("--size", "9999999TiB"),
        ("--bandwidth", "0"),
        ("--bandwidth", "2"),
        ("--gpus", "0"),
        ("--steps", "9" * 30),
        ("--interruptions-per-day", "nan"),
        ("--interruptions-per-day", "1e9"),
        ("--interval", "0s"),
    ],
)
def test_a_wrong_value_is_a_clear_error(
    capfd: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """The message has the option, the value and a valid one."""
    with pytest.raises(SystemExit) as raised:
        main.main(["advise", *words])
    assert raised.value.code == 2
    error = capfd.readouterr().err
    assert f"argument {words[0]}: '{words[1]}" in error
    assert re.search(r"; give ", error)
