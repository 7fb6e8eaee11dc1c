# SPDX-License-Identifier: Apache-2.0
"""Adversaries in the simulated world of :mod:`testkit.simulation.production`, each with its rights.

A **bucket writer** creates objects below the prefix of the run, while daemons write and tools read: records
and chunks that it derives from the true ones.  It cannot replace or delete.  With a signing key it must
change nothing: all promises of the production world hold, and each tool does the same as without its objects.
Without a key it can take the run over, and must change nothing else: what an honest daemon has stored stays,
each SAFE names intact bytes, and no trainer starts from scratch.

A **hostile user** of ``trainer.users`` sends messages, and writes to staging.  It can spoil the checkpoints
of its run.  All daemons and all stored bytes survive it, it gets no file outside of staging into the bucket,
and the operator's commands are answered.  An **outsider** gets nothing on the socket but a refusal.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import socket
import stat
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from blake3 import blake3
from swansong import bounds, layout, protocol
from swansong_bucket.config.sections import RetentionConfig
from swansong_bucket.errors import SwansongError
from swansong_bucket.format.keys import SIGNED, ManifestPlace, RunKeys
from swansong_bucket.format.manifest import Manifest, decode
from swansong_bucket.mirror.copier import Copier
from swansong_bucket.model import CommitRef
from swansong_bucket.retention.prune import prune
from swansong_bucket.runs.signing import signed
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.transfer.reader import ReadOptions
from swansong_bucket.transfer.restore import restore
from swansong_bucket.transfer.target import RestoreTarget
from swansong_tools.upkeep.repair import repair, repair_manifests
from swansong_tools.upkeep.verify import verify
from swansongd.flush.cutting import ChunkLayout
from swansongd.service import storage
from swansongd.trainers.peers import Peer

from testkit.committed import tree
from testkit.memory_store import MemoryStore
from testkit.records import KEY, record_of
from testkit.simulation.production import FILE_BYTES, LAST, PID, RUN, Training, Vm, World

KEYS = RunKeys(RUN)
USER, OUTSIDER = 4001, 4002
SECRET = b"SECRET " * (FILE_BYTES // 7) + b"." * (FILE_BYTES % 7)
"""A file outside of staging, as large as the files of a checkpoint."""
TASKS_MAX = 80
"""Threads of one daemon."""
DESCRIPTORS_MAX = 700
MEMORY_MAX_BYTES = 400 * 2**20
ENTRIES_MAX = 100
"""Entries in staging to which a hostile user adds more."""
ANSWER_S = 10.0
"""The operator's status query is answered within this time."""
_OPTIONS = ReadOptions(connections=2)
_NUMBERS = [0, -1, 1, 2, 3, 2**31, 10**12, 2**63, 10**30, 0.5, -1.5, float("nan"), float("inf")]
_WORDS = ["", "x", "x" * 200, "\ud800", "../x", "/etc/passwd", "a\0b", "\n", "process-1", RUN, "é"]
_ODD: list[Any] = [*_NUMBERS, *_WORDS, None, True, [], {}, [[]], ["periodic"] * 300, {"a": 1}]


