# SPDX-License-Identifier: Apache-2.0
"""Daemons that are killed at the k-th write to their store."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from testkit.clouds import Bucket
from testkit.rig import Vm
from testkit.waiting import until


def killed_at_each_write(vm: Vm, bucket: Bucket, step: int) -> Iterator[Counter[str]]:
    """Start a daemon that is killed at its first write, then one at its second, until one survives.

    Each write takes effect, and its reply is lost.  The last daemon has made the commit of ``step``, or
    reports the commit of the one before.

    Yields:
        The chunks that this daemon has sent.
    """
    for write in itertools.count():
        is_committed = any(manifest["step"] == step for manifest in bucket.manifests())
        if not is_committed:
            # Later requests stall, too: other connections do no more until the kill.
            bucket.order("stall", method="PUT", times=10**6, skip=write)
        daemon = vm.start_daemon(ready=False)
        if is_committed:
            daemon.lines.wait(event="health", source="store", health="ok")
            until(
                lambda: (vm.status()["last_commit"] or {}).get("step") == step,
                what="the commit in status",
            )
        else:
            until(
                lambda: bucket.order("hits") or vm.daemon.lines.all(event="committed", step=step),
                what="the request, or the commit",
            )
            if bucket.order("hits"):
                daemon.kill()
        sent = bucket.chunks_sent()
        bucket.order("clear")  # a fault that is left would break a request of the test
        yield sent
        if daemon.popen.poll() is None:
            return
