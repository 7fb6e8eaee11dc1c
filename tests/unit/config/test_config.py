# SPDX-License-Identifier: Apache-2.0
"""The configuration: strict, complete, with all problems in one error."""

from __future__ import annotations

import copy
import os
import re
import signal
import threading
import tomllib
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong_bucket.config.values import InvalidValue, Reader, signal_number
from swansong_bucket.errors import ConfigError
from swansong_bucket.stores.opening import open_mirror
from swansongd.config.config import METADATA_TIMEOUT_S, Config, load, parse

from testkit.reference.configuration import section_keys

EXAMPLE = resources.files("swansongd").joinpath("swansong.example.toml").read_text()
MINIMAL: dict[str, Any] = {
    "run": {"name": "r"},
    "staging": {"path": "/mnt/staging"},
    "store": {"url": "s3://bucket/prefix"},
}


def with_values(**changes: Any) -> dict[str, Any]:
    """The minimal configuration with ``section__key`` changed."""
    body = copy.deepcopy(MINIMAL)
    for name, value in changes.items():
        section, _, key = name.partition("__")
        body.setdefault(section, {})[key] = value
    return body


def problems_of(body: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(body)
    assert caught.value.exit_code == 2
    return caught.value.problems


def parsed(**changes: Any) -> Config:
    return parse(with_values(**changes))


def test_only_run_staging_and_store_are_required() -> None:
    """docs/reference has the defaults of all other keys, from the same declarations."""
    parse(MINIMAL)
    assert [problem.partition(" (")[0] for problem in problems_of({})] == [
        "run.name: is missing",
        "staging.path: is missing",
        "store.url: is missing",
    ]


def test_the_example_is_valid_with_each_key() -> None:
    """As it is, and with each commented key, as far as keys do not exclude each other."""
    parse(tomllib.loads(EXAMPLE))
    uncommented = re.sub(r"^# ([a-z_]+ = )", r"\1", EXAMPLE, flags=re.MULTILINE)
    body = tomllib.loads(uncommented)
    assert {name: tuple(table) for name, table in body.items()} == section_keys()
    body["trainer"] |= {"signal": "SIGUSR1"}
    del body["trainer"]["pid_file"]
    for key in ("webhook_url_file", "heartbeat_url_file"):
        del body["notify"][key]
    parse(body)


def test_five_mistakes_are_five_problems() -> None:
    """One error lists all problems, each with section, key, value and fix."""
    body = with_values(
        run__name="-r",
        store__url="ftp://x",
        sources__poll_intervall_s=1,
        trainer__signal="SIGKILL",
        flush__chunk_bytes="1GiB",
    )
    problems = problems_of(body)
    assert len(problems) == 5
    for problem in problems:
        assert re.fullmatch(r"[a-z]+\.[a-z_]+: .+( \(got .+\))?; .+", problem)
    text = "\n".join(problems)
    assert "sources.poll_intervall_s: unknown key; did you mean poll_interval_s?" in text
    assert "run.name: has an invalid format (got '-r')" in text
    assert "(got 'SIGKILL')" in text


UNITS = {
    "_bytes_per_s": ("200MB", 200_000_000),
    "_bytes": ("16MiB", 2**24),
    "_s": ("120s", 120.0),
}


@pytest.mark.parametrize(
    ("key", "reader"),
    [
        (f"{name}.{field.name}", field.metadata["reader"])
        for name, section in get_type_hints(Config).items()
        for field in fields(section)
    ],
)
def test_the_suffix_of_a_key_is_its_unit(key: str, reader: Reader) -> None:
    """Seconds end in ``_s``, sizes in ``_bytes``, rates in ``_bytes_per_s``; each accepts a string too."""
    unit = next((suffix for suffix in UNITS if key.endswith(suffix)), None)
    for suffix, (text, number) in UNITS.items():
        try:
            got = reader(text)
        except InvalidValue:
            got = None
        is_number = isinstance(got, (int, float))
        shares_reader = {unit, suffix} == {"_bytes", "_bytes_per_s"}
        assert is_number == (suffix == unit or shares_reader), (key, text)
        if suffix == unit:
            assert got == reader(number) == number


@pytest.mark.parametrize(
    "body",
    [
        with_values(notify__webhok_url="secret"),
        with_values(notify__token={"value": "secret"}),
        {**with_values(), "notfy": {"webhook_url": "secret"}},
        {**with_values(), "notify": "secret"},
    ],
)
def test_the_value_of_a_mistyped_name_is_not_shown(body: dict[str, Any]) -> None:
    """It may be a secret, and errors reach the journal."""
    (problem,) = problems_of(body)
    assert "secret" not in problem


def test_sections_are_as_strict_as_keys() -> None:
    """An unknown section is reported with the nearest name; a section that is not a table is refused."""
    assert problems_of(MINIMAL | {"deadlines": {}}) == [
        "deadlines: unknown section; did you mean deadline?"
    ]
    assert problems_of(MINIMAL | {"log": "json"}) == [
        "log: is not a table; start the section with [log]"
    ]


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        *(
            ("trainer__settle_s", value, seconds)
            for value, seconds in (
                *((2, 2.0), (0.5, 0.5), ("500ms", 0.5), ("5s", 5.0), ("2m", 120.0)),
                *(("1h30m", 5400.0), ("1.5s", 1.5), ("1m500ms", 60.5)),
            )
        ),
        *(
            ("flush__chunk_bytes", value, size_bytes)
            for value, size_bytes in (
                *((16_000_000, 16_000_000), ("16MiB", 2**24), ("0.1GB", 10**8)),
                *(("0.25 GiB", 2**28), ("6000000B", 6 * 10**6)),
            )
        ),
        *(
            ("flush__background_bytes_per_s", value, bytes_per_s)
            for value, bytes_per_s in (
                *((0, None), ("0MB", None), ("200MB", 200_000_000), (100_000, 100_000)),
                ("1.5MiB", 1_572_864),
            )
        ),
        *(
            ("sources__gcp_preemption_notice_s", value, notice_s)
            for value, notice_s in (("learn", None), (0, 0.0), (120, 120.0))
        ),
    ],
)
def test_numbers_and_units(key: str, value: object, read: object) -> None:
    """Numbers are seconds or bytes, and strings carry a unit; a rate of 0 is no limit."""
    section, _, name = key.partition("__")
    assert getattr(getattr(parsed(**{key: value}), section), name) == pytest.approx(read)


