# SPDX-License-Identifier: Apache-2.0
"""A rank without training: the test says each message, and the rank seals what it is told to."""

from __future__ import annotations

from swansong import layout, protocol
from swansong.layout import FileEntry, RankManifest

from testkit.channel_peer import Client
from testkit.rig import Vm
from testkit.staged import write_files


class ScriptedRank(Client):
    """The only rank of a VM, scripted message by message.

    Args:
        vm: whose daemon it reaches.
        node: number of the VM, and so of the rank.
        nodes: number of VMs of the job.
        start_id: of the start that it belongs to; empty for a start over several VMs, see :meth:`begin`.
    """

    def __init__(self, vm: Vm, node: int, nodes: int = 2, start_id: str = "") -> None:
        super().__init__(vm.socket)
        self.vm, self.node, self.nodes = vm, node, nodes
        self.start_id = start_id
        place = {"rank": node, "world_size": nodes, "node": node, "nodes": nodes}
        self.send(
            protocol.Hello("run", step=1, start_id=start_id, capabilities=["follow_ups"], **place)
        )
        self.receive_a(protocol.Welcome)

    def begin(self, start_id: str) -> None:
        """Begin a start of the job, as the hooks do once all ranks have met."""
        self.start_id = start_id
        self.send(protocol.Finish(start_id))
        self.receive_a(protocol.Finished)
        self.send(protocol.Begin(start_id))

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
        self.send(protocol.Sealed(step, sealed.name, 0.1, size_bytes, request_id))
