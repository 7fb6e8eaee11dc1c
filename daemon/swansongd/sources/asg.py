# SPDX-License-Identifier: Apache-2.0
"""The lifecycle hook of an Auto Scaling group: heartbeats during an evacuation, completion after the verdict.

This module imports boto3 in its own thread.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import structlog
from swansong.bounds import BoundsError, json_object, text
from swansong_bucket.util.threads import lasting_thread

from swansongd.sources.aws import Imds
from swansongd.sources.metadata import (
    DEFAULT_URL,
    MAX_BODY_BYTES,
    Backoff,
    MetadataClient,
    MetadataUnavailable,
    shortened,
)

IDENTITY_PATH = "/latest/dynamic/instance-identity/document"
_INSTANCE = re.compile(r"[A-Za-z0-9-]{1,64}")
_REGION = re.compile(r"[a-z0-9-]{1,40}")
"""Checked because the region becomes part of the endpoint's host name."""

_log = structlog.get_logger(__name__)


class _Rejected(Exception):
    """The service rejected the call; a retry would not help."""


class _Unavailable(Exception):
    """The call failed, and a retry may succeed."""


class LifecycleHook:
    """Extends and completes the group's lifecycle action.  No method blocks; a thread makes the calls.

    The thread reads instance id and region from the identity document and creates the client when it starts:
    metadata and credentials may be unreachable at the time of the evacuation.

    Args:
        hook, group: names of the lifecycle hook and of the Auto Scaling group.
        metadata_url: address of the metadata service.
        endpoint: address of the Auto Scaling service; None for the regional endpoint of AWS.
        heartbeat_interval_s: shortest interval of heartbeats.
        timeout_s: limit for the connection, and for each read.
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
    ) -> None:
        self._names = {"LifecycleHookName": hook, "AutoScalingGroupName": group}
        self._metadata_url = metadata_url
        self._endpoint = endpoint
        self._heartbeat_interval_s = heartbeat_interval_s
        self._timeout_s = timeout_s
        self._backoff = Backoff(min(1.0, heartbeat_interval_s), heartbeat_interval_s)
        self._changed = threading.Condition()
        self._beat_pending = False
        self._completion_pending = False
        self._stopped = False
        self._next_beat_mono_s = 0.0
        self._failed: tuple[str, str] | None = None
        self._client: Any = None
        self._instance_id = ""

    def start(self) -> None:
        """Start the daemon thread."""
        lasting_thread("asg-hook", self._work).start()

    def heartbeat(self) -> None:
        """Extend the timeout of the hook while the evacuation continues.  Cheap: call it at any interval."""
        with self._changed:
            if not self._beat_pending and time.monotonic() >= self._next_beat_mono_s:
                self._beat_pending = True
                self._changed.notify()

    def complete(self) -> None:
        """Complete the lifecycle action after the verdict.  Retried until the service responds."""
        with self._changed:
            self._completion_pending = True
            self._changed.notify()

    def stop(self) -> None:
        """End the thread, without waiting for a call in flight."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopped or self._beat_pending or self._completion_pending,
                    timeout=None if self._client is not None else self._backoff.next_s(),
                )
                if self._stopped:
                    return
                beats, completes = self._beat_pending, self._completion_pending
            if completes:
                self._complete()
            elif beats:
                self._beat()
            else:
                self._attempt("ready", self._prepare)

    def _beat(self) -> None:
        done = self._attempt("heartbeat", lambda: self._call("record_lifecycle_action_heartbeat"))
        with self._changed:
            self._beat_pending = False
            wait_s = self._heartbeat_interval_s if done else self._backoff.next_s()
            self._next_beat_mono_s = time.monotonic() + wait_s

    def _complete(self) -> None:
        def call() -> None:
            self._call("complete_lifecycle_action", LifecycleActionResult="CONTINUE")

        done = self._attempt("complete", call)
        with self._changed:
            if done:
                # A pending heartbeat would now be rejected.
                self._completion_pending = self._beat_pending = False
                self._next_beat_mono_s = 0.0
            else:
                self._changed.wait_for(lambda: self._stopped, timeout=self._backoff.next_s())

    def _attempt(self, what: str, call: Any) -> bool:
        """Make a call, and log the outcome; False if it should be retried."""
        try:
            call()
        except _Rejected as rejection:
            _log.warning("lifecycle_hook_refused", what=what, reason=str(rejection))
        except Exception as error:
            expected = isinstance(error, (_Unavailable, MetadataUnavailable))
            reason = str(error) if expected else f"internal error: {error!r:.200}"
            if (what, reason) != self._failed:  # log each reason once
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
                self._client = None  # the next client gets new credentials
                raise _Unavailable(words) from error
            raise _Rejected(words) from error
        except (BotoCoreError, OSError) as error:
            raise _Unavailable(shortened(str(error))) from error

    def _prepare(self) -> None:
        """Read the identity document, and create the client with its credentials."""
        if self._client is not None:
            return
        import boto3  # noqa: PLC0415 - only VMs with a lifecycle hook load it
        from botocore.config import Config  # noqa: PLC0415

        self._instance_id, region = self._identity()
        session = boto3.Session(region_name=region)
        if session.get_credentials() is None:
            raise _Unavailable(
                "no credentials found; attach an instance role that may call the lifecycle hook"
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
        with MetadataClient(self._metadata_url, timeout_s=self._timeout_s, cloud="aws") as client:
            answer = Imds(client, monotonic=time.monotonic).read(IDENTITY_PATH)
        return parse_identity(answer.body)


def parse_identity(body: bytes) -> tuple[str, str]:
    """Instance id and region of an identity document."""
    try:
        document = json_object(body, "the identity document", MAX_BODY_BYTES)
        instance = text(document.get("instanceId"), "instanceId")
        region = text(document.get("region"), "region")
    except BoundsError as error:
        raise _Unavailable(str(error)) from None
    if not (_INSTANCE.fullmatch(instance) and _REGION.fullmatch(region)):
        raise _Unavailable("the identity document lacks a valid instance id or region")
    return instance, region
