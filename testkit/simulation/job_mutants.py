# SPDX-License-Identifier: Apache-2.0
"""Errors put into the agreement and into the commits of several VMs, each of which the jobs must find.

``python -m testkit.simulation mutants jobs SEEDS [NUMBER ...]`` tries them.
"""

from __future__ import annotations

from testkit.simulation.core_mutants import Mutant

MUTANTS = (
    Mutant("swansong._ranks.agreement", "        if step < active.target:\n            return None",
           "        if False:\n            return None"),
    Mutant("swansong._ranks.agreement", "        if self.world_size == 1:\n", "        if True:\n"),
    Mutant("swansong._ranks.rounds", "max(int(value) for value in steps) + 1",
           "min(int(value) for value in steps)"),
    Mutant("swansong._ranks.rendezvous", "nonce = secrets.token_hex(8)", 'nonce = f"{rank:016}"'),
    Mutant("swansong._checkpoint.restore_query", "                if _named(found) != choice:",
           "                if False:"),
    Mutant("swansong_bucket.runs.commit", "        if found.is_complete:\n            ensure_found",
           "        if True:\n            ensure_found"),
    Mutant("swansong_bucket.runs.catalog", "return len(self.manifests) == self.nodes", "return True"),
    Mutant("swansongd.core.commits", "if staged is None or staged.nodes == 1:", "if True:"),
    Mutant("swansong._checkpoint.staging", "name, manifest.local_world_size, durable", "name, 1, durable"),
    Mutant("swansong._ranks.rendezvous", "    nonce = secrets.token_hex(8)\n",
           '    nonce = f"{rank:016}" if rank else secrets.token_hex(8)\n'),
    Mutant("swansong._ranks.rendezvous", "                    acknowledged.add(theirs)\n",
           "                    acknowledged.add(theirs)\n                    missing.discard(other)\n"),
)  # fmt: skip
"""Numbered from 0.  Each is found within 20 seeds."""
NOT_FOUND = (
    # Each daemon of the job must miss the notice of the other VM, and have none itself.
    Mutant("swansong._ranks.rounds",
           "                self._rendezvous.send(protocol.PeerRequest(call.id, call.reason, left_s))\n",
           "                pass\n"),
    # One VM must have two ranks, and the request must reach only one of them before its step ends.
    Mutant("swansongd.core.request", "max(request.accepted.values()) + 1",
           "min(request.accepted.values())"),
    # All ranks complete a step at the same instant.
    Mutant("swansongd.core.proof", "step = max(step, request.target - 1)", "pass"),
    # A rank must abort a round in the instant in which another one decides.
    Mutant("swansong._ranks.rounds",
           '_decision(store.compare_set(decision, "", protocol.encode(own).decode()))', "own"),
    # A round ends before the time in which a rank waits for it.
    Mutant("swansong._ranks.agreement", "            and active.timed_out_at >= active.target\n",
           "            and False\n"),
    # A round must end between the calls of the two ranks of one VM.
    Mutant("swansong._ranks.rounds", "number, made = int(wanted), None",
           "number, made = self._number, None"),
)  # fmt: skip
"""Numbered after the others.  They survive 8 seeds."""