def changed(random: Random, value: Any) -> Any:
    """The value with one change, at any depth."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        name = random.choice(sorted(value))
        if random.random() < 0.1:
            return {each: value[each] for each in value if each != name}
        return {**value, name: changed(random, value[name])}
    if isinstance(value, list) and value and random.random() < 0.9:
        index = random.randrange(len(value))
        new = random.choice([[], [value[index]] * 2, [changed(random, value[index])]])
        return [*value[:index], *new, *value[index + 1 :]]
    if isinstance(value, int) and random.random() < 0.7:
        return value + random.choice([-1, 1, -value, 1000, -value - 1, value])
    return random.choice(_ODD)


def spoilt(random: Random, data: bytes) -> bytes:
    """The bytes, sometimes cut off, extended or replaced."""
    return random.choice(
        [
            *[data] * 12,
            data[: random.randrange(len(data) + 1)],
            data + b" " * random.choice([1, 70_000, 2 * 2**20]),
            b"",
            b"[" * 60_000,
            b"{}",
        ]
    )


class BucketWriter:
    """May list, read and create objects below the prefix of the run.

    Args:
        random: of the seed.
        store: the bucket.
    """

    def __init__(self, random: Random, store: MemoryStore) -> None:
        self._random = random
        self._store = store
        self.planted: set[str] = set()
        # A run without a key ends at the first planted claim, and at the first key of another form.
        actions = [self._commit, self._claim, self._record, self._junk]
        self._actions = [self._commit, *random.sample(actions, random.choice([0, 1, 2, 4]))]

    def act(self) -> None:
        """Create one object, or some that belong together."""
        self._random.choice(self._actions)()

    def _create(self, key: str, data: bytes) -> None:
        if key not in self._store.objects:
            self.planted.add(key)
            with self._store._lock:
                self._store._place(key, data)

    def _keys(self, folder: str) -> list[str]:
        """The keys below a folder, without tags."""
        names = [
            name for name in sorted(self._store.objects) if name.startswith(f"{RUN}/{folder}/")
        ]
        return [f"{match[1]}.json" if (match := SIGNED.fullmatch(name)) else name for name in names]

    def _chosen(self, folder: str) -> tuple[str, dict[str, Any]]:
        """The key and the content of a record below a folder; empty if no record there can be read."""
        names = [
            name for name in sorted(self._store.objects) if name.startswith(f"{RUN}/{folder}/")
        ]
        index = self._random.randrange(max(1, len(names)))
        with suppress(IndexError, ValueError, RecursionError):
            data = self._store.objects[names[index]].partition(b"\nhmac-")[0]
            body = json.loads(data) if len(data) < 50_000 else None
            if isinstance(body, dict):
                return self._keys(folder)[index], body
        return "", {}

    def _put(self, key: str, body: Any) -> None:
        """Create a record, under its key or under one with a tag, with a valid digest or with another one."""
        data = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        if isinstance(body, dict) and self._random.random() < 0.9:
            data = record_of(body)
        tags = [
            match[2] for name in sorted(self._store.objects) if (match := SIGNED.fullmatch(name))
        ]
        if tags and self._random.random() < 0.5:
            key = f"{key.removesuffix('.json')}.{self._random.choice(tags)}.json"
            data += b"\nhmac-sha256:" + b"0" * 64
        self._create(key, spoilt(self._random, data))

    def _commit(self) -> None:
        """A manifest like a true one, of another place, perhaps with other content."""
        random, (source, body) = self._random, self._chosen("commits")
        parsed = KEYS.parse_commit(source)
        if parsed is None:
            return
        step = parsed.ref.step
        if random.random() < 0.5:
            self._poison(body)
        claims = [KEYS.parse_generation(key) or 1 for key in self._keys("generations")]
        top = max([each for each in claims if each < bounds.GENERATION_MAX], default=1)
        node, nodes = random.choice([(0, 1)] * 5 + [(0, 2), (1, 2), (0, 9), (1, 1)])
        place = {
            "generation": random.choice(
                [*[top] * 4, top + 1, max(1, top - 1), bounds.GENERATION_MAX]
            ),
            "step": max(1, step + random.choice([-3, -1, 0, 1, 2, 50, 1000])),
            "kind": random.choice(["periodic", "emergency", "final"]),
            "node": node,
            "nodes": nodes,
        }
        final = "-final" if place["kind"] == "final" else ""
        directory = f"{place['generation']:08d}/{place['step']:012d}{final}"
        key = f"{KEYS.commits}{directory}/{node:05d}-of-{nodes:05d}.json"
        body = body | place
        match random.choice(["", "", "chunks", "shards", "shards", "any"]):
            case "any":
                body = changed(random, body)
            case part if part in body:
                body[part] = changed(random, body[part])
        self._put(key, body)

    def _poison(self, body: dict[str, Any]) -> None:
        """Name chunks of our own in the place of some true ones, with the same digests."""
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # of a spoilt record
            for entry in body["chunks"]:
                name, size = entry
                data = self._store.objects[KEYS.data + name]
                if self._random.random() < 0.7:
                    own = f"{name.rpartition('-')[0]}-p{self._random.randrange(1000)}"
                    bad = self._random.choice(
                        [data, *[b"x" * min(size, 2**20)] * 3, data[:-1], data + b"x", b""]
                    )
                    self._create(KEYS.data + own, bad)
                    entry[:] = [own, max(1, size + self._random.choice([0] * 8 + [-1, 1]))]

    def _claim(self) -> None:
        random, (source, body) = self._random, self._chosen("generations")
        if source:
            top = max(KEYS.parse_generation(key) or 0 for key in self._keys("generations"))
            number = random.choice([top + 1, top + 1, top + 7, bounds.GENERATION_MAX])
            if number <= bounds.GENERATION_MAX:
                start = random.choice([body.get("start"), "planted"])
                self._put(KEYS.generation(number), body | {"generation": number, "start": start})

    def _record(self) -> None:
        """A farewell, a resumption, a pin or a mark of a suspect share."""
        random = self._random
        folder = random.choice(["farewells", "resumptions", "pins", "suspects"])
        key, body = self._chosen(folder)
        ref = CommitRef(random.randrange(1, 9), random.randrange(1, 99))
        pin = {
            "format": "swansong-pin",
            "version": 1,
            "run": RUN,
            "name": "p",
            "generation": ref.generation,
        }
        pin |= {"step": ref.step, "final": False, "note": "", "created": ""}
        made = {"pins": (KEYS.pin("p"), pin), "suspects": (KEYS.suspect(ref, 0), {})}
        if key or folder in made:
            key, body = (key, body) if key else made[folder]
            if random.random() < 0.5:
                body = changed(random, body)
            number = f"{random.randrange(100):08d}"
            self._put(key.replace("00000001", number), body)

    def _junk(self) -> None:
        """A key that no writer formats, or a copy of an object under another key."""
        random = self._random
        names = [
            "junk",
            "",
            "100000000.json",
            "100000000/000000000001/00000-of-00001.json",
            "a/b",
            ".json",
        ]
        folder = random.choice(
            ["commits", "generations", "farewells", "resumptions", "pins", "data"]
        )
        sources = sorted(self._store.objects.values()) or [b""]
        self._create(f"{RUN}/{folder}/{random.choice(names)}", random.choice(sources))


class HostileUser:
    """A user of ``trainer.users`` on one VM, and an outsider: their processes, connections and files."""

    def __init__(self, world: HostileWorld, vm: Vm) -> None:
        self._world, self._random = world, world.random
        self._socket = str(vm.directory / "s")
        self._run = vm.directory / "staging" / RUN
        self.outside = world.directory / f"outside-{vm.name}"
        (self.outside / "rank-00000").mkdir(parents=True)
        for name in ("secret", "rank-00000/weights.bin"):
            (self.outside / name).write_bytes(SECRET)
        self.before = tree(self.outside)
        self._ids = ["", "x", "q1"]
        """Ids of requests and starts that messages contain."""
        self._pids = [PID, world.new_process(), world.new_process()]
        """The first one is the trainer's, which runs code of this user, too."""
        self._connections: list[tuple[int, socket.socket]] = []

    def act(self) -> None:
        actions = [
            self._connect,
            *[self._send] * 6,
            self._read,
            self._hang_up,
            self._flood,
            self._exit,
        ]
        if self._run.exists():
            actions += [self._plant] * 3 + [self._change] * 3
        with suppress(
            OSError, ValueError, LookupError, RecursionError
        ):  # another action has spoilt the file before
            self._random.choice(actions)()

    # ------------------------------------------------------------ the socket

    def _connect(self) -> None:
        uid = self._random.choice([USER, USER, USER, OUTSIDER])
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        connected.bind(self._world.address(uid, self._random.choice(self._pids)))
        connected.connect(self._socket)
        self._connections.append((uid, connected))
        if self._random.random() < 0.9:
            connected.send(json.dumps(self._body(protocol.Hello)).encode())

    def _send(self) -> None:
        for _ in range(self._random.choice([1, 1, 1, 3, 250])):
            if self._connections:
                kind = self._random.choice([*protocol.FROM_TRAINER * 4, *protocol.FROM_DAEMON])
                data = json.dumps(self._body(kind)).encode()
                self._random.choice(self._connections)[1].send(spoilt(self._random, data)[:150_000])
        self._read()

    def _body(self, kind: type[protocol.Message]) -> dict[str, Any]:
        """A message with plausible fields, one of them perhaps changed."""
        random = self._random
        numbers = {"world_size": 1, "local_world_size": 1, "nodes": 1, "rank": 0, "version": 1}
        if random.random() < 0.3:
            numbers |= {"world_size": 2, "nodes": 2, "node": 1, "rank": 1}
        body: dict[str, Any] = {"type": kind.TYPE}
        for field in dataclasses.fields(kind):
            name, of = field.name, str(field.type)
            if name in numbers:
                body[name] = numbers[name]
            elif field.default is dataclasses.MISSING or random.random() < 0.4:
                number = random.choice([0, 1, 5, random.randrange(100)])
                values: dict[str, list[Any]] = {
                    "Id": self._ids,
                    "StartId": self._ids,
                    "GivenId": self._ids,
                    "Text": ["", RUN],
                    "Flag": [True, False],
                    "Report": [{}],
                    "StepDigests": [[], ["5"]],
                    "Capabilities": [["periodic"], ["follow_ups"]],
                    "Prefixes": [[], ["rank-00000"]],
                }
                body[name] = random.choice(values.get(of, [number]))
        return changed(random, body) if random.random() < 0.3 else body

    def _read(self) -> None:
        for uid, connected in self._connections:
            with suppress(BlockingIOError):
                while data := connected.recv(protocol.MAX_MESSAGE_BYTES):
                    answer = json.loads(data)
                    self._world.count(f"got {answer['type']}")
                    found = {
                        v for k, v in answer.items() if k.endswith("id") and isinstance(v, str)
                    }
                    self._ids = sorted({*self._ids[-20:], *found})
                    if answer["type"] == "noted" or (
                        uid == OUTSIDER and answer["type"] != "refused"
                    ):
                        self._world.problems.append(f"user {uid} got {answer}")

    def _hang_up(self) -> None:
        if self._connections:
            self._connections.pop(self._random.randrange(len(self._connections)))[1].close()

    def _flood(self) -> None:
        if self._random.random() < 0.1:
            for _ in range(150 - len(self._connections)):
                self._connect()

    def _exit(self) -> None:
        if self._random.random() < 0.2:
            index = self._random.choice([1, 2])
            self._world.end_process(self._pids[index])
            self._pids[index] = self._world.new_process()

    def close(self) -> None:
        with suppress(OSError):
            self._read()
        while self._connections:
            self._connections.pop()[1].close()
        for pid in self._pids[1:]:
            self._world.end_process(pid)
        if tree(self.outside) != self.before:
            self._world.problems.append("a file outside of staging has changed")

    # ------------------------------------------------------------ staging

    def _entries(self) -> tuple[list[Path], list[Path]]:
        """The entries that this user may change, and the directories of sets in which it may write."""
        names = sorted({*os.listdir(self._run)} - {".swansongd", layout.RESTORED_DIRECTORY})
        entries = [self._run / name for name in names]
        sets = [path for path in entries if path.is_dir() and not path.is_symlink()]
        inner = [path for each in sets for path in sorted(each.rglob("*"))]
        return [*entries, *(p for p in inner if os.path.realpath(p.parent) == str(p.parent))], sets

    def _plant(self) -> None:
        """A new entry of any kind, in the run's directory or in a set."""
        random, (entries, sets), step = self._random, self._entries(), self._random.randrange(60)
        if len(entries) > ENTRIES_MAX:
            return
        names = [
            layout.sealed_name(step, f"h{step}"),
            f"checkpoint-{step}",
            f"step={step}.ckpt",
            "é",
            ".x",
        ]
        parent = random.choice([self._run, *sets])
        path = parent / random.choice(
            [*names, *(layout.partial_name(name) for name in names), "a" * 200]
        )
        if parent is not self._run:
            path = parent / random.choice(["rank-00000.json", "rank-00001.json", "x", "rank-00000"])
        if sets and random.random() < 0.5:
            shutil.copytree(random.choice(sets), path, symlinks=True)
            self._edit_manifest(path, step)
        else:
            self._make(path)

    def _edit_manifest(self, directory: Path, step: int) -> None:
        manifest = directory / layout.rank_manifest_name(0)
        if manifest.exists() and stat.S_ISREG(manifest.lstat().st_mode):
            body = json.loads(manifest.read_bytes())
            if self._random.random() < 0.5 or not isinstance(body, dict):
                body = changed(self._random, body)
            else:
                body["step"] = step
            manifest.write_bytes(spoilt(self._random, json.dumps(body).encode()))

    def _make(self, path: Path) -> None:
        """An entry of any kind under this path, which does not exist."""
        if os.path.lexists(path):
            return
        target = self._random.choice(["secret", "rank-00000", "rank-00000/weights.bin", "missing"])
        match self._random.choice(
            ["link", "link", "hard", "fifo", "sparse", "deep", "file", "socket"]
        ):
            case "link":
                path.symlink_to(self._random.choice([self.outside / target, path, Path("/")]))
            case "hard":
                path.hardlink_to(self._random.choice(self._entries()[0]))
            case "fifo":
                os.mkfifo(path)
            case "sparse":
                with path.open("xb") as file:
                    file.truncate(2**44)
            case "deep":
                path.joinpath(*["d"] * self._random.choice([1, 30])).mkdir(parents=True)
            case "file":
                path.write_bytes(b"x" * self._random.choice([0, 1, FILE_BYTES]))
            case _:
                with socket.socket(socket.AF_UNIX) as made:
                    made.bind(str(path))

    def _change(self) -> None:
        """Change, replace, move or remove a file of a set or a whole set."""
        random, (entries, sets) = self._random, self._entries()
        if not entries:
            return
        path = random.choice(entries)
        facts = path.lstat()
        match random.choice(["edit", "write", "remove", "replace", "replace", "move", "touch"]):
            case "edit" if sets:
                self._edit_manifest(random.choice(sets), random.randrange(60))
            case "write" if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1:
                with path.open("r+b") as file:
                    file.seek(random.choice([0, 0, facts.st_size]))
                    file.write(random.choice([b"", b"x", b"y" * FILE_BYTES]))
            case "move":
                path.rename(
                    path.with_name(random.choice([f"{path.name}.partial", f"{path.name}x", "m"]))
                )
            case "touch":
                os.utime(path, (0, 0), follow_symlinks=False)
            case kind:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
                if kind == "replace":
                    self._make(path)


