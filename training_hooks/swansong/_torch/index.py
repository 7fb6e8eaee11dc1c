# SPDX-License-Identifier: Apache-2.0
"""The index of one rank's tensors: a JSON file with a checksum."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

FORMAT = "swansong.torch/2"
INDEX = "state.json"
_INDEX_FILE = re.compile(rb'\{"crc32":"([0-9a-f]{8})","index":(.*)\}', re.DOTALL)


def encode_index(index: dict[str, Any]) -> bytes:
    """Return the content of an index file, with a CRC-32 of the index.

    Raises:
        ValueError, TypeError: JSON cannot represent the index.
    """
    text = json.dumps(index, allow_nan=False, separators=(",", ":")).encode()
    return b'{"crc32":"%08x","index":%s}' % (zlib.crc32(text), text)


def decode_index(data: bytes) -> dict[str, Any]:
    """Return the index that :func:`encode_index` encoded as ``data``.

    Raises:
        ValueError: the bytes are not an index, or differ from those written.
    """
    match = _INDEX_FILE.fullmatch(data)
    if match is None or int(match[1], 16) != zlib.crc32(match[2]):
        raise ValueError("not an index, or the bytes differ from those written")
    index = json.loads(match[2])
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"not an index of format {FORMAT}")
    return index
