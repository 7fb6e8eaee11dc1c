# SPDX-License-Identifier: Apache-2.0
"""Reads the GPUs through NVML, as a program of its own: ``python -m swansongd.sources.nvml``.

A sick driver can block a call forever, and the library can crash.  In a process of its own it takes neither
the daemon nor its file descriptors along.  The program prints one JSON object a line, and ends at the first
error.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import time
from typing import Any

import pynvml as nvml

POLL_S = 2.0
_GPUS_MAX = 1000
"""More than any machine has: the library returned garbage."""
_EVENTS_MAX = 100
_PR_SET_PDEATHSIG = 1


class Probe:
    """One session with NVML."""

    def __init__(self) -> None:
        nvml.nvmlInit()
        self._known: dict[int, dict[str, Any]] = {}
        """By index, the identity of each GPU: a lost one does not report it."""
        self._addresses: dict[int | None, str] = {}
        self._events: Any = None

    def read(self) -> list[dict[str, Any]]:
        """The state of each GPU."""
        count = nvml.nvmlDeviceGetCount()
        if count > _GPUS_MAX:
            raise ValueError(f"the library reports {count} GPUs")
        found = [self._gpu(index) for index in range(count)]
        if self._events is None:
            self._subscribe(count)
        return [gpu for gpu in found if gpu is not None]

    def wait(self) -> list[tuple[str, int]]:
        """The Xids of the next seconds, each with the address of its GPU."""
        found: list[tuple[str, int]] = []
        end = time.monotonic() + POLL_S
        while len(found) < _EVENTS_MAX and (left_s := end - time.monotonic()) > 0:
            if not self._events:
                time.sleep(left_s)
                break
            try:
                data = nvml.nvmlEventSetWait_v2(self._events, max(1, int(left_s * 1000)))
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    time.sleep(left_s)
                break
            if data.eventType == nvml.nvmlEventTypeXidCriticalError:
                found.append((self._addresses.get(_handle_of(data.device), ""), data.eventData))
                end = min(end, time.monotonic() + 0.1)  # report it soon
        return found

    def _gpu(self, index: int) -> dict[str, Any] | None:
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            pci = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
            self._addresses[_handle_of(handle)] = pci
            facts = {
                "index": index,
                "pci": pci,
                "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
                "name": _text(nvml.nvmlDeviceGetName(handle)),
            }
            self._known[index] = facts
            return {**facts, **_state(handle)}
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                name = "is_lost" if error.value == nvml.NVML_ERROR_GPU_IS_LOST else "needs_reset"
                return {**self._known[index], name: True} if index in self._known else None
            raise

    def _subscribe(self, count: int) -> None:
        """Receive Xid events of each GPU that supports them."""
        self._events = False
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError:  # the kernel log has the Xids of this GPU
                continue
            self._events = events


def _state(handle: Any) -> dict[str, Any]:
    remapped = _optional(nvml.nvmlDeviceGetRemappedRows, handle)
    throttle = _optional(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if throttle is None:  # before driver 535
        throttle = _optional(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return {
        "throttle": throttle,
        "uncorrected": _optional(
            nvml.nvmlDeviceGetTotalEccErrors,
            handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        "remaps": remapped is not None,
        "remap_pending": remapped is not None and remapped[2] != 0,
        "remap_failed": remapped is not None and remapped[3] != 0,
        "recovery": _recovery_action(handle),
    }


def _recovery_action(handle: Any) -> int | None:
    values = _optional(
        nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    )
    if values is None or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


def _optional(function: Any, *arguments: Any) -> Any:
    """The value, or None if the GPU or the driver does not have it."""
    try:
        return function(*arguments)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
            raise
        return None


def _handle_of(device: Any) -> int | None:
    return ctypes.cast(device, ctypes.c_void_p).value


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def main() -> int:
    """Print the state of the GPUs until the daemon ends, or an error occurs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    try:
        probe = Probe()
        while True:
            _print({"gpus": probe.read()})
            xids = probe.wait()
            if xids:
                _print({"xids": xids})
    except BrokenPipeError:
        return 0
    except nvml.NVMLError as error:
        no_driver = nvml.NVML_ERROR_DRIVER_NOT_LOADED, nvml.NVML_ERROR_LIBRARY_NOT_FOUND
        _print({"error": str(error), "is_absent": error.value in no_driver})
    except Exception as error:
        _print({"error": f"{error!r:.200}", "is_absent": False})
    return 1


def _print(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
