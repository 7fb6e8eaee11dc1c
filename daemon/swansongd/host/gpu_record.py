# SPDX-License-Identifier: Apache-2.0
"""The record of the GPUs as JSON, for the next life of the daemon in this boot."""

from __future__ import annotations

from swansong import bounds
from swansong.bounds import BoundsError
from swansong_bucket.model import CheckpointId, GpuFault, GpuHealth, GpuRecord, GpuStatus
from swansong_bucket.util.forms import (
    ID,
    Form,
    Kind,
    one_of,
    optional,
    seconds,
    several,
    whole,
)
from swansong_bucket.util.printable import printable

from swansongd.core.gpus import KNOWN_MAX

BYTES_MAX = 2**18
_GPUS_MAX = 64
_FAULTS_MAX = 16
_STEPS_MAX = 2**63
_TEXT_MAX = 200

_TEXT = Kind(lambda value, name: str(printable(bounds.text(value, name, _TEXT_MAX))))
_FAULT = Form(GpuFault, cause=_TEXT, health=one_of(GpuHealth), reason=_TEXT, since_mono_s=seconds())
_GPU = Form(
    GpuStatus,
    pci=_TEXT,
    index=whole(-1, 10**6),
    uuid=_TEXT,
    name=_TEXT,
    health=one_of(GpuHealth),
    reason=_TEXT,
    since_mono_s=seconds(),
    faults=several(_FAULT.kind, _FAULTS_MAX),
)


def _set(value: object, name: str) -> CheckpointId:
    pair = bounds.items(value, name, 2)
    if len(pair) != 2:
        raise BoundsError(f"{name} is {bounds.shown(value)}")
    return CheckpointId(bounds.integer(pair[0], "step", 0, _STEPS_MAX), bounds.text(pair[1], name))


RECORD = Form(
    GpuRecord,
    gpus=several(_GPU.kind, _GPUS_MAX),
    log_number=optional(whole(0, 2**63)),
    suspect_starts=several(ID, KNOWN_MAX),
    known_starts=several(ID, KNOWN_MAX),
    sound_sets=several(Kind(_set, lambda each: [each.step, each.nonce]), KNOWN_MAX, frozenset),
)