NO_DURATIONS = (
    *(0, -1, "", "5", "s", "5 s", "5x", "-5s", "1m1h", "5s5s", True, [], "0s"),
    *(float("inf"), float("nan")),
)
"""Without a known unit, or not above zero."""
NO_CHUNK_SIZES = (
    *("16", "16mb", "16M", "MiB", 5.5e6, True, -1, "5000000.5B", "6XiB", None),
    *("0.5MiB", "1GiB"),
)
"""Without a known unit, no whole number, or not between 1 MiB and 256 MiB."""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run__name", "a" * 101),
        ("run__name", "a/b"),
        ("run__name", "a\n"),
        ("run__name", ""),
        ("run__name", 3),
        ("staging__path", "relative"),
        ("staging__path", "/mnt/../etc"),
        ("staging__path", "/mnt/\n"),
        ("store__endpoint", "minio:9000"),
        ("store__region", "us east"),
        ("sources__cloud", "hetzner"),
        ("sources__cloud", ["aws"]),
        ("sources__metadata_url", "ftp://x"),
        ("trainer__socket", "/" + "s" * 107),
        ("trainer__signal", "sigusr1"),
        ("trainer__signal", "SIGRTMIN+60"),
        ("trainer__signal", 10),
        ("trainer__unit", "train"),
        ("trainer__users", "me"),
        ("trainer__users", [True]),
        ("trainer__users", [-1]),
        ("trainer__users", ["../x"]),
        ("flush__background_bytes_per_s", -1),
        ("flush__background_bytes_per_s", 99_999),
        ("flush__background_bytes_per_s", "fast"),
        ("flush__background_bytes_per_s", True),
        ("store__addressing", "both"),
        ("store__profile", ""),
        ("store__ca_bundle", "ca.pem"),
        ("flush__connections", 0),
        ("flush__connections", 8.0),
        ("flush__connections", True),
        ("log__format", "xml"),
        ("log__level", "trace"),
        *(("trainer__settle_s", value) for value in NO_DURATIONS),
        *(("flush__chunk_bytes", value) for value in NO_CHUNK_SIZES),
        *(
            ("sources__gcp_preemption_notice_s", value)
            for value in (30, True, False, "120", None, -1, [120])
        ),
    ],
)
def test_an_invalid_value_is_one_problem(key: str, value: object) -> None:
    """The error names section and key of the value, and no other key."""
    (problem,) = problems_of(with_values(**{key: value}))
    assert problem.startswith(key.replace("__", ".") + ": ")
    assert "(got " in problem


