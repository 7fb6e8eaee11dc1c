# SPDX-License-Identifier: Apache-2.0
"""The lifecycle hook of an Auto Scaling group: kept waiting while we evacuate, let go when we are done.

The only module beside the S3 store that imports boto3, in its own thread and when that starts.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import structlog
from swansong.bounds import BoundsError, json_object, text

from swansongd.sources.aws import Imds
from swansongd.sources.base import Clock
from swansongd.sources.metadata import (
    DEFAULT_URL,
    MAX_BODY_BYTES,
    Backoff,
    MetadataClient,
    MetadataUnavailable,
    fallback_url,
    shortened,
)

IDENTITY_PATH = "/latest/dynamic/instance-identity/document"
_INSTANCE = re.compile(r"[A-Za-z0-9-]{1,64}")
_REGION = re.compile(r"[a-z0-9-]{1,40}")
"""Goes into the address of the service."""

_log = structlog.get_logger(__name__)


class _Refused(Exception):
    """The service understood, and said no; asking again would not help."""


class _Unavailable(Exception):
    """It may work when tried again."""


class LifecycleHook:
    """Tells the group's lifecycle hook about an evacuation.  Its methods only leave word; none blocks.

    Who this VM is, and where, is read from its identity document once the thread starts, and the client
    is made ready then: metadata and credentials may be gone when they are needed.

    Args:
        hook, group: names of the lifecycle hook and of the Auto Scaling group.
        metadata_url: address of the metadata service.
        endpoint: address of the Auto Scaling service; None for AWS's own in the region of the VM.
        heartbeat_interval_s: the hook hears from us no more often than this.
        timeout_s: limit of connecting, and of each wait for an answer.
        monotonic: the clock.
    """

    def __init__(
        self,
        *,
        hook: str,
        group: str,
        metadata_url: str = DEFAULT_URL,
        endpoint: str | None = None,
        heartbeat_interval_s: float = 10.0,
        timeout_s: float = 3.0,
        monotonic: Clock = time.monotonic,
    ) -> None:
        self._names = {"LifecycleHookName": hook, "AutoScalingGroupName": group}
        self._metadata_url = metadata_url
        self._endpoint = endpoint
        self._heartbeat_interval_s = heartbeat_interval_s
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._backoff = Backoff(min(1.0, heartbeat_interval_s), heartbeat_interval_s)
        self._asked = threading.Condition()
        self._beat_asked = False
        self._completion_asked = False
        self._stopped = False
        self._next_beat_mono_s = 0.0
        self._failed: tuple[str, str] | None = None
        self._client: Any = None
        self._instance_id = ""

    def start(self) -> None:
        """Begin, in a daemon thread."""
        threading.Thread(target=self._work, name="asg-hook", daemon=True).start()

    def heartbeat(self) -> None:
        """The evacuation goes on: the hook shall wait.  Call it as often as is convenient."""
        with self._asked:
            if not self._beat_asked and self._monotonic() >= self._next_beat_mono_s:
                self._beat_asked = True
                self._asked.notify()

    def complete(self) -> None:
        """The evacuation has its verdict: the group may go on.  Tried until the service has answered."""
        with self._asked:
            self._completion_asked = True
            self._asked.notify()

    def stop(self) -> None:
        """End the thread; a call under way is not waited for."""
        with self._asked:
            self._stopped = True
            self._asked.notify()

    def _work(self) -> None:
        while True:
            with self._asked:
                self._asked.wait_for(
                    lambda: self._stopped or self._beat_asked or self._completion_asked,
                    timeout=None if self._client is not None else self._backoff.next_s(),
                )
                if self._stopped:
                    return
                beats, completes = self._beat_asked, self._completion_asked
            if completes:
                self._complete()
            elif beats:
                self._beat()
            else:
                self._attempt("ready", self._prepare)

    def _beat(self) -> None:
        done = self._attempt("heartbeat", lambda: self._call("record_lifecycle_action_heartbeat"))
        with self._asked:
            self._beat_asked = False
            wait_s = self._heartbeat_interval_s if done else self._backoff.next_s()
            self._next_beat_mono_s = self._monotonic() + wait_s

    def _complete(self) -> None:
        def call() -> None:
            self._call("complete_lifecycle_action", LifecycleActionResult="CONTINUE")

        done = self._attempt("complete", call)
        with self._asked:
            if done:
                # A heartbeat that was asked for before would now only be refused.
                self._completion_asked = self._beat_asked = False
                self._next_beat_mono_s = 0.0
            else:
                self._asked.wait_for(lambda: self._stopped, timeout=self._backoff.next_s())

    def _attempt(self, what: str, call: Any) -> bool:
        """Whether the matter is settled, be it by a refusal."""
        try:
            call()
        except _Refused as refusal:
            _log.warning("lifecycle_hook_refused", what=what, reason=str(refusal))
        except Exception as error:
            expected = isinstance(error, (_Unavailable, MetadataUnavailable))
            reason = str(error) if expected else f"internal error: {error!r:.200}"
            if (what, reason) != self._failed:  # else it is the same trouble, still
                self._failed = (what, reason)
                _log.warning("lifecycle_hook_failed", what=what, reason=reason)
            return False
        else:
            _log.info("lifecycle_hook", what=what, **self._names)
        self._failed = None
        self._backoff.reset()
        return True

    def _call(self, operation: str, **arguments: str) -> None:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

        self._prepare()
        try:
            getattr(self._client, operation)(
                **self._names, InstanceId=self._instance_id, **arguments
            )
        except ClientError as error:
            answer = error.response
            status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            code = str(answer.get("Error", {}).get("Code", ""))
            words = f"{status} {code}: {shortened(str(answer.get('Error', {}).get('Message', '')))}"
            if status >= 500 or status == 429 or code in ("Throttling", "ResourceContention"):
                raise _Unavailable(words) from error
            if code.startswith("ExpiredToken"):
                self._client = None  # the next one has new credentials
                raise _Unavailable(words) from error
            raise _Refused(words) from error
        except (BotoCoreError, OSError) as error:
            raise _Unavailable(shortened(str(error))) from error

    def _prepare(self) -> None:
        """Find out who and where we are, and make the client with its credentials."""
        if self._client is not None:
            return
        import boto3  # noqa: PLC0415 - a VM without such a hook need not load it
        from botocore.config import Config  # noqa: PLC0415

        self._instance_id, region = self._identity()
        session = boto3.Session(region_name=region)
        if session.get_credentials() is None:
            raise _Unavailable(
                "no credentials; give the VM an instance role for the lifecycle hook"
            )
        self._client = session.client(
            "autoscaling",
            endpoint_url=self._endpoint,
            config=Config(
                connect_timeout=self._timeout_s,
                read_timeout=self._timeout_s,
                retries={"mode": "standard", "total_max_attempts": 1},
            ),
        )

    def _identity(self) -> tuple[str, str]:
        fallback = fallback_url(self._metadata_url, "aws")
        with MetadataClient(
            self._metadata_url, timeout_s=self._timeout_s, fallback_url=fallback
        ) as client:
            answer = Imds(client, monotonic=self._monotonic).look(IDENTITY_PATH)
        return read_identity(answer.body)


def read_identity(body: bytes) -> tuple[str, str]:
    """Instance id and region of an identity document."""
    try:
        document = json_object(body, "the identity document", MAX_BODY_BYTES)
        instance = text(document.get("instanceId"), "instanceId")
        region = text(document.get("region"), "region")
    except BoundsError as error:
        raise _Unavailable(str(error)) from None
    if not (_INSTANCE.fullmatch(instance) and _REGION.fullmatch(region)):
        raise _Unavailable("the identity document names no instance and region")
    return instance, region
