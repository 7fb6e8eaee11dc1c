# SPDX-License-Identifier: Apache-2.0
"""Errors put into the production code on purpose, each of which the simulation must find.

``python -m testkit.simulation mutants production SEEDS [NUMBER ...]`` runs up to ``SEEDS`` seeds against each
mutant, and exits with 1 if one is not found.
"""

from __future__ import annotations

from testkit.simulation.core_mutants import Mutant

MUTANTS = (
    Mutant("swansong_bucket.runs.commit",
           "        if claim is None or not owns(claim):\n            raise FencedError(generation, number)",
           "        pass"),
    Mutant("swansong_bucket.runs.catalog", "in sorted(by_commit, reverse=True)", "in sorted(by_commit)"),
    Mutant("swansongd.flush.claimant",
           "        self._note(replace(start, generation=claim.generation))\n", ""),
    Mutant("swansongd.flush.queue", "        self._left = len(missing)",
           "        self._left = len(missing) - 1"),
    Mutant("swansongd.flush.sender", "        offset += piece.size_bytes\n", ""),
    Mutant("swansongd.core.proof", "return newest.step >= position.step", "return True"),
    Mutant("swansongd.flush.sender", "            end += piece.size_bytes\n", ""),
    Mutant("swansongd.flush.sender",
           "                    self._note(flush, {piece: extent})\n                    continue",
           "                    self._note(flush, {piece: Extent(extent.chunk, 0, extent.size_bytes)})\n"
           "                    continue"),
    Mutant("swansongd.flush.reading", "        done += count\n", "        done = len(window)\n"),
    Mutant("swansongd.flush.queue", "                self._left -= 1\n", "                self._left -= 2\n"),
    Mutant("swansongd.restore.answers", "return self.start_id == start_id and is_there",
           "return is_there"),
    Mutant("swansong_bucket.stores.file.io",
           "done += os.pwrite(fd, data[done:], offset + done)",
           "done += max(data.nbytes, os.pwrite(fd, data[done:], offset + done))"),
    Mutant("swansong.openat",
           "    left = memoryview(data)\n    while left:\n        left = left[os.write(fd, left) :]",
           "    os.write(fd, data)"),
    Mutant("swansong._checkpoint.saver",
           "            if (last.manifest.step, last.manifest.start_id) != (new.step, new.start_id):\n"
           "                return False",
           "            if False:\n                return False"),
    Mutant("swansongd.trainers.translate",
           "TrainerAccepted(connection, message.request_id, message.step)",
           "TrainerAccepted(connection, message.request_id, max(-1, message.step - 3))"),
    Mutant("swansong._checkpoint.staging",
           "                if durable:\n                    os.fsync(fd)\n", ""),
    Mutant("swansongd.sources.aws",
           "answer.body, asked.by_server_clock(answer), self", "answer.body, asked, self"),
    Mutant("swansong_bucket.transfer.reader",
           "offset = place.offset_bytes + start - place.at_bytes", "offset = place.offset_bytes"),
    Mutant("swansong._checkpoint.staging", "    if durable:\n        os.fsync(run_fd)\n", ""),
    Mutant("swansong._checkpoint.staging", "        if durable:\n            os.fsync(directory_fd)\n", ""),
    Mutant("swansong._checkpoint.staging",
           "_put(layout.rank_manifest_name(rank), manifest, partial_fd, durable=durable)",
           "_put(layout.rank_manifest_name(rank), manifest, partial_fd, durable=False)"),
    Mutant("swansongd.staging.prepare", "        os.fsync(staging_fd)\n", ""),
    Mutant("swansong.openat", "            if durable:\n                os.fsync(fd)\n", ""),
    Mutant("swansong.openat", "    if durable:\n        os.fsync(dir_fd)\n", ""),
    Mutant("swansong._checkpoint.staging", 'manifest.kind != "emergency"', "False"),
    Mutant("swansong_bucket.runs.commit",
           "if claim is None or not owns(claim):", "if claim is None:"),
    Mutant("swansong_bucket.runs.commit", "catalog.newer_claims(store, keys, claim.generation), owns",
           "catalog.newer_claims(store, keys, claim.generation + 1), owns"),
    Mutant("swansong_bucket.mirror.copier",
           "        self.copy_claims()\n        is_new",
           "        self.copy_claims()\n        self._put(key, data)\n        is_new"),
    Mutant("swansong_bucket.mirror.copier",
           "self._mirror.create(chunk.key, Body(memoryview(data), moved))", "pass"),
    Mutant("swansong_bucket.retention.prune", "        named = _marked(found, remaining)",
           "        named = _marked(found, list(remaining)[-1:])"),
    Mutant("swansongd.flush.sender", "                places = _extents(pieces, made, 0)",
           "                places = _extents(pieces[::-1], made, 0)"),
    Mutant("swansong.openat",
           "            write_all(fd, data)\n            if durable:\n                os.fsync(fd)\n",
           "            if durable:\n                os.fsync(fd)\n            write_all(fd, data)\n"),
    Mutant("swansong._checkpoint.staging", "    try:\n        sealed = _rename(run_fd, name)\n",
           "    try:\n        os.fsync(run_fd)\n        durable = False\n"
           "        sealed = _rename(run_fd, name)\n"),
    Mutant("swansong._checkpoint.staging", "                if durable:\n                    os.fsync(fd)\n",
           "                if durable and name == names[0]:\n                    os.fsync(fd)\n"),
    Mutant("swansongd.flush.committer", "            self._prepare(manifest)\n",
           "            self._prepare(manifest)\n"
           "            self._post(CommitDone(request.flush_id, manifest.ref))\n"),
    Mutant("swansongd.flush.queue", "            for path, each in sorted(self._files.items())\n",
           "            for path, each in sorted(self._files.items())[1:]\n"),
    Mutant("swansongd.flush.committer", "                self._post(fence)\n            else:",
           "                self._post(CommitDone(request.flush_id, manifest.ref))\n            else:"),
    Mutant("swansongd.core.proof", "return newest.step >= position.step",
           "return newest.step >= position.step - 5"),
    Mutant("swansongd.flush.reading", "piece.offset_bytes + start + done", "piece.offset_bytes + start"),
    Mutant("swansong_bucket.retention.prune",
           "        self._doomed = [read for read in self.found.commits if read.key not in kept]",
           "        self._doomed = [read for read in self.found.commits if read.key not in kept][:-1]\n"
           "        self._doomed += self.found.commits[-1:]"),
    Mutant("swansongd.staging.prepare",
           "        run_fd = _open_run(staging_fd, run)\n"
           "        # The hooks sync their sets and the entries of this directory, "
           "but not the entry for it.\n"
           "        os.fsync(staging_fd)\n",
           "        os.fsync(staging_fd)\n        run_fd = _open_run(staging_fd, run)\n"),
    # V2, V5 and I3.
    Mutant("swansongd.service.service", "self._inbox.get(self._tick_s()) or Tick()",
           "self._inbox.get(3 * self._tick_s()) or Tick()"),
    Mutant("swansongd.service.service",
           "        self._stop.set()\n        self._inbox.close()\n",
           "        time.sleep(6.0)\n        self._stop.set()\n        self._inbox.close()\n"),
    Mutant("swansong_bucket.retention.prune", "        run.delete_objects(deleted)\n",
           "        run.delete_objects(deleted)\n"
           "        for claim in list(store.list(keys.generations))[:1]:\n"
           "            store.delete(claim.key)\n"),
    # The next VM of a handover claims too early.
    Mutant("swansongd.core.starts", "    if due.nodes == 1 and _is_awaiting(transition):\n        return",
           "    if False:\n        return"),
    Mutant("swansongd.restore.predecessor", "        if left_s <= 0:\n", "        if True:\n"),
)  # fmt: skip
"""Numbered from 0.  Each is found within 24 seeds."""
NOT_FOUND = (
    # Found before the simulation had ranks that come and go, late buckets and second attempts.
    Mutant("swansong_bucket.runs.commit",
           "    ensure_not_fenced(store, keys, claim, owns=owns_next)\n    mark", "    mark"),
    Mutant("swansong_bucket.runs.commit",
           "if winner is None or winner.start != start_id:", "if False:"),
    Mutant("swansong_bucket.retention.survey", "info.age_s is None or info.age_s < orphans_after_s",
           "info.age_s is None"),
    Mutant("swansongd.core.resume", "    return is_named or start.generation is not None", "    return True"),
    Mutant("swansongd.core.staged_sets", "        and _comes_before(state, staged, ref)\n", ""),
    # Another event wakes the thread soon after.
    Mutant("swansongd.flush.engine",
           "                self._is_beginning = False\n                self._has_work.notify()",
           "                self._is_beginning = False"),
    # Two VMs must be in the same few requests, one of them frozen.
    Mutant("swansong_bucket.runs.commit", "    if held:\n        _ensure", "    if False:\n        _ensure"),
    Mutant("swansong_bucket.runs.commit",
           "above=claim.generation) > claim.generation:", "above=claim.generation) < 0:"),
    # The check before the next claim, and the check before each commit, refuse the same VM.
    Mutant("swansongd.flush.claimant", "            if is_of_boot:\n                raise\n", ""),
    # A trainer must ask in the instant before the restarted daemon has scanned staging.
    Mutant("swansongd.restore.answers",
           "        state = self._scanned()\n        store = self._store()\n        refusal",
           "        state = self._state()\n        store = self._store()\n        refusal"),
    # A restarted trainer on an overtaken VM must still have a sealed set in staging.
    Mutant("swansongd.core.resume",
           "    if best is None or (newest is not None and best[0] < newest):", "    if best is None:"),
    # Two VMs must claim at the same instant.
    Mutant("swansong_bucket.runs.commit",
           "            store.put(key, data, if_absent=True)\n        except Exists:\n            winner = ",
           "            store.put(key, data)\n        except Exists:\n            winner = "),
    # One start seals no two sets of one step.
    Mutant("swansong_bucket.runs.commit",
           "        if not _is_ours(store, key, manifest):\n            raise\n", ""),
    # Requests are retried until the deadline: an outage must outlast it.
    Mutant("swansongd.flush.committer",
           "            failed(error.line(), conflict=False, kind=error.kind)\n",
           "            self._post(CommitDone(request.flush_id, manifest.ref))\n"),
    # A power cut, or a fault of the metadata service, must fall into a short time.
    Mutant("swansongd.sources.aws", "        if answer.status not in (200, 404):\n", "        if False:\n"),
    Mutant("swansongd.sources.azure",
           "if self.kind_of(each) and each.concerns(self._vm_name)", "if self.kind_of(each)"),
    Mutant("swansongd.core.staged_sets", "        _doubt_undurable(transition)\n", "        pass\n"),
    Mutant("swansongd.core.staged_sets", "if start is None or not start.has_hooks:", "if True:"),
    Mutant("swansong_bucket.transfer.reader",
           "        is_intact = self._is_read(ranges, self._of_target, self._hashing(chunk))\n"
           "        if is_intact:\n            with self._lock:\n                self.reused_bytes",
           "        is_intact = True\n"
           "        if is_intact:\n            with self._lock:\n                self.reused_bytes"),
    Mutant("swansongd.sources.aws", "            if answer.status != 401:\n", "            if True:\n"),
    Mutant("swansongd.sources.azure",
           "self._notice(each, asked.by_server_clock(answer))", "self._notice(each, asked)"),
    Mutant("swansongd.sources.gcp",
           "        etag, self._etag = self._etag, _NO_ETAG\n", "        etag = self._etag\n"),
    Mutant("swansongd.sources.gcp", 'if result.text.upper() != "TRUE":', "if False:"),
    Mutant("swansongd.sources.polled",
           "                post(NoticeWithdrawn(self.name, result.withdrawn_because))\n", ""),
    Mutant("swansongd.sources.metadata", "            except Exception as error:\n",
           "            except MetadataUnavailable as error:\n"),
    # A set is synced before it is sealed, and one that is not synced is ignored after a power cut.
    Mutant("swansong._checkpoint.staging",
           "    manifest = dataclasses.replace(manifest, files=files)\n", ""),
    Mutant("swansongd.staging.seal", "        if found != entry.size_bytes:", "        if False:"),
    # Three of 20 seeds have a mirror, and few of them an evacuation without a commit.
    Mutant("swansongd.service.storage", "            self.mirroring.expedite()\n", "            pass\n"),
    Mutant("swansongd.flush.mirroring", "        if self._are_records_due or is_decided or",
           "        if self._are_records_due or"),
    # Unit tests find these.  The stores of the simulation lose no chunk, and no download breaks off.
    Mutant("swansongd.flush.possession", "                self._known.distrust()\n", ""),
    Mutant("swansongd.flush.possession", "if info is not None and info.size_bytes == chunk.size_bytes:",
           "if False:"),
    Mutant("swansongd.flush.possession", "self._has_lost or (self._is_doubted and not is_read)",
           "self._has_lost"),
    Mutant("swansong_bucket.transfer.reader", "    data[at_bytes:] = window", "    data += window"),
    Mutant("swansong_bucket.mirror.copier", "            self._verify(manifest.chunks)\n", ""),
    Mutant("swansong_bucket.stores.remote",
           "if found is None or found[0].size_bytes != body.size_bytes:", "if found is None:"),
    Mutant("swansongd.flush.queue",
           "is_alone = len(self._attempts.get(task.pieces, ())) < ATTEMPTS_MAX", "is_alone = True"),
    # Unit tests find these, too: another VM must claim while a claim is retried.
    Mutant("swansongd.flush.committer", "        self._wanted = None\n        self._wake.set()",
           "        self._wake.set()"),
    Mutant("swansong_bucket.runs.commit", "    if followed:\n", "    if False:\n"),
    # An overtaken VM must claim again, before it ends, while its next VM trains.
    Mutant("swansongd.flush.claimant", "self._ensure_not_overtaken(start_id) if nodes == 1 else 0",
           "0"),
)  # fmt: skip
"""Numbered after the others.  No run has found them."""
