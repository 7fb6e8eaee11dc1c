# SPDX-License-Identifier: Apache-2.0
"""Queries of several ranks, against a real store: all ranks of one start get the same checkpoint."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

from swansong.protocol import Message, Restored, RestoreQuery, Restoring
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.stores.base import Sink
from swansong_bucket.stores.file.store import FileStore
from swansongd.restore.context import RestoreContext
from swansongd.restore.resume import Resume
from swansongd.staging.prepare import prepare

from testkit.committed import commit, file_store, tree
from testkit.story import Story
from testkit.waiting import until

FILES = {"rank-00000/model.bin": b"a" * 5000, "rank-00001/model.bin": b"b" * 5000}


class BlockedStore(FileStore):
    """A real store that blocks reads until an event is set, and counts them."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.may_read = threading.Event()
        self.may_read.set()
        self.reads = 0

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> None:
        self.reads += 1
        assert self.may_read.wait(20)
        super().get_range(key, offset, size_bytes, sink)


class Asked:
    """A Resume on a run directory, and its replies."""

    def __init__(self, tmp_path: Path) -> None:
        file_store(tmp_path / "store")
        self.store = BlockedStore(f"file://{tmp_path / 'store'}")
        self.now_s = 1000.0
        (tmp_path / "staging").mkdir()
        self.run = prepare(tmp_path / "staging", "r")
        self.story = Story()
        self.story.join(ranks=3, start_id="first")
        context = RestoreContext(
            self.store,
            RunKeys("r"),
            self.run,
            lambda: self.story.state,
            threading.Event(),
            monotonic=lambda: self.now_s,
        )
        self.resume = Resume(context)

    def ask(self, query_id: str, start_id: str = "first") -> Callable[[], Message]:
        """Send a query; returns a function that waits for the next reply."""
        replies: queue.Queue[Message] = queue.Queue()
        query = RestoreQuery(query_id, start_id=start_id)
        self.resume.ask(query, replies.put, lambda _: None)
        return lambda: replies.get(timeout=20)

    def answer(self, query_id: str, start_id: str = "first") -> Restored:
        reply = self.ask(query_id, start_id)
        while not isinstance(message := reply(), Restored):
            pass
        assert message.query_id == query_id
        return message


def test_every_rank_gets_the_same_directory(tmp_path: Path) -> None:
    """After all ranks got their answers, the directory of the first one is still there, and whole."""
    asked = Asked(tmp_path)
    commit(asked.store, FILES, step=100)
    first = asked.answer("rank-0")
    reads = asked.store.reads
    others = [asked.answer(f"rank-{rank}") for rank in (1, 2)]
    assert [other.path for other in others] == [first.path] * 2
    assert asked.store.reads == reads, "it is fetched once"
    assert tree(Path(first.path)) == FILES


def test_a_newer_commit_changes_no_answer_of_the_start(tmp_path: Path) -> None:
    """``swansong restore`` fetches a newer commit between two ranks of one start: both get the older one.

    Also if the second rank asks an hour later.
    """
    asked = Asked(tmp_path)
    commit(asked.store, FILES, step=100)
    assert asked.answer("rank-0").step == 100
    commit(asked.store, FILES, step=110, nonce="a2")
    assert asked.answer("operator", start_id="").step == 110
    asked.now_s += 3600.0
    late = asked.answer("rank-1")
    assert (late.step, tree(Path(late.path))) == (100, FILES)


def test_ranks_of_a_fresh_run_all_start_fresh(tmp_path: Path) -> None:
    """A rank that asks after the first commit of its own start gets no checkpoint either."""
    asked = Asked(tmp_path)
    assert asked.answer("rank-0").path == ""
    commit(asked.store, FILES, step=10, generation=2)
    assert asked.answer("rank-1") == Restored("rank-1")


def test_a_later_start_gets_the_newest_commit(tmp_path: Path) -> None:
    """The download of the earlier start is deleted, however soon the next start asks."""
    asked = Asked(tmp_path)
    commit(asked.store, FILES, step=100)
    first = asked.answer("rank-0")
    commit(asked.store, FILES, step=110, nonce="a2")
    asked.story.leave()
    asked.story.join(ranks=3, pid=200, start_id="second")
    later = asked.answer("rank-0", start_id="second")
    assert later.step == 110
    assert tree(Path(later.path)) == FILES
    assert not Path(first.path).exists()


def test_a_deleted_download_is_fetched_again(tmp_path: Path) -> None:
    """If an operator removed the directory, the next rank gets the same commit, in a new one."""
    asked = Asked(tmp_path)
    commit(asked.store, FILES, step=100)
    first = asked.answer("rank-0")
    commit(asked.store, FILES, step=110, nonce="a2")
    Path(first.path).rename(tmp_path / "elsewhere")
    again = asked.answer("rank-1")
    assert (again.step, tree(Path(again.path))) == (100, FILES)


def test_ranks_in_the_queue_get_the_progress_of_the_current_download(tmp_path: Path) -> None:
    """The hooks time out without progress, so each waiting rank gets it."""
    asked = Asked(tmp_path)
    commit(asked.store, FILES, step=100)
    asked.store.may_read.clear()
    first, second = asked.ask("rank-0"), asked.ask("rank-1")
    until(lambda: asked.store.reads, what="the fetching to begin")
    asked.now_s += 10  # progress is sent at intervals; now it is due
    asked.store.may_read.set()
    for query_id, reply in (("rank-0", first), ("rank-1", second)):
        message = reply()
        assert isinstance(message, Restoring)
        assert message.query_id == query_id
