# SPDX-License-Identifier: Apache-2.0
"""The section ``[notify]``: addresses, secrets, kinds and the command."""

from __future__ import annotations

from typing import Any

import pytest
from swansongd.config.config import parse
from swansongd.config.notify import NotifyConfig

from .test_config import MINIMAL, problems_of


def notify(**settings: Any) -> NotifyConfig:
    return parse({**MINIMAL, "notify": settings}).notify


def problems(**settings: Any) -> str:
    return "\n".join(problems_of({**MINIMAL, "notify": settings}))


def test_pagerduty_needs_its_key_and_no_address() -> None:
    assert notify(preset="pagerduty", token_file="credential:key").has_webhook
    assert "notify.token_file: is missing" in problems(preset="pagerduty")


@pytest.mark.parametrize("url", ["https://e.org/x", "http://127.0.0.1:80/", "http://[::1]:8/x"])
def test_addresses_that_keep_their_secret_are_accepted(url: str) -> None:
    assert notify(webhook_url=url, heartbeat_url=url).webhook_url == url


@pytest.mark.fault("W05")
@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://e.org/geheim", "would send without encryption"),
        ("http://127.0.0.1.e.org/geheim", "would send without encryption"),
        ("https://u:geheim@e.org/", "contains a user name or password"),
        ("ftp://e.org/geheim", "is not an HTTP address"),
        ("https:///geheim", "is not an HTTP address"),
        ("https://e.org/gehe im", "is not an HTTP address"),
        ("https://e.org:99999/geheim", "is not an HTTP address"),
        ("https://e.org/" + "geheim" * 1000, "is not an HTTP address"),
        (7, "is not an HTTP address"),
    ],
)
def test_an_address_that_is_refused_is_not_shown(url: object, found: str) -> None:
    """It may be the secret of a webhook, and the problem goes to the log."""
    for name in ("webhook_url", "heartbeat_url"):
        shown = problems(**{name: url})
        assert f"notify.{name}" in shown
        assert found in shown
        assert "geheim" not in shown
    if "without" in found:
        assert notify(webhook_url=url, allow_http=True).has_webhook


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"webhook_url": "https://e.org", "webhook_url_file": "/f"}, "together with"),
        ({"preset": "slack"}, "slack needs notify.webhook_url_file"),
        (
            {"preset": "slack", "webhook_url": "https://e.org", "template_file": "/t"},
            "together with notify.preset",
        ),
        ({"webhook_url_file": "https://geheim"}, "is not a secret file (got '***')"),
        ({"kinds": ["notice", "weather"]}, "'weather', which is not a kind"),
        ({"exec_on": "notice"}, "is not a list of strings"),
        ({"exec": ["replace"]}, "does not begin with the absolute path"),
        ({"exec": ["/a=b/replace"]}, "does not begin with the absolute path"),
        ({"exec": "/bin/true"}, "is not a list of strings"),
        ({"exec": ["/bin/true", "a\0b"]}, "is not a list of strings"),
        ({"exec": ["/bin/true"] * 100}, "is not a list of strings"),
        ({"heartbeat_interval_s": 0}, "is not greater than 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], found: str) -> None:
    assert found in problems(**settings)
