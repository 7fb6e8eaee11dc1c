# SPDX-License-Identifier: Apache-2.0
"""One VM that restores: a staging directory, the state of a story, and the thread that answers queries."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any, Generic, TypeVar

from swansong.layout import RESTORED_DIRECTORY
from swansong.protocol import Message, Restored, RestoreQuery
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.stores.base import ObjectStore
from swansongd.core.events import Event
from swansongd.core.state import State
from swansongd.restore.answers import Resume
from swansongd.restore.context import RestoreContext
from swansongd.staging.prepare import prepare

from testkit.story import Story

Store = TypeVar("Store", bound=ObjectStore)


class Asked:
    """A query that was sent, and the messages for its rank."""

    def __init__(self, query: RestoreQuery) -> None:
        self.query = query
        self.messages: queue.Queue[Message] = queue.Queue()

    def answer(self) -> Restored:
        """Wait for the answer; skips the progress before it."""
        while not isinstance(message := self.messages.get(timeout=30), Restored):
            pass
        assert message.query_id == self.query.query_id
        return message


class RestoreRig(Generic[Store]):
    """The run directory and the restore thread of a daemon, which has the state of a story.

    Args:
        directory: the staging directory, which is created.
        options: of the context.
    """

    def __init__(
        self, directory: Path, store: Store, *, story: Story | None = None, **options: Any
    ) -> None:
        directory.mkdir()
        self.store = store
        self.run = prepare(directory, "r")
        self.restored = self.run.path / RESTORED_DIRECTORY
        self.story = Story() if story is None else story
        self.stop = threading.Event()
        self.posted: list[Event] = []
        """The events for the decision loop."""
        self.start_daemon(**options)

    def start_daemon(self, **options: Any) -> None:
        """Start the thread of the next daemon, which has no answer in memory."""
        self.context = RestoreContext(
            self.store, RunKeys("r"), self.run, lambda: self.state, self.stop, **options
        )
        self.resume = Resume(self.context)

    @property
    def state(self) -> State:
        return self.story.state

    def ask(self, query: RestoreQuery | None = None, **fields: Any) -> Asked:
        """Send this query, or one with these fields."""
        asked = Asked(query or RestoreQuery("q", **fields))
        self.resume.ask(
            asked.query, lambda message, *_: asked.messages.put(message), self.posted.append
        )
        return asked
