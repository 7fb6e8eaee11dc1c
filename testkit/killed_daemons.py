# SPDX-License-Identifier: Apache-2.0
"""Daemons that are killed at the k-th request to their store."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from testkit.clouds import Bucket
from testkit.rig import Vm
from testkit.waiting import until


def killed_at_each_request(
    vm: Vm, bucket: Bucket, step: int, *, at: str, method: str = "", first: int = 1
) -> Iterator[tuple[int, Counter[str]]]:
    """Start a daemon that is killed at its request ``first``, then one at the next, until one survives.

    The last daemon has made the commit of ``step``, or reports the commit of the one before.

    Args:
        at: the point of the request, see :data:`testkit.emulators.store_control.POINTS`.
        method: count only requests of this method.

    Yields:
        The number of the request, and the chunks that this daemon has sent.
    """
    for request in itertools.count(first):
        is_committed = any(manifest["step"] == step for manifest in bucket.manifests())
        if not is_committed:
            # Later requests stall, too: other connections do no more until the kill.
            fault = {"kind": "stall", "at": at, "method": method, "times": 10**6}
            bucket.order("break", **fault, skip=request - 1)
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
        yield request, sent
        if daemon.popen.poll() is None:
            return
