# SPDX-License-Identifier: Apache-2.0
"""One HTTP request to a receiver, bounded in time and size, that shows no secret in its errors.

The address may be a secret, and the messages of HTTP libraries contain it.  Errors of this module therefore
name only the class of a failure, and the error text of the operating system.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from swansong_bucket.errors import SwansongError
from swansong_bucket.util.http1 import retry_after_s

from swansongd.config.notify import is_encrypted_or_local

CONNECT_S = 5.0
READ_S = 10.0
TOTAL_S = 20.0
"""One request with its name resolution, which no timeout of a socket covers."""
REPLY_BYTES_MAX = 4096
RETRY_AFTER_S_MAX = 120.0
ABANDONED_MAX = 4
"""Requests that ran into :data:`TOTAL_S` and whose threads still live."""
_THREAD = "notify-request"
_CAUSES_MAX = 20


class NotDelivered(SwansongError):
    """The receiver did not accept the request.

    Args:
        retry_after_s: pause that the receiver asks for, bounded.
        is_permanent: a retry would not help.
    """

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, is_permanent: bool = False
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_permanent = is_permanent


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request; its text form contains neither address nor content."""

    url: str
    method: str = "POST"
    data: bytes = b""
    headers: Mapping[str, str] | None = None
    ca_bundle: Path | None = None
    has_secret: bool = False
    """The address or a token is from a secret file.  A reply may repeat it, so no reply is shown."""

    def __repr__(self) -> str:
        return f"Request({self.method})"


def warm() -> None:
    """Import the HTTP library, which takes a fifth of a second of CPU time."""
    import requests  # noqa: F401, PLC0415


class Deliverer:
    """Sends requests one after another, each in a thread that is abandoned after the time limit."""

    def __init__(self, *, total_s: float = TOTAL_S) -> None:
        self._total_s = total_s
        self._abandoned: list[threading.Thread] = []
        _hide_addresses()

    def send(self, request: HttpRequest) -> None:
        """Send the request, and return after a reply with status 2xx.

        Raises:
            NotDelivered: there was no such reply in time.
        """
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= ABANDONED_MAX:
            raise NotDelivered("earlier requests still hang")
        outcomes: SimpleQueue[NotDelivered | None] = SimpleQueue()

        def run() -> None:
            try:
                _exchange(request)
            except NotDelivered as error:
                outcomes.put(error)
            except Exception as error:
                outcomes.put(NotDelivered(_described(error)))
            else:
                outcomes.put(None)

        thread = threading.Thread(target=run, name=_THREAD, daemon=True)
        thread.start()
        try:
            outcome = outcomes.get(timeout=self._total_s)
        except Empty:
            self._abandoned.append(thread)
            raise NotDelivered(f"no complete reply within {self._total_s:g} s") from None
        if outcome is not None:
            raise outcome


def _exchange(request: HttpRequest) -> None:
    import requests  # noqa: PLC0415 - only for receivers, and slow to import

    with requests.Session() as session:
        # Neither ~/.netrc nor a certificate bundle of the environment.
        session.trust_env = False
        with session.request(
            request.method,
            request.url,
            data=request.data or None,
            headers={"User-Agent": "swansongd", **(request.headers or {})},
            timeout=(CONNECT_S, READ_S),
            allow_redirects=False,
            stream=True,
            verify=str(request.ca_bundle or _system_bundle()),
            proxies=_proxies(request.url),
        ) as reply:
            body = reply.raw.read(REPLY_BYTES_MAX, decode_content=False)
            _judge(request, reply.status_code, reply.headers, body)


def _proxies(url: str) -> dict[str, str]:
    """Those of the environment, where a drop-in of the operator may set them."""
    from requests.utils import get_environ_proxies  # noqa: PLC0415

    is_local = not url.startswith("https:") and is_encrypted_or_local(url)
    return {} if is_local else dict(get_environ_proxies(url, no_proxy=None))


def _judge(request: HttpRequest, status: int, headers: Mapping[str, str], body: bytes) -> None:
    if 200 <= status < 300:
        return
    words = f"HTTP {status}"
    if 300 <= status < 400:
        raise NotDelivered(f"{words}: redirects are not followed", is_permanent=True)
    text = body.decode(errors="replace").strip()
    if text and not request.has_secret:
        words += f": {text[:200]}"
    if status == 429 or status >= 500:
        pause_s = retry_after_s(headers)
        raise NotDelivered(words, retry_after_s=pause_s and min(pause_s, RETRY_AFTER_S_MAX))
    raise NotDelivered(words, is_permanent=True)


def _system_bundle() -> str:
    import certifi  # noqa: PLC0415 - a dependency of requests

    paths = ssl.get_default_verify_paths()
    return paths.cafile or paths.capath or str(certifi.where())


def _described(error: BaseException) -> str:
    """The class of the error, and the text of the operating system or of OpenSSL behind it."""
    seen: list[Any] = [error]
    for found in seen:  # which grows
        if isinstance(found, ssl.SSLCertVerificationError):
            return f"the certificate is not valid: {found.verify_message}"
        if type(found).__module__ in ("builtins", "socket", "ssl") and isinstance(found, OSError):
            return f"{type(error).__name__}: {found.strerror or type(found).__name__}"
        causes = (found.__cause__, found.__context__, getattr(found, "reason", None), *found.args)
        new = [each for each in causes if isinstance(each, BaseException) and each not in seen]
        seen += new[: _CAUSES_MAX - len(seen)]
    return type(error).__name__


class _OwnRecords(logging.Filter):
    """Passes no record of the threads above: urllib3 logs addresses of malformed replies."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.threadName != _THREAD


_hidden = _OwnRecords()


def _hide_addresses() -> None:
    for name in ("urllib3.connection", "urllib3.connectionpool", "urllib3.util.retry"):
        logging.getLogger(name).addFilter(_hidden)
