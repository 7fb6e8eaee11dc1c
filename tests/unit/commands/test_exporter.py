# SPDX-License-Identifier: Apache-2.0
"""``swansong exporter``: where its stores come from, and ``--once``."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from swansong_bucket.errors import ConfigError
from swansong_tools.commands import exporter, main
from swansong_tools.exporter.stores import parse_stores

from testkit.committed import commit, configuration, file_store


@pytest.fixture(autouse=True)
def _signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handlers of this process stay."""
    monkeypatch.setattr(exporter, "stop_on_signals", lambda _stop: None)


def stored(directory: Path, *runs: str) -> str:
    """URL of a store with a commit of each run."""
    store = file_store(directory)
    for name in runs:
        commit(store, {"a": b"12345"}, run=name)
    return store.url


def once(*arguments: str) -> int:
    return main.main(["exporter", "--once", *arguments])


def test_once_prints_the_metrics_of_all_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a configuration, from one store; the other form has some runs of several stores."""
    one, other = stored(tmp_path / "1", "a", "b"), stored(tmp_path / "2", "c", "d")
    assert once("--store", one) == 0
    text = capfd.readouterr().out
    for name in ("a", "b"):
        assert f'swansong_run_last_commit_size_bytes{{run="{name}",store="{one}"}} 5.0\n' in text
    file = tmp_path / "stores.toml"
    file.write_text(f'[[store]]\nurl = "{one}"\n[[store]]\nurl = "{other}"\nruns = ["d"]\n')
    assert once("--stores", str(file)) == 0
    text = capfd.readouterr().out
    assert {name for name in "abcd" if f'swansong_run_pins{{run="{name}"' in text} == set("abd")
    assert once("--stores", str(file), "--run", "a") == 0
    assert 'swansong_run_pins{run="b"' not in capfd.readouterr().out


def test_once_reports_a_store_that_is_not_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The metrics of the other store are printed, and the exit code is that of a store error."""
    one = stored(tmp_path / "1", "a")
    gone = f"file://{tmp_path}/gone"
    assert once("--store", one, "--store", gone) == 16
    text = capfd.readouterr().out
    assert f'swansong_exporter_store_up{{store="{one}"}} 1.0\n' in text
    assert f'swansong_exporter_store_up{{store="{gone}"}} 0.0\n' in text
    assert 'swansong_run_pins{run="a"' in text


def test_once_that_is_stopped_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the metrics would look like those of all runs."""
    monkeypatch.setattr(exporter, "stop_on_signals", threading.Event.set)
    assert once("--store", stored(tmp_path, "a")) == 9
    out, err = capfd.readouterr()
    assert out == ""
    assert "stopped" in err


def test_the_configuration_of_a_vm_is_enough(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its store and its mirror are read."""
    url, mirror = stored(tmp_path / "1", "a"), stored(tmp_path / "2", "a")
    config = configuration(tmp_path, url, run="a", mirror=mirror)
    assert main.main(["--config", str(config), "exporter", "--once"]) == 0
    assert f'swansong_run_mirror_lag_commits{{run="a",store="{url}"}} 0.0\n' in (
        capfd.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--store", "s3://aaa/p", "--region", "NO WAY"], "store[0].region"),
        (["--store", "s3://aaa/p", "--store", "s3://aaa/p/"], "s3://aaa/p occurs twice"),
        (["--store", "s3://aaa/p", "--stores", "f"], "--stores: cannot be combined"),
        (
            ["--store", "s3://aaa/p", "--store", "s3://bbb/p", "--mirror", "s3://ccc/p"],
            "--mirror: needs",
        ),
        (["--endpoint", "http://x"], "--endpoint: needs --store"),
        (["--stores", "/nonexistent/file"], "no such file"),
    ],
)
def test_a_wrong_command_line(
    arguments: list[str], problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and the problem in one line."""
    assert once(*arguments) == 2
    assert problem in capfd.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        ["--interval", "1s"],
        ["--interval", "soon"],
        ["--runs-max", "0"],
        ["--listen", "localhost:1"],
        ["--run", "a/b"],
    ],
)
def test_a_wrong_option(option: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        once("--store", "file:///x", *option)
    assert option[0] in capfd.readouterr().err


def test_the_file_of_stores_lists_every_problem() -> None:
    """Unknown names, wrong values, and wrong names of runs, of all stores at once."""
    with pytest.raises(ConfigError) as caught:
        parse_stores(
            {
                "stores": 1,
                "store": [
                    {"url": 5, "colour": "red"},
                    {"url": "s3://aaa/p", "runs": "x"},
                    {"url": "s3://bbb/p", "runs": ["a/b"], "mirror": {"url": "x"}},
                    7,
                ],
            }
        )
    found = [problem.split(":")[0] for problem in caught.value.problems]
    assert found == [
        "stores",
        "store[0].colour",
        "store[0].url",
        "store[1].runs",
        "store[2].mirror.url",
        "store[2].runs",
        "store[3]",
    ]
    for body in ({}, {"store": {}}, {"store": []}, {"store": [{"url": "s3://aaa/p"}] * 101}):
        with pytest.raises(ConfigError):
            parse_stores(body)


def test_each_option_of_a_store_reaches_it() -> None:
    """The keys of [store], and the same access for the mirror."""
    options = {
        "--store": "s3://aaa/p",
        "--mirror": "s3://bbb/p",
        "--endpoint": "http://h:1",
        "--region": "eu-west-1",
        "--profile": "me",
        "--ca-bundle": "/ca.pem",
        "--signing-key-file": "/key",
    }
    words = [word for pair in options.items() for word in pair]
    args = main.parser(["exporter"]).parse_args(["exporter", *words])
    (found,) = exporter._watched(args)
    assert found.store.signing_key_file == Path("/key")
    for access in (found.store, found.mirror):
        assert (access.endpoint, access.region) == ("http://h:1", "eu-west-1")
        assert (access.profile, access.ca_bundle) == ("me", Path("/ca.pem"))
    assert found.mirror.url == "s3://bbb/p"
