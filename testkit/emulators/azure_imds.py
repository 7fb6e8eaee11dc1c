# SPDX-License-Identifier: Apache-2.0
"""The metadata service of an Azure VM: ``python -m testkit.emulators.azure_imds``.

Its Scheduled Events follow the documentation: an event is *Scheduled* until its time, or until a VM has
approved it; then it is *Started*, without a time; it ends by vanishing.  Control, in addition to
:mod:`testkit.emulators.faults`::

    event      {"type": "Preempt", "in_s": 30}    an event of this VM; also "resources", "id" and
               "duration_s"; returns {"id": ...}
    start      {"id": ...}                        the event has started
    end        {"id": ...}                        the event is over, or withdrawn; {} ends all
    approvals  (GET)                              the ids of events that were approved, in order
"""

from __future__ import annotations

import argparse
import json
import time
import uuid
from email.utils import formatdate
from typing import Any

from testkit.emulators.faults import Emulator, Reply, Request, add_arguments, serve

EVENTS_PATH = "/metadata/scheduledevents"
NAME_PATH = "/metadata/instance/compute/name"
VM_NAME = "trainers_0"


class AzureImds(Emulator):
    """State of one VM."""

    def __init__(self) -> None:
        super().__init__()
        self._events: dict[str, dict[str, Any]] = {}
        self._version = 1
        self._approvals: list[str] = []

    def order(self, name: str, body: dict[str, Any]) -> object:
        if name == "event":
            return {"id": self._add(**body)}
        if name == "start":
            self._start(body["id"])
        elif name == "end":
            for id_ in [body["id"]] if body else list(self._events):
                del self._events[id_]
            self._version += 1
        elif name == "approvals":
            return self._approvals
        else:
            return super().order(name, body)
        return {}

    def _add(self, type: str, in_s: float, **more: Any) -> str:
        id_ = str(more.get("id", uuid.uuid4())).upper()
        self._events[id_] = {
            "EventId": id_,
            "EventType": type,
            "ResourceType": "VirtualMachine",
            "Resources": more.get("resources", [VM_NAME]),
            "EventStatus": "Scheduled",
            "NotBefore": time.time() + in_s,
            "Description": f"Virtual machine: {type}.",
            "EventSource": "Platform",
            "DurationInSeconds": more.get("duration_s", -1),
        }
        self._version += 1
        return id_

    def _start(self, id_: str) -> None:
        event = self._events[id_]
        if event["EventStatus"] != "Started":
            self._version += 1
        event["EventStatus"] = "Started"

    def respond(self, request: Request) -> Reply:
        if request.headers.get("Metadata") != "true":
            return _refused("Bad request. Required metadata header not specified")
        if "api-version" not in request.query:
            return _refused("Bad request. api-version was not specified in the request")
        with self.changed:
            if request.path == NAME_PATH and request.query.get("format") == "text":
                return Reply(200, VM_NAME, {"Content-Type": "text/plain; charset=utf-8"})
            if request.path != EVENTS_PATH:
                return Reply(404, json.dumps({"error": "Not found"}))
            if request.method == "POST":
                return self._approve(request)
            return self._document()

    def _document(self) -> Reply:
        for id_, event in self._events.items():
            if time.time() >= event["NotBefore"]:
                self._start(id_)
        shown = [
            {
                **event,
                "NotBefore": ""
                if event["EventStatus"] == "Started"
                else formatdate(event["NotBefore"], usegmt=True),
            }
            for event in self._events.values()
        ]
        body = json.dumps({"DocumentIncarnation": self._version, "Events": shown})
        return Reply(200, body, {"Content-Type": "application/json; charset=utf-8"})

    def _approve(self, request: Request) -> Reply:
        try:
            asked = [each["EventId"] for each in json.loads(request.body)["StartRequests"]]
        except (ValueError, TypeError, KeyError):
            return _refused("Bad request. The payload is malformed")
        for id_ in asked:
            if id_ not in self._events:
                return _refused("Bad request. Unknown event")
            self._approvals.append(id_)
            self._start(id_)
        return Reply(200)


def _refused(words: str) -> Reply:
    return Reply(400, json.dumps({"error": words}), {"Content-Type": "application/json"})


def main() -> None:
    """Serve until killed, or until standard input closes."""
    parser = argparse.ArgumentParser(prog="azure_imds", description=__doc__.split("\n", 1)[0])
    add_arguments(parser)
    options = parser.parse_args()
    serve(AzureImds(), options.host, options.port)


if __name__ == "__main__":
    main()
