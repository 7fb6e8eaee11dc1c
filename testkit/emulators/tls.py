# SPDX-License-Identifier: Apache-2.0
"""Creates a certificate authority, and a server's key and certificate."""

from __future__ import annotations

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


def make(folder: Path) -> tuple[Path, Path]:
    """Write the authority's certificate, and key with certificate of 127.0.0.1 and localhost."""
    now = datetime.now(UTC)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name, name = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])
        for text in ("authority of the tests", "127.0.0.1")
    )

    def begun(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(ca_name, subject, public, x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
                critical=False,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )

    authority = (
        begun(ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_signs(), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    names: list[x509.GeneralName] = [
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        x509.DNSName("localhost"),
        x509.DNSName("checkpoints.localhost"),  # a bucket; OpenSSL accepts no wildcard here
    ]
    server = (
        begun(name, key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    ca, pem = folder / "ca.pem", folder / "server.pem"
    ca.write_bytes(authority.public_bytes(Encoding.PEM))
    pem.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + server.public_bytes(Encoding.PEM)
    )
    return ca, pem


def server_context(pem: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return context


def _signs() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip
