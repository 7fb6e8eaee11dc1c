# SPDX-License-Identifier: Apache-2.0
"""A job's store in memory, with the contract of torch's TCPStore and an adjustable delay."""

from __future__ import annotations

import random
import threading


class MemoryJobStore:
    """A store whose connections are all this one object.

    Args:
        delay_s: longest pause before an operation, in seconds; each pause is random.
    """

    def __init__(self, delay_s: float = 0.0, seed: int = 0) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._delay_s = delay_s
        self._random = random.Random(seed)
        self._never = threading.Event()
        self.is_broken = False

    def connect(self) -> MemoryJobStore:
        if self.is_broken:
            raise ConnectionError("no store")
        return self

    def set(self, key: str, value: str) -> None:
        self._pause()
        with self._changed:
            self._put(key, value.encode())

    def get(self, key: str) -> bytes:
        self._pause()
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 10), key
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        self._pause()
        with self._changed:
            value = int(self._values.get(key, b"0")) + amount
            self._put(key, str(value).encode())
            return value

    def check(self, keys: list[str]) -> bool:
        self._pause()
        with self._changed:
            return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._pause()
        with self._changed:
            found = self._values.get(key)
            if found is None and expected:
                return expected.encode()
            if (found or b"") == expected.encode():
                self._put(key, desired.encode())
            return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._changed.notify_all()

    def _pause(self) -> None:
        if self.is_broken:
            raise ConnectionError("the store is gone")
        if self._delay_s:
            self._never.wait(self._random.uniform(0, self._delay_s))