class _AnyTraining(Training):
    """A training that continues from whatever it gets."""

    def load(self, directory: Path) -> None:
        with suppress(OSError, ValueError):
            found = len(self.world.problems)
            super().load(directory)
            del self.world.problems[found:]


class HostileWorld(World):
    """The production world with one kind of adversary, or with two."""

    users = (os.geteuid(), USER)
    restart_s = 5.0

    all_features = ()

    def __init__(self, seed: int, directory: Path) -> None:
        super().__init__(seed, directory)
        kind = ("signed", "unsigned", "user", "both")[seed % 4]
        self.count(kind)
        self.key = None if kind == "unsigned" else KEY
        self.writer = None if kind == "user" else BucketWriter(self.random, self.store)
        self.has_user = kind in ("user", "both")
        self.is_exact = kind == "signed"
        """Whether all promises of the production world hold."""
        self.honest: dict[str, bytes] = {}
        """The digest of each object of a daemon."""
        self._safe: dict[CommitRef, bytes] = {}
        """The bytes of each commit with a verdict SAFE."""
        self._lives = {PID: os.pipe()}
        """The pipe in the place of the pidfd of each process of an adversary."""
        self._addresses = 0
        self._attack_over = False
        if self.random.random() < 0.7:
            vars(storage)["ChunkLayout"] = partial(ChunkLayout, small_bytes_max=0)

    # ------------------------------------------------------------ the actors

    def new_process(self) -> int:
        pid = PID + len(self._lives)
        self._lives[pid] = os.pipe()
        return pid

    def end_process(self, pid: int) -> None:
        os.close(self._lives[pid][1])

    def address(self, uid: int, pid: int) -> bytes:
        """The address of a socket, which shows the user and the process."""
        self._addresses += 1
        return f"\0{self.directory}/{self._addresses}/{uid}/{pid}".encode()

    def identify(self, connected: Any) -> Peer:
        name = connected.getpeername()
        if not name:
            return super().identify(connected)
        uid, pid = map(int, name.decode().split("/")[-2:])
        return Peer(pid, uid, uid, os.dup(self._lives[pid][0]))

    def _boot(self, number: int) -> Vm:
        vm = super()._boot(number)
        actors: list[Any] = [self.writer] if self.writer is not None else []
        if self.has_user and number != LAST:
            actors.append(HostileUser(self, vm))
        for actor in actors:
            self.schedule.start(partial(self._attack, vm, actor), name="adversary")
        self.schedule.start(partial(self._watch, vm), name="operator")
        return vm

    def _attack(self, vm: Vm, actor: Any) -> None:
        pause_s = self.random.choice([0.05, 0.2, 1.0])
        self.schedule.sleep(self.random.choice([0, 3, 10]))
        while vm.is_on and not self._attack_over:
            self.schedule.sleep(self.random.expovariate(1 / pause_s))
            # A key and no signed commit, but an unsigned one: no start may be fresh, so the run stops.
            may_act = isinstance(actor, HostileUser) or self._commits()
            if vm.is_on and not self._attack_over and may_act:
                actor.act()
        if isinstance(actor, HostileUser):
            actor.close()

    def _watch(self, vm: Vm) -> None:
        """Query the status again and again, and watch the resources of the daemon."""
        while vm.is_on:
            self.schedule.sleep(self.random.expovariate(1 / 5))
            service, life = vm.service, vm.daemons
            if service is None or not hasattr(service._channel, "_listener") or vm.is_frozen:
                continue
            threads = sum(task.group == f"{vm.name}-daemon-{life}" for task in self.schedule.tasks)
            descriptors = len(os.listdir("/proc/self/fd"))
            if threads > TASKS_MAX or descriptors > DESCRIPTORS_MAX:
                self.problems.append(f"{threads} threads and {descriptors} descriptors")
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
            ) as client:
                try:
                    client.connect(str(vm.directory / "s"))
                    client.send(protocol.encode(protocol.StatusQuery()))
                except OSError:
                    continue  # the daemon has just ended
                is_answered = self.schedule.wait(partial(_is_readable, client), ANSWER_S)
                same = vm.service is service and vm.is_on and not vm.is_frozen
                if same and not is_answered and vm.daemon_runs:
                    self.problems.append(f"the operator of {vm.name} got no answer")

    # ------------------------------------------------------------ the production world

    def stores(self) -> tuple[ObjectStore, ObjectStore, ObjectStore | None]:
        return self.store, signed(self.store, self.key), None

    def _calm(self, store: MemoryStore) -> Any:
        return signed(super()._calm(store), self.key)

    def _after(self, store: MemoryStore, what: str, key: str) -> None:
        if what in {"put", "create"}:
            self.honest.setdefault(key, blake3(self.store.objects[key]).digest())
        super()._after(store, what, key)

    def expect_durable(self, vm: Vm, directory: Path) -> None:
        """A user may change its own sets."""
        if not self.has_user:
            super().expect_durable(vm, directory)

    def new_training(self) -> Training:
        return Training(self) if self.is_exact else _AnyTraining(self)

    def may_end(self, what: str) -> bool:
        return what == "trainer" and not self.is_exact

    def read_back(self, store: MemoryStore | None = None) -> tuple[str, int]:
        """Without exact promises: the number of honest manifests."""
        if self.is_exact:
            return super().read_back(store)
        return "", self._commits()

    def _commits(self) -> int:
        """Number of the manifests of daemons."""
        return sum(key.startswith(KEYS.commits) for key in self.honest)

    def resumed(self, vm: Vm, own: str, line: str, step: int, before: tuple[str, int]) -> None:
        if self.is_exact:
            super().resumed(vm, own, line, step, before)
            return
        self.count("resumed" if step else "began")
        if not step and before[1] and not self.has_user:
            self.problems.append(f"{vm.name} started from scratch after {before[1]} commits")

    def check_kept(self, what: str, earlier: str, earlier_step: int, line: str, step: int) -> None:
        if self.is_exact:
            super().check_kept(what, earlier, earlier_step, line, step)

    def log(self, event: dict[str, Any]) -> None:
        super().log(event)
        is_disk_error = event["event"] == "staging_scan_failed" and self.vm.disk_good_at_s
        if (
            event["event"] in ("trainer_message_failed", "staging_scan_failed")
            and not is_disk_error
        ):
            self.problems.append(f"{event}\n{traceback.format_exc()}")

    def _judge(self, event: dict[str, Any]) -> None:
        ref = CommitRef(event["generation"], event["step"])
        with self.schedule.outside():
            self._safe[ref] = self._bytes_of(ref)
        if self.is_exact:
            super()._judge(event)

    def _bytes_of(self, ref: CommitRef) -> bytes:
        """A digest of the bytes of an honest commit, each chunk of which matches its name."""
        digest = blake3()
        places = (KEYS.parts(ref), KEYS.parts(dataclasses.replace(ref, is_final=True)))
        # Without a key, a VM may have resumed from a planted commit.
        committed = self.honest if self.is_exact else self.store.objects
        if not any(key.startswith(places) for key in committed):
            self.problems.append(f"SAFE for {ref}, which no daemon has committed")
        for key in sorted(self.honest):
            if key.startswith(places):
                for shard in self._manifest(key).shards:
                    for extent in shard.extents:
                        start = extent.offset_bytes
                        digest.update(
                            self._chunk(key, extent.chunk)[start : start + extent.size_bytes]
                        )
        return digest.digest()

    def _manifest(self, key: str) -> Manifest:
        return decode(self.store.objects[key].partition(b"\nhmac-sha256:")[0])

    def _chunk(self, key: str, chunk: Any) -> bytes:
        data = self.store.objects.get(chunk.key, b"")
        if len(data) != chunk.size_bytes or blake3(data).digest() != chunk.digest:
            self.problems.append(f"{key} names {chunk}, which is damaged")
        return data

    # ------------------------------------------------------------ the end

    def _calm_end(self) -> None:
        if self.is_exact:
            super()._calm_end()
        else:
            self.fault_share = 0.0
            for vm in [vm for vm in self.vms.values() if vm.is_on]:
                self.schedule.freeze(f"{vm.name}-", is_frozen=False)
                self.schedule.sleep(20)
                vm.power_off()
        self._attack_over = True
        self.schedule.sleep(30)
        with self.schedule.outside():
            self._check_store()
            self._check_tools()

    def _check_store(self) -> None:
        for key, digest in self.honest.items():
            if blake3(self.store.objects.get(key, b"")).digest() != digest:
                self.problems.append(f"{key} of a daemon was replaced or deleted")
            if key.startswith(KEYS.commits):
                manifest = self._manifest(key)
                for chunk in manifest.chunks:
                    self._chunk(key, chunk)
        for ref, digest in self._safe.items():
            if self._bytes_of(ref) != digest:
                self.problems.append(f"{ref} was SAFE, and has other bytes now")
        if any(b"SECRET" in data for data in self.store.objects.values()):
            self.problems.append("the bucket has a file from outside of staging")
        memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if memory_bytes > MEMORY_MAX_BYTES:
            self.problems.append(f"{memory_bytes} bytes of memory")

    def _check_tools(self) -> None:
        """With a key, each tool does the same as without the objects of the adversary."""
        planted = set() if self.writer is None else self.writer.planted
        for name, tool in _TOOLS.items():
            results = []
            for left_out in (set(), planted):
                store = MemoryStore()
                store.url = self.store.url
                store.clock = lambda: self.schedule.wall_s + 40 * 86400
                store.objects = {k: d for k, d in self.store.objects.items() if k not in left_out}
                store.written_unix_s = dict(self.store.written_unix_s)
                try:
                    result = tool(signed(store, self.key))
                except SwansongError as error:
                    result = type(error).__name__
                honest = {key: data for key, data in store.objects.items() if key in self.honest}
                results.append((result, honest))
            if self.key is not None and results[0] != results[1]:
                self.problems.append(f"{name}: {results[0][0]} instead of {results[1][0]}")
            if name != "prune" and results[0][1].keys() != self.honest.keys():
                self.problems.append(f"{name} has deleted an object of a daemon")