@pytest.mark.fault("S22")
@pytest.mark.parametrize(
    ("url", "rule"),
    [
        (3, "does not start with s3://, gs://, az:// or file:///"),
        ("", "does not start with"),
        ("ftp://x", "does not start with"),
        ("/mnt/store", "does not start with"),
        ("s3://[bad", "is not a URL"),
        ("s3://", "lacks a bucket name of 3 to 222 lowercase letters"),
        ("gs://My-bucket/x", "lacks a bucket name of 3 to 222 lowercase letters"),
        ("s3:/bucket/x", "lacks a bucket name"),
        ("s3://bucket/../other", "contains .."),
        ("s3://bucket?x=1", "has a query or a fragment"),
        ("az://account", "lacks an account and a container of lowercase letters"),
        ("file://host/x", "lacks an absolute path"),
        ("file:///", "lacks an absolute path"),
        ("file://relative", "lacks an absolute path"),
        ("file:///x/%2e%2e/y", "contains .."),
        ("file:///x%00", "has a character that is not printable"),
    ],
)
def test_an_invalid_url_of_a_store_names_the_rule_that_it_breaks(url: object, rule: str) -> None:
    """The error has the key, the rule, the given value and the fix."""
    for key in ("store.url", "mirror.url"):
        (problem,) = problems_of(with_values(**{key.replace(".", "__"): url}))
        assert problem.startswith(f"{key}: {rule}")
        assert re.search(rf" \(got {re.escape(repr(url))}\); give ", problem)


def test_a_credential_in_a_url_is_refused_and_not_repeated() -> None:
    """The error does not repeat the credential, so that it cannot reach a log."""
    for key in ("store__url", "store__endpoint"):
        scheme = "s3" if key == "store__url" else "https"
        (problem,) = problems_of(with_values(**{key: f"{scheme}://id:hunter2@bucket/x"}))
        assert "hunter2" not in problem
        assert "credential" in problem


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("SIGUSR1", signal.SIGUSR1),
        ("SIGRTMIN+3", signal.SIGRTMIN + 3),
        ("SIGRTMAX-1", signal.SIGRTMAX - 1),
    ],
)
def test_signals(name: str, number: int) -> None:
    """The allowed signals, by their numbers on this machine."""
    got = parsed(trainer__signal=name, trainer__unit="train.service")
    assert signal_number(got.trainer.signal) == int(number)


HOOKLESS = {"trainer__signal": "SIGUSR1", "trainer__pid_file": "/run/train.pid"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"deadline__reserve_s": 25}, "deadline.reserve_s: "),
        ({"deadline__reserve_s": 10, "deadline__sigterm_grace_s": 10}, "deadline.reserve_s: "),
        ({"deadline__assumed_grace_s": 6}, "sources.poll_interval_s: "),
        ({"store__url": "file:///mnt/staging/store"}, "store.url: "),
        ({"store__url": "file:///mnt/staging"}, "store.url: "),
        # A mirror that is the store itself would protect nothing.
        ({"mirror__url": "s3://bucket/prefix/"}, "mirror.url: is the URL of the store"),
        (
            {"store__url": "gs://bucket", "mirror__url": "gs://bucket/"},
            "mirror.url: is the URL of the store",
        ),
        # The store would list the mirror's objects as its own.
        (
            {"store__url": "file:///mnt/a%62", "mirror__url": "file:///mnt/ab/mirror"},
            "mirror.url: overlaps store.url (got 'file:///mnt/ab/mirror'); choose",
        ),
        # A store that locks nothing must not seem to.
        *(
            ({"store__url": url, "store__lock_days": 7}, "store.lock_days: needs S3 or GCS (got 7)")
            for url in ("file:///mnt/store", "az://acct/box")
        ),
        # Without pid_file and unit there is no process to signal; with both the process is ambiguous.
        ({"trainer__signal": "SIGUSR1"}, "trainer.signal: needs exactly one process"),
        (HOOKLESS | {"trainer__unit": "x.service"}, "trainer.signal: needs exactly one process"),
        # A trainer without hooks would resume at once, from a checkpoint that is not the last one.
        (
            HOOKLESS | {"run__handover": True},
            "run.handover: needs a trainer with hooks, which waits (got 'true'); remove the key, or ",
        ),
    ],
)
def test_impossible_combinations(changes: dict[str, Any], problem: str) -> None:
    """Values that are each valid are refused if they contradict each other, or leave no time or no room."""
    for found in (problems := problems_of(with_values(**changes))):
        assert found.startswith(problem)
    assert problems


