# SPDX-License-Identifier: Apache-2.0
"""Checks at the edge that are removed on purpose, each of which the adversary must find.

``python -m testkit.simulation mutants adversary SEEDS [NUMBER ...]`` tries them.
"""

from __future__ import annotations

from testkit.simulation.core_mutants import Mutant

MUTANTS = (
    Mutant("swansong_bucket.runs.signing", "if is_below_data(info.key) or is_folder(info):",
           'if is_below_data(info.key) or info.key.endswith("/"):'),
    Mutant("swansong_bucket.runs.signing",
           "if hmac.compare_digest(self._key.tag(self.url, key), match[2]):", "if True:"),
    Mutant("swansongd.trainers.channel", "if peer.uid not in self._allowed_uids:", "if False:"),
    Mutant("swansongd.trainers.channel",
           "            if connection.peer.uid in (0, os.geteuid()):\n                self._answer(message",
           "            if True:\n                self._answer(message"),
    Mutant("swansong.fields", "None if is_null else field_type.check(value, item.name)", "value"),
)  # fmt: skip
"""Numbered from 0.  Each is found within 20 seeds."""
NOT_FOUND = (
    # A user must send JSON that is nested deeply enough.
    Mutant("swansong.bounds", "except (ValueError, RecursionError) as error:", "except ValueError as error:"),
    # A daemon without a claim must start after the last generation was planted.
    Mutant("swansong_bucket.runs.catalog", "    if generation > GENERATION_MAX:\n        return None\n", ""),
    # A planted commit must be the newest one when a VM boots, and name a bad object for the constant file.
    Mutant("swansongd.flush.committer", "                    self._date(newest, first.created)\n",
           "                    self._known.seed(newest, first.shards)\n"
           "                    self._date(newest, first.created)\n"),
    # A planted manifest has hundreds of fields; few of the changes meet this one.
    Mutant("swansong_bucket.format.manifest",
           'return chunks[bounds.integer(number, "chunk of an extent", 0, len(chunks) - 1)]',
           "return chunks[number]"),
    Mutant("swansong_bucket.format.manifest", "        if not keys.is_data(key):", "        if False:"),
    # A unit test finds this one: a restore must copy files of its VM, be interrupted, and continue.
    Mutant("swansong_bucket.transfer.reader", "is_of_store = self.noted[chunk]", "is_of_store = True"),
    # Each file is opened without following links, and compared with the listing.
    Mutant("swansongd.staging.scan", "    if kind not in (stat.S_IFREG, stat.S_IFDIR):", "    if False:"),
)  # fmt: skip
"""Numbered after the others.  They survive 3 seeds of their actor."""
