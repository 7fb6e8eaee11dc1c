# SPDX-License-Identifier: Apache-2.0
"""A service account of Google, whose tokens come from the server of a test."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


@cache
def _private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def write(path: Path, token_url: str, key_id: str = "1") -> None:
    """Write the key file of the account."""
    account = {
        "type": "service_account",
        "project_id": "project",
        "client_email": "trainer@project.iam.gserviceaccount.com",
        "private_key": _private_key(),
        "private_key_id": key_id,
        "token_uri": token_url,
    }
    path.write_text(json.dumps(account))