@given(poll_s=st.floats(0.01, 100), reserve_s=st.floats(0.01, 100), grace_s=st.floats(0.01, 100))
def test_accepted_timing_leaves_time(poll_s: float, reserve_s: float, grace_s: float) -> None:
    """Accepted timing leaves time for polling, one request and the reserve within the grace period."""
    body = with_values(
        sources__poll_interval_s=poll_s,
        deadline__reserve_s=reserve_s,
        deadline__assumed_grace_s=grace_s,
        deadline__sigterm_grace_s=1000,
    )
    fits = poll_s + METADATA_TIMEOUT_S + reserve_s < grace_s
    try:
        parse(body)
    except ConfigError:
        assert not fits
    else:
        assert fits


def test_other_problems_are_reported_beside_an_invalid_timing_value() -> None:
    """An invalid value is not compared with other values."""
    problems = problems_of(with_values(deadline__reserve_s=-1, log__level="loud"))
    assert [problem.partition(":")[0] for problem in problems] == [
        "deadline.reserve_s",
        "log.level",
    ]


def test_load(tmp_path: Path) -> None:
    """A file that is missing, not UTF-8 or not TOML is an error with its position."""
    path = tmp_path / "swansong.toml"
    with pytest.raises(ConfigError, match="no such file") as caught:
        load(path)
    assert caught.value.hint
    path.write_text(EXAMPLE)
    assert load(path).run.name == "my-run"
    path.write_text('[run]\nname = "x\n')
    with pytest.raises(ConfigError, match="line 2, column"):
        load(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(path)
    with pytest.raises(ConfigError, match="failed: Is a directory") as caught:
        load(tmp_path)
    assert "--config" in caught.value.hint


@pytest.mark.parametrize("other", ["", "/below", "/.."])
@pytest.mark.parametrize("place", ["real", "link"])
@pytest.mark.parametrize("key", ["store__url", "mirror__url"])
def test_a_store_and_staging_do_not_overlap(
    key: str, place: str, other: str, tmp_path: Path
) -> None:
    """Neither directory is the other one, lies below it or above it, also through a symbolic link."""
    real = tmp_path / "re al"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    directory = os.path.normpath(f"{tmp_path}/{'link' if place == 'link' else 're al'}{other}")
    url = f"file://{quote(directory)}"
    (problem,) = problems_of(with_values(staging__path=str(real), **{key: url}))
    assert problem == (
        f"{key.replace('__', '.')}: overlaps staging.path (got {url!r:.80}); "
        "choose separate directories; symbolic links are followed"
    )
    parsed(staging__path=str(real), **{key: f"file://{quote(str(tmp_path))}/re%20al2"})


@pytest.mark.parametrize("key", ["staging__path", "store__url", "mirror__url"])
def test_a_file_in_place_of_a_directory_is_refused(key: str, tmp_path: Path) -> None:
    """The error names key, value and fix; a directory that is not there yet may be mounted later."""
    file = tmp_path / "file"
    value = str(file) if key == "staging__path" else f"file://{file}"
    parsed(**{key: value})
    file.touch()
    assert problems_of(with_values(**{key: value})) == [
        f"{key.replace('__', '.')}: is a file (got {value!r:.80}); choose a directory"
    ]


def test_a_file_server_that_does_not_answer_blocks_no_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The configuration is read although resolving the store's path does not return."""
    is_over = threading.Event()
    monkeypatch.setattr(os.path, "realpath", lambda path: is_over.wait() and path)
    monkeypatch.setattr("swansongd.config.config.RESOLVE_TIMEOUT_S", 0.01)
    try:
        (problem,) = problems_of(with_values(store__url="file:///mnt/staging/store"))
        assert problem.startswith("store.url: overlaps staging.path")
    finally:
        is_over.set()


def test_a_mirror_has_the_options_of_a_store() -> None:
    """Without mirror.url there is no mirror; with it, another region, profile and rate apply."""
    assert open_mirror(parsed().mirror) is None
    config = parsed(
        mirror__url="s3://other/prefix",
        mirror__region="eu-west-1",
        mirror__background_bytes_per_s="50MB",
    )
    assert config.mirror.background_bytes_per_s == 50_000_000
    mirror = open_mirror(config.mirror)
    assert mirror is not None
    assert mirror.url == "s3://other/prefix"


def test_the_error_of_a_mirror_names_its_key(tmp_path: Path) -> None:
    """An option that only the backend can check is reported under the section of the mirror."""
    missing = str(tmp_path / "no.pem")
    config = parsed(mirror__url="s3://other/prefix", mirror__ca_bundle=missing)
    with pytest.raises(ConfigError, match=r"^mirror\.ca_bundle: is not a file"):
        open_mirror(config.mirror)


def test_each_job_has_its_own_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a file for swansongd@JOB.service has another default, and a configured socket stays."""
    minimal = '[run]\nname = "r"\n[staging]\npath = "/s"\n[store]\nurl = "s3://bucket/p"\n'
    monkeypatch.setattr("swansongd.config.config.DEFAULT_PATH", tmp_path / "swansong.toml")
    for name, socket in (
        ("swansong.toml", "/run/swansong/trainer.sock"),
        ("second/swansong.toml", "/run/swansong/second/trainer.sock"),
        ("second/../second/swansong.toml", "/run/swansong/second/trainer.sock"),
        ("second/other.toml", "/run/swansong/trainer.sock"),
        ("second/deeper/swansong.toml", "/run/swansong/trainer.sock"),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(minimal)
        assert str(load(path).trainer.socket) == socket
        path.write_text(f'{minimal}[trainer]\nsocket = "/run/x.sock"\n')
        assert str(load(path).trainer.socket) == "/run/x.sock"
    path.write_text(f"trainer = 5\n{minimal}")
    with pytest.raises(ConfigError, match="trainer: is not a table"):
        load(path)


# ---------------------------------------------------------------- metrics


@pytest.mark.parametrize(
    ("value", "host", "port", "is_local"),
    [
        ("127.0.0.1:9469", "127.0.0.1", 9469, True),
        ("[::1]:9469", "::1", 9469, True),
        ("0.0.0.0:9469", "0.0.0.0", 9469, False),
        ("[2001:db8::1]:1", "2001:db8::1", 1, False),
    ],
)
def test_metrics_listen_at_an_ip_address(
    value: str, host: str, port: int, *, is_local: bool
) -> None:
    """An address that other machines reach is allowed, and known as such."""
    listen = parsed(metrics__listen=value).metrics.listen
    assert listen is not None
    assert (listen.host, listen.port, listen.is_local, str(listen)) == (host, port, is_local, value)


def test_metrics_listen_at_a_unix_socket() -> None:
    """The path is absolute, and not the one of trainers."""
    listen = parsed(metrics__listen="unix:/run/swansong/metrics.sock").metrics.listen
    assert listen is not None
    assert (listen.path, listen.is_local) == (Path("/run/swansong/metrics.sock"), True)
    (problem,) = problems_of(with_values(metrics__listen="unix:/run/swansong/trainer.sock"))
    assert problem.startswith("metrics.listen: is the socket of trainers")


@pytest.mark.parametrize(
    "value",
    [":9469", "9469", 9469, "localhost:9469", "::1:9469", "[127.0.0.1]:9469", "127.0.0.1:65536",
     "127.0.0.1:-1", "127.0.0.1:٣", "unix:metrics.sock", "http://127.0.0.1:9469", ""],
)  # fmt: skip
def test_an_address_that_is_not_exact_is_refused(value: object) -> None:
    """The error names the key, the value and a valid one."""
    (problem,) = problems_of(with_values(metrics__listen=value))
    assert problem.startswith("metrics.listen: ")
    assert f"(got {value!r})" in problem
    assert "give " in problem


@pytest.mark.parametrize("value", ["/var/lib/x/swansong.txt", "swansong.prom", "/var/lib/x/.prom"])
def test_a_textfile_that_node_exporter_ignores_is_refused(value: str) -> None:
    (problem,) = problems_of(with_values(metrics__textfile=value))
    assert problem.startswith("metrics.textfile: ")
    assert parsed(metrics__textfile="/x/a.prom").metrics.textfile == Path("/x/a.prom")
