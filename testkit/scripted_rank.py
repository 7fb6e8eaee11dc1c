# SPDX-License-Identifier: Apache-2.0
"""A rank without training: the test says each message, and the rank seals what it is told to."""

from __future__ import annotations

import json
import socket
from typing import Any, Self

from swansong import layout
from swansong.layout import FileEntry, RankManifest

from testkit.rig import Vm
from testkit.staged import write_files


class ScriptedRank:
    """The only rank of a VM, scripted message by message.

    Args:
        vm: whose daemon it reaches.
        node: number of the VM, and so of the rank.
        nodes: number of VMs of the job.
        start_id: of the start that it belongs to; empty for a start over several VMs, see :meth:`begin`.
    """

    def __init__(self, vm: Vm, node: int, nodes: int = 2, start_id: str = "") -> None:
        self.vm, self.node, self.nodes = vm, node, nodes
        self.start_id = start_id
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(30)
        self.socket.connect(str(vm.socket))
        self.send(
            type="hello",
            run="run",
            rank=node,
            world_size=nodes,
            node=node,
            nodes=nodes,
            step=1,
            start_id=start_id,
            capabilities=["follow_ups"],
        )
        self.receive("welcome")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def begin(self, start_id: str) -> None:
        """Begin a start of the job, as the hooks do once all ranks have met."""
        self.start_id = start_id
        self.send(type="finish", start_id=start_id)
        self.receive("finished")
        self.send(type="begin", start_id=start_id)

    def send(self, **message: Any) -> None:
        self.socket.send(json.dumps(message).encode())

    def receive(self, kind: str) -> dict[str, Any]:
        """The next message of this kind."""
        while True:
            message: dict[str, Any] = json.loads(self.socket.recv(65536))
            if message["type"] == kind:
                return message

    def seal(self, step: int, request_id: str = "", *, size_bytes: int = 1000) -> None:
        """Seal this VM's part of a checkpoint, as the hooks do."""
        shard = f"rank-{self.node:05d}/model.bin"
        manifest = RankManifest(
            run="run",
            step=step,
            kind="emergency" if request_id else "periodic",
            files=[FileEntry(shard, size_bytes)],
            rank=self.node,
            world_size=self.nodes,
            node=self.node,
            nodes=self.nodes,
            request_id=request_id,
            start_id=self.start_id,
        )
        sealed = self.vm.run_directory / layout.sealed_name(step, "abc")
        content = {
            shard: bytes([self.node]) * size_bytes,
            layout.rank_manifest_name(self.node): manifest.encode(),
        }
        write_files(sealed.with_name(layout.partial_name(sealed.name)), content).rename(sealed)
        self.send(
            type="sealed",
            step=step,
            directory=sealed.name,
            save_s=0.1,
            size_bytes=size_bytes,
            request_id=request_id,
        )
