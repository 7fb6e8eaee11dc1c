# SPDX-License-Identifier: Apache-2.0
"""Credentials of Azure Storage: an account key, a shared access signature (SAS), or tokens of an identity.

The only module that imports azure-identity, and only when a token is first needed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swansong_bucket.errors import Permanent, StoreError, Transient
from swansong_bucket.stores.responses import one_line

_SCOPE = "https://storage.azure.com/.default"
CREDENTIALS_HINT = (
    "Assign a managed identity to the VM, or run az login, or set AZURE_STORAGE_KEY or "
    "AZURE_STORAGE_SAS_TOKEN"
)
_CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"
_KEY = "AZURE_STORAGE_KEY"
_SAS = "AZURE_STORAGE_SAS_TOKEN"
_SAS_FORM = re.compile(r"[!-~]*\bsig=[!-~]+")
_TOKEN_FORM = re.compile(r"[!-~]{1,8192}")
_SIGNED = (
    "content-encoding", "content-language", "content-length", "content-md5", "content-type", "date",
    "if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range",
)  # fmt: skip
"""Headers of a Shared Key signature, in its order; those that start with ``x-ms-`` follow."""
_PRINCIPAL = ("AZURE_CLIENT_SECRET", "AZURE_CLIENT_CERTIFICATE_PATH")
_CONNECT_S = 2
_RETRIES = 2
_NO_IDENTITY = "(invalid_request)"
"""The code with which the metadata service reports that the VM has no such identity."""


@dataclass(frozen=True, slots=True)
class SharedKey:
    """A key of the storage account, which signs requests."""

    account: str
    key: bytes = field(repr=False)

    def authorization(
        self, method: str, path: str, parameters: Mapping[str, str], headers: Mapping[str, str]
    ) -> str:
        """The Authorization header of a request.

        Args:
            path: percent-encoded, as sent.
            parameters: of the query, before they are encoded.
            headers: names in lower case, with ``x-ms-date``; ``content-length`` unless it is 0.
        """
        signed = [headers.get(name, "") for name in _SIGNED]
        own = sorted((name, value) for name, value in headers.items() if name.startswith("x-ms-"))
        query = sorted((name.lower(), value) for name, value in parameters.items())
        lines = [method, *signed, *(f"{name}:{value}" for name, value in own)]
        lines += [f"/{self.account}{path}", *(f"{name}:{value}" for name, value in query)]
        digest = hmac.digest(self.key, "\n".join(lines).encode(), "sha256")
        return f"SharedKey {self.account}:{base64.b64encode(digest).decode()}"


@dataclass(frozen=True, slots=True)
class Sas:
    """A shared access signature, which is a part of each query."""

    query: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Token:
    """An access token of an identity."""

    text: str = field(repr=False)


AzureCredentials = SharedKey | Sas | Token


class Identity:
    """Tokens of azure-identity, for the first of these that is configured.

    A service principal (``AZURE_CLIENT_SECRET`` or ``AZURE_CLIENT_CERTIFICATE_PATH``), a workload identity
    (``AZURE_FEDERATED_TOKEN_FILE``), or the VM's managed identity, of several the one of ``AZURE_CLIENT_ID``.
    A machine without a managed identity uses the login of the Azure CLI.  Not DefaultAzureCredential, which
    reports a metadata service that does not respond as a missing identity.

    azure-identity keeps a token in memory.  It renews the token in its last five minutes, or earlier if the
    issuer asks for that.
    """

    def __init__(self, timeout_s: float) -> None:
        # Slow to import, and a VM on another cloud need not load it.
        import azure.identity as of  # noqa: PLC0415

        options = {
            "connection_timeout": _CONNECT_S,
            "read_timeout": timeout_s,
            "retry_total": _RETRIES,
        }
        self._ends_unix_s = 0.0
        self._cli: Any = None
        self._found: Any
        if any(os.environ.get(name) for name in _PRINCIPAL):
            self._found = of.EnvironmentCredential(**options)
        elif os.environ.get("AZURE_FEDERATED_TOKEN_FILE"):
            self._found = of.WorkloadIdentityCredential(**options)
        else:
            client_id = os.environ.get("AZURE_CLIENT_ID") or None
            self._found = of.ManagedIdentityCredential(client_id=client_id, **options)
            self._cli = of.AzureCliCredential()

    @property
    def has_expired(self) -> bool:
        """Whether the last token has expired."""
        return self._ends_unix_s <= time.time()

    def token(self) -> Token:
        """A valid token, renewed if it expires soon."""
        from azure.identity import CredentialUnavailableError  # noqa: PLC0415

        try:
            found = self._found.get_token(_SCOPE)
        except CredentialUnavailableError as error:
            if self._cli is None:
                raise
            try:
                found = self._cli.get_token(_SCOPE)
            except CredentialUnavailableError:
                # azure-identity keeps no status of the metadata service, which may still be starting.
                if _NO_IDENTITY in str(error):
                    raise error from None
                raise Transient(one_line(str(error), 300), hint=CREDENTIALS_HINT) from error
        if not _TOKEN_FORM.fullmatch(found.token):
            raise Transient("the issuer returned an invalid token")
        self._ends_unix_s = float(found.expires_on)
        return Token(found.token)


def from_environment(account: str) -> SharedKey | Sas | None:
    """The key or the signature in the environment, in the variables of the Azure CLI; None without one.

    Raises:
        Permanent: a variable is not valid, or is for another account.
    """
    key, sas = os.environ.get(_KEY), os.environ.get(_SAS)
    key_name, sas_name = _KEY, _SAS
    if connection := os.environ.get(_CONNECTION):
        pairs = (pair.partition("=") for pair in connection.split(";"))
        fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
        named = fields.get("accountname", account)
        if named != account:
            raise Permanent(
                f"{_CONNECTION} is for the account {named!r:.40}, and store.url names {account!r}",
                hint=f"Set the connection string of {account}, or remove the variable",
            )
        key, sas = fields.get("accountkey"), fields.get("sharedaccesssignature")
        key_name = sas_name = _CONNECTION
        if not (key or sas):
            raise Permanent(
                f"{_CONNECTION} has neither AccountKey nor SharedAccessSignature",
                hint="Copy it from",
                command=f"az storage account show-connection-string --name {account}",
            )
    if key:
        return _shared_key(account, key, key_name)
    if sas:
        query = sas.strip().removeprefix("?")
        if not _SAS_FORM.fullmatch(query):
            raise Permanent(
                f"{sas_name} is not a shared access signature: it has no sig=, or a space",
                hint="Copy the token from",
                command="az storage container generate-sas",
            )
        return Sas(query)
    return None


def _shared_key(account: str, key: str, name: str) -> SharedKey:
    try:
        raw = base64.b64decode(key.strip(), validate=True)
    except (binascii.Error, ValueError):
        raise Permanent(
            f"the account key in {name} is not base64",
            hint="Copy it from",
            command=f"az storage account keys list --account-name {account}",
        ) from None
    return SharedKey(account, raw)


def content_md5(data: memoryview) -> str:
    """The MD5 of a body, as in the header Content-MD5."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def classified(error: Exception, message: str) -> StoreError:
    """The error of the contract for one of azure-identity, by its type."""
    from azure.core import exceptions as of  # noqa: PLC0415

    network = (of.ServiceRequestError, of.ServiceResponseError, OSError)
    status = error.status_code if isinstance(error, of.HttpResponseError) else None
    is_busy = status is not None and (status in (408, 429) or status >= 500)
    kind = Transient if is_busy or isinstance(error, network) else Permanent
    return kind(message, hint=CREDENTIALS_HINT)
