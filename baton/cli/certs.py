"""`baton certs`: an authority for trials, and certificates of all roles that it has signed.

Operators with an authority of their own do not need it; docs/tls.md describes the certificates.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from baton.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError
from baton.installation import install_command
from baton.serving.grpc.access import ROUTER_NAME, WORKER_NAME, Role, identity_in

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise FailedPreconditionError(
        f"certificates need the package cryptography; {install_command('local')}"
    ) from error

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

# Tolerated clock skew.
_SKEW = timedelta(minutes=5)
_SERVERS: dict[Role, str] = {
    "router": ROUTER_NAME,
    "encode": WORKER_NAME,
    "prefill": WORKER_NAME,
    "decode": WORKER_NAME,
    "worker": WORKER_NAME,
}
_ROLES: tuple[Role, ...] = ("router", "worker", "encode", "prefill", "decode", "client", "admin")
_DOMAIN = "baton.invalid"


@dataclass(frozen=True, slots=True)
class Issued:
    """Certificate and its private key, as PEM."""

    cert: bytes
    key: bytes


class Authority:
    """Certificate authority. Keys are of the curve P-256."""

    def __init__(self, lifetime: timedelta = timedelta(days=365)) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Baton, for trials")])
        public = self._key.public_key()
        self._key_id = x509.SubjectKeyIdentifier.from_public_key(public)
        cert = (
            self._builder(public, lifetime)
            .subject_name(self._name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(self._key_id, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.own = Issued(cert.public_bytes(Encoding.PEM), _pem(self._key))

    def issue(
        self,
        role: Role,
        tenant: str | None = None,
        *,
        hosts: Iterable[str] = (),
        begins_in: timedelta = -_SKEW,
        lifetime: timedelta = timedelta(days=365),
    ) -> Issued:
        """Issues a certificate of `role`, valid between `begins_in` and `lifetime` from now.
        `hosts`: names by which clients reach a server."""
        key = ec.generate_private_key(ec.SECP256R1())
        path = role if tenant is None else f"{role}/{tenant}"
        uri = f"spiffe://{_DOMAIN}/baton/{path}"
        if identity_in([uri]) is None:
            raise InvalidArgumentError(
                "--tenant", f"is {tenant!r}; must be 1 to 64 letters, digits, dots, - and _"
            )
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)]
        if role in _SERVERS:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
            names += [x509.DNSName(_SERVERS[role]), *map(_general_name, hosts)]
        cert = (
            self._builder(key.public_key(), lifetime, begins_in)
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"baton {role}")]))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._key_id),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return Issued(cert.public_bytes(Encoding.PEM), _pem(key))

    def _builder(
        self, public: ec.EllipticCurvePublicKey, lifetime: timedelta, begins_in: timedelta = -_SKEW
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins_in)
            .not_valid_after(now + lifetime)
        )


def make(folder: Path, hosts: Sequence[str], tenants: Sequence[str], days: int) -> list[Path]:
    """Writes NAME.pem and NAME.key for `ca`, every role and each `client-TENANT`, readable by the
    user alone. Returns the files.

    `hosts`: names by which clients reach the router. Raises `AlreadyExistsError`, before any file
    is written, if one of them exists.
    """
    lifetime = timedelta(days=days)
    authority = Authority(lifetime)
    issued = {"ca": authority.own}
    for role in _ROLES:
        names = (*LOCAL_HOSTS, *hosts) if role == "router" else ()
        issued[role] = authority.issue(role, hosts=names, lifetime=lifetime)
    for tenant in tenants:
        issued[f"client-{tenant}"] = authority.issue("client", tenant, lifetime=lifetime)
    return write(folder, issued)


def write(folder: Path, issued: Mapping[str, Issued]) -> list[Path]:
    """Writes certificates and keys, by name, as `make` does."""
    contents = {}
    for name, one in issued.items():
        contents[folder / f"{name}.pem"] = one.cert
        contents[folder / f"{name}.key"] = one.key
    existing = [path for path in contents if path.exists()]
    if existing:
        raise AlreadyExistsError(f"{existing[0]} already exists; no file was written")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, content in contents.items():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    return list(contents)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
