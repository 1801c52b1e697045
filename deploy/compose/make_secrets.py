"""Create the passwords, keys and certificates of the sample, once: `make_secrets.py FOLDER SERVERS_FOLDER`.

FOLDER is for Keyvault's own processes. SERVERS_FOLDER is for PostgreSQL, Redis, OpenBao and nginx, which run as other
users, so any user of those containers can read it. Both are volumes that nothing else mounts.
"""

import secrets
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DONE = "complete"
"""File that is written last: without it everything is created again."""

NAMES = {"openbao": ["openbao", "localhost"], "nginx": ["keys.localhost", "console.localhost"]}
LIFETIME = timedelta(days=365)
_SIGNS_CERTIFICATES = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)
"""Key usage of a certificate authority."""


def make_secrets(own: Path, servers: Path) -> None:
    if (own / DONE).exists():
        return
    servers.chmod(0o755)
    postgres, redis, admin = (secrets.token_urlsafe(32) for _ in range(3))
    ca_key, ca = _certificate("Keyvault sample CA", [], None)
    _write(servers / "ca.pem", _pem(ca))
    for name, hosts in NAMES.items():
        key, certificate = _certificate(name, hosts, (ca_key, ca))
        _write(servers / f"{name}.pem", _pem(certificate) + _pem(ca))
        _write(servers / f"{name}.key", _key_pem(key))
    _write(servers / "postgres_password", postgres.encode())
    _write(servers / "redis.conf", f"requirepass {redis}\nappendonly yes\ndir /data\n".encode())
    _write(servers / "openbao_unseal_key", secrets.token_bytes(32))
    _write(servers / "openbao_admin_token", admin.encode())
    for name, text in {
        "ca.pem": _pem(ca).decode(),
        "database_url": f"postgres://keyvault:{postgres}@postgres/keyvault",
        "redis_url": f"redis://:{redis}@redis/0",
        "secret_key": secrets.token_urlsafe(64),
        "openbao_admin_token": admin,
        DONE: "",
    }.items():
        _write(own / name, text.encode(), mode=0o400)


def _certificate(
    name: str, hosts: list[str], issuer: tuple[ec.EllipticCurvePrivateKey, x509.Certificate] | None
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer_key, issuer_name = (issuer[0], issuer[1].subject) if issuer else (key, subject)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(hours=1))
        .not_valid_after(datetime.now(UTC) + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), False)
    else:
        builder = builder.add_extension(_SIGNS_CERTIFICATES, critical=True)
    return key, builder.sign(issuer_key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, mode: int = 0o444) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    path.chmod(mode)


if __name__ == "__main__":
    make_secrets(Path(sys.argv[1]), Path(sys.argv[2]))