def _is_readable(client: socket.socket) -> bool:
    with suppress(OSError):
        return bool(client.recv(1, socket.MSG_PEEK))
    return False


def _restored(store: ObjectStore) -> Any:
    with tempfile.TemporaryDirectory() as name:
        target = Path(name) / "restored"
        result = restore(store, KEYS, RestoreTarget(target), options=_OPTIONS)
        return result.ref, result.skipped, tree(target)


def _verified(store: ObjectStore) -> Any:
    findings = verify(store, KEYS, options=_OPTIONS)
    mirror = MemoryStore()
    repair_manifests(store, KEYS, mirror, _OPTIONS)
    done = repair(store, KEYS, findings.damaged, mirror=mirror, options=_OPTIONS)
    return findings.defects, findings.commits, done


def _mirrored(store: ObjectStore) -> Any:
    mirror = MemoryStore()
    copier = Copier(store, signed(mirror, KEY), KEYS, threading.Event(), connections=2)
    for commit in copier.absent():
        for node in commit.manifest_keys:
            copier.copy(ManifestPlace(commit.ref, node, commit.nodes))
    copier.copy_records()
    return sorted(mirror.objects)


def _pruned(store: ObjectStore) -> Any:
    rules = RetentionConfig(keep_last=1, keep_daily=0, keep_weekly=0)
    report = prune(store, KEYS, rules, now_wall_s=2e9)
    try:
        defects: Any = verify(store, KEYS, options=_OPTIONS).defects
    except SwansongError as error:
        defects = str(error)
    return [(each.ref, each.reasons) for each in report.decisions], defects


_TOOLS: dict[str, Callable[[ObjectStore], Any]] = {
    "restore": _restored,
    "verify": _verified,
    "mirror": _mirrored,
    "prune": _pruned,
}
