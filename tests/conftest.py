# SPDX-License-Identifier: Apache-2.0
"""Rules for all tests: CI skips nothing, each test has a time limit and one thread for arithmetic.

Hypothesis measures no speed.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings
from swansongd.observe import log

from testkit.time_limits import TimeLimits
from testkit.warm import ONE_THREAD, WarmPythons, python_of

# Before the first import of torch: with threads in each worker, small operations mostly wait for one.
os.environ.update(ONE_THREAD)

settings.register_profile(
    "machines",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # The explanation of a failing example can exceed the time limit of its test, which then shows no example.
    phases=[phase for phase in Phase if phase is not Phase.explain],
    print_blob=True,  # how to repeat a failing example
)
settings.load_profile("machines")
# A worker may be a fork of a warm Python.  Before other modules, some of which use the path when imported.
sys.executable = os.environ.setdefault("SWANSONG_TEST_PYTHON", sys.executable)
# Not on stdout: a thread that outlives its test would write into what another one reads there.
structlog.configure(logger_factory=structlog.stdlib.LoggerFactory())
gc.disable()  # until the end of the collection, of which it takes half

DOES_NOT_APPLY = "does not apply"
"""Prefix of a skip reason that is not a missing tool or right: this machine has another property."""

WARM = pytest.StashKey[WarmPythons]()
WARM_ENV = "SWANSONG_TEST_WARM"
"""Environment variable with the directory of the warm Pythons, which the workers of pytest-xdist share."""


@pytest.fixture(autouse=True)
def _log_settings() -> Iterator[None]:
    """Undo the log settings of a test: a command in this process sets those of the whole process."""
    before = structlog.get_config()
    loggers = [logging.getLogger(), *map(logging.getLogger, log.CAPPED)]
    levels = [logger.level for logger in loggers]
    handlers = loggers[0].handlers[:]
    yield
    structlog.configure(**before)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    loggers[0].handlers[:] = handlers
    logging.captureWarnings(capture=False)


@pytest.fixture
def capfd(capfd: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """As of pytest, but the thread that writes the log does not move the file's offset during a read."""
    read = capfd.readouterr

    def readouterr() -> pytest.CaptureResult[str]:
        assert log.flush(30)
        return read()

    capfd.readouterr = readouterr  # type: ignore[method-assign]
    return capfd


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(TimeLimits(), "swansong_time_limits")
    if not hasattr(config, "workerinput"):
        config.stash[WARM] = WarmPythons()
        os.environ[WARM_ENV] = config.stash[WARM].directory


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first: started last, one of them would run alone.

    Workers only take over each other's last tests, so a fixture that the first tests share is made once.
    """
    items.sort(key=lambda item: item.get_closest_marker("runs_first") is None)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking a million objects of pytest and torch again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # the workers have ended by then
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a trainer has outlived its test: it takes a part of a core until the end of all tests."""
    if WARM in session.config.stash and (left := session.config.stash[WARM].clients()):
        print("\nERROR: processes have outlived their tests:", *left, sep="\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    if WARM in config.stash:
        config.stash[WARM].close()


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork many workers from one process, as each would import torch; a few import only what they need."""
    for spec in specs if len(specs) > 2 else ():
        spec.python = python_of(config.stash[WARM].directory, "frameworks")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a test that is skipped for a missing tool or right fails."""
    report = yield
    if os.environ.get("CI") and report.skipped and call.excinfo is not None:
        reason = str(call.excinfo.value)
        if DOES_NOT_APPLY not in reason:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid}: CI skips nothing: {reason}"
    return report
