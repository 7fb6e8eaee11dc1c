# SPDX-License-Identifier: Apache-2.0
"""Azure: signatures of an account key, credentials of the environment, URLs and options."""

from __future__ import annotations

import base64
import hmac

import pytest
from swansong_bucket.config.sections import StoreConfig
from swansong_bucket.config.values import InvalidValue, store_url
from swansong_bucket.errors import ConfigError, Permanent
from swansong_bucket.stores.azure.auth import Sas, SharedKey, from_environment
from swansong_bucket.stores.base import account_container_and_prefix
from swansong_bucket.stores.opening import open_store

KEY = b"a key of sixty-four bytes"
ENCODED = base64.b64encode(KEY).decode()

# From "Authorize with Shared Key" in Microsoft's reference of the storage services.
DOCUMENTED = (
    "GET\n\n\n\n\n\n\n\n\n\n\n\nx-ms-date:Fri, 26 Jun 2015 23:39:12 GMT\nx-ms-version:2015-02-21\n"
    "/myaccount/mycontainer\ncomp:metadata\nrestype:container\ntimeout:20"
)


def test_the_documented_string_is_signed() -> None:
    """The signature is the HMAC of the string in the reference; parameters are sorted."""
    authorization = SharedKey("myaccount", KEY).authorization(
        "GET",
        "/mycontainer",
        {"timeout": "20", "restype": "container", "comp": "metadata"},
        {"x-ms-version": "2015-02-21", "x-ms-date": "Fri, 26 Jun 2015 23:39:12 GMT"},
    )
    digest = hmac.digest(KEY, DOCUMENTED.encode(), "sha256")
    assert authorization == f"SharedKey myaccount:{base64.b64encode(digest).decode()}"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No variable of Azure is set."""
    for name in ("CONNECTION_STRING", "KEY", "SAS_TOKEN"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("KEY", ENCODED, SharedKey("acct", KEY)),
        ("SAS_TOKEN", "?sv=2021-12-02&sig=a%2Bb", Sas("sv=2021-12-02&sig=a%2Bb")),
        (
            "CONNECTION_STRING",
            f"DefaultEndpointsProtocol=https;AccountName=acct;AccountKey={ENCODED};",
            SharedKey("acct", KEY),
        ),
        ("CONNECTION_STRING", "SharedAccessSignature=sv=1&sig=a%3D", Sas("sv=1&sig=a%3D")),
    ],
)
def test_variables_of_the_azure_cli(
    environment: pytest.MonkeyPatch, name: str, value: str, found: SharedKey | Sas
) -> None:
    """Each variable gives its credentials, and no secret is in their text."""
    assert from_environment("acct") is None
    environment.setenv(f"AZURE_STORAGE_{name}", value)
    assert from_environment("acct") == found
    assert ENCODED not in repr(found)
    assert repr(KEY) not in repr(found)
    assert "sig=" not in repr(found)


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("KEY", "secret!", "az storage account keys list --account-name acct"),
        ("SAS_TOKEN", "sv=2021&secret", "generate-sas"),
        ("SAS_TOKEN", "sig=a b&secret", "generate-sas"),
        ("CONNECTION_STRING", "AccountName=other;AccountKey=secret", "connection string of acct"),
        ("CONNECTION_STRING", "AccountName=acct;secret", "show-connection-string --name acct"),
        ("CONNECTION_STRING", "AccountName=acct;AccountKey=secret!", "keys list"),
    ],
)
def test_an_invalid_variable(
    environment: pytest.MonkeyPatch, name: str, value: str, fix: str
) -> None:
    """The error names the variable and the fix, and does not contain the secret."""
    environment.setenv(f"AZURE_STORAGE_{name}", value)
    with pytest.raises(Permanent) as caught:
        from_environment("acct")
    assert f"AZURE_STORAGE_{name}" in str(caught.value)
    assert fix in caught.value.hint
    assert "secret" not in caught.value.line()


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("az://acct/box", ("acct", "box", "")),
        ("az://acct/my-box/a/b/", ("acct", "my-box", "a/b/")),
    ],
)
def test_urls(url: str, parts: tuple[str, str, str]) -> None:
    """A URL has an account, a container and a prefix; the configuration accepts it."""
    assert account_container_and_prefix(store_url(url)) == parts


@pytest.mark.parametrize(
    "url",
    [
        "az://acct",
        "az://acct/",
        "az://ACCT/box",
        "az://a/box",
        "az://acct/b",
        "az://acct/-box",
        "az://acct/my--box/x",
        "az://acct/bo_x",
        "az://acct/box?sig=1",
        "az://acct.blob.core.windows.net/box",
        "az://box@acct.blob.core.windows.net/prefix",
    ],
)
def test_wrong_urls(url: str) -> None:
    """The error shows the form of the URL, also for the forms of other tools."""
    with pytest.raises(InvalidValue) as invalid:
        store_url(url)
    assert "az://ACCOUNT/CONTAINER/PREFIX" in invalid.value.remedy


@pytest.mark.parametrize("endpoint", ["acct", "ftp://h/acct", "https://h/a/b", "https://h/acct?x"])
def test_an_invalid_endpoint(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"^store.endpoint: .*https://host"):
        open_store(StoreConfig(url="az://acct/box", endpoint=endpoint))
