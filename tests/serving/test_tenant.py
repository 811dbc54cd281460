"""Whose a call is, by certificate, by token, or nobody's in particular."""

import hashlib
import subprocess
from pathlib import Path

import grpc
import pytest

from baton.errors import FailedPreconditionError, UnauthenticatedError
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.serving.tenant import Tenant, Tenants
from baton.v1 import admin_pb2, admin_pb2_grpc


class Call:
    """A call with the credentials that a test gives it."""

    def __init__(self, *metadata: tuple[str, str], identities: tuple[bytes, ...] = ()) -> None:
        self._metadata = metadata
        self._identities = identities

    def peer_identities(self):
        return self._identities or None

    def invocation_metadata(self):
        return self._metadata


def bearing(token: str) -> Call:
    return Call(("user-agent", "x"), ("authorization", f"Bearer {token}"))


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    path = tmp_path / "tenants"
    path.write_text(
        f"# who\n\n{hash_of('one')} acme\n{hash_of('two').upper()}   acme # a second one\n"
        f"{hash_of('three')}\tglobex\n"
    )
    return Tenants.read(path)


def test_a_token_tells_its_tenant(tenants):
    names = {token: tenants.of(bearing(token)).name for token in ("one", "two", "three")}
    assert names == {"one": "acme", "two": "acme", "three": "globex"}
    assert tenants.of(Call(("authorization", "bearer  one"))).name == "acme"


@pytest.mark.parametrize("token", ["four", "One", hash_of("one"), "one,two"])
def test_a_token_that_nobody_was_given_is_refused_and_not_repeated(tenants, token):
    with pytest.raises(UnauthenticatedError) as caught:
        tenants.of(bearing(token))
    assert token not in str(caught.value)


def test_who_shows_nothing_is_the_default_tenant(tenants):
    for call in (Call(), Call(("authorization", "Basic b25l")), Call(("tenant", "acme"))):
        assert tenants.of(call) == Tenant("default", b"")
    assert Tenants().of(bearing("one")).name == "default", "no tokens are known at all"


def test_a_certificate_goes_before_a_token(tenants):
    call = Call(("authorization", "Bearer three"), identities=(b"b.example", b"a.example"))
    assert tenants.of(call).name == "a.example"


def test_tenants_are_salted_apart_unless_they_share(tenants):
    salts = {token: tenants.of(bearing(token)).salt for token in ("one", "two", "three")}
    assert salts["one"] == salts["two"] != salts["three"]
    assert b"" not in salts.values()
    sharing = Tenants(lambda: {hashlib.sha256(b"one").digest(): "acme"}, share_prefixes=True)
    assert sharing.of(bearing("one")) == Tenant("acme", b"")


@pytest.mark.parametrize(
    "content", ["acme", f"{'0' * 63} acme", f"{'0' * 64}", f"{'0' * 64} two words", "token acme"]
)
def test_a_file_that_cannot_be_read_names_the_line(tmp_path, content):
    path = tmp_path / "tenants"
    path.write_text(f"# first\n{content}\n")
    with pytest.raises(FailedPreconditionError, match="tenants:2 is no line"):
        Tenants.read(path)
    with pytest.raises(FailedPreconditionError, match="cannot read the tenants"):
        Tenants.read(tmp_path / "nowhere")


class WhoAmI(admin_pb2_grpc.AdminServicer):
    """Answers with the caller's tenant."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    async def GetLoad(self, request, context):  # noqa: N802
        return admin_pb2.GetLoadResponse(phase=self._tenants.of(context).name)


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def certified(folder: Path, name: str) -> None:
    """A key and a certificate of the authority there."""
    subject = ["-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-subj", f"/CN={name}"]
    openssl(folder, "req", *subject, "-out", f"{name}.csr", "-addext", f"subjectAltName=DNS:{name}")
    signed = ["-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"]
    openssl(folder, "x509", "-req", *signed, "-out", f"{name}.pem", "-copy_extensions", "copy")


async def test_over_mutual_tls_the_certificate_tells(tmp_path, tenants):
    authority = ["-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-subj", "/CN=authority"]
    openssl(tmp_path, "req", "-x509", *authority, "-out", "ca.pem")
    certified(tmp_path, "localhost")
    certified(tmp_path, "acme.example")
    content = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    files = {"tls_cert": "localhost.pem", "tls_key": "localhost.key", "tls_ca": "ca.pem"}
    server = Server(ServingSettings(**{name: str(tmp_path / f) for name, f in files.items()}))
    server.add(admin_pb2_grpc.add_AdminServicer_to_server, WhoAmI(tenants))
    await server.start()
    shown = grpc.ssl_channel_credentials(
        content["ca.pem"], content["acme.example.key"], content["acme.example.pem"]
    )
    options = [("grpc.ssl_target_name_override", "localhost")]
    try:
        async with grpc.aio.secure_channel(server.endpoint, shown, options) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            forged = (("authorization", "Bearer three"),)
            answer = await stub.GetLoad(admin_pb2.GetLoadRequest(), metadata=forged, timeout=10.0)
    finally:
        await server.stop(0.0)
    assert answer.phase == "acme.example"
