"""Access control by role: real connections, certificates of every role."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import get_args

import grpc
import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509 import (
    CertificateBuilder,
    SubjectAlternativeName,
    UniformResourceIdentifier,
    load_pem_x509_certificate,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.certs import Authority, Issued, write
from baton.errors import FailedPreconditionError, UnavailableError
from baton.rpc.errors import error_of
from baton.rpc.tls import PemFiles, Tls
from baton.serving.grpc.access import (
    ANY_CALLER,
    CALLERS,
    ROUTER_NAME,
    WORKER_NAME,
    Identity,
    Role,
    identity_in,
)
from baton.serving.grpc.certificates import check_role, read_certificate
from baton.serving.grpc.channels import channel_options
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from tests.support.repository import ROOT

PROTOS = ROOT / "protos"
ROLES: tuple[Role, ...] = get_args(Role)
CA = Authority()


def test_access_table_names_callers_of_every_service():
    defined = set()
    for proto in PROTOS.rglob("*.proto"):
        text = proto.read_text()
        (package,) = re.findall(r"^package (\S+);", text, re.MULTILINE)
        defined |= {f"{package}.{name}" for name in re.findall(r"^service (\w+)", text, re.M)}
    assert set(CALLERS) == defined
    assert not set(ANY_CALLER) & defined
    for roles in CALLERS.values():
        assert set(roles) < set(ROLES)


@pytest.mark.parametrize(
    ("uris", "identity"),
    [
        (["spiffe://a/baton/router"], Identity("router")),
        (["spiffe://a.b.example/baton/client/acme-1"], Identity("client", "acme-1")),
        (["https://x/y", "spiffe://a/other/thing", "spiffe://a/baton/admin"], Identity("admin")),
        (["spiffe://a/baton/router", "spiffe://a/baton/client"], None),
        (["spiffe://a/baton/root"], None),
        (["spiffe://a/baton/router/acme"], None),
        (["spiffe://a/baton/client/"], None),
        (["spiffe://a/baton/client/a/b"], None),
        (["spiffe://a/baton/client/a b"], None),
        (["spiffe://a/x/baton/router"], None),
        (["spiffe:///baton/router"], None),
        (["https://a/baton/router"], None),
        (["spiffe://a/baton/router\n"], None),
        ([], None),
    ],
)
def test_identity_comes_from_single_baton_uri(uris, identity):
    assert identity_in(uris) == identity


def files(folder: Path, **issued: Issued) -> Path:
    """Those, and `ca`."""
    write(folder, {"ca": CA.own, **issued})
    return folder


def tls_of(folder: Path, name: str, server_name: str | None = WORKER_NAME) -> Tls:
    return Tls(
        folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key", server_name=server_name
    )


@asynccontextmanager
async def server_of_everything(folder: Path, name: str = "server", **options):
    """A server of a method `Ask` of every service, with the certificate of this name."""
    tls = {f"tls_{k}": str(folder / f) for k, f in
           {"cert": f"{name}.pem", "key": f"{name}.key", "ca": "ca.pem"}.items()}  # fmt: skip
    server = Server(ServingSettings(**tls), **options)

    async def ask(_request, _context):
        return b"said"

    method = grpc.unary_unary_rpc_method_handler(ask)
    for service in CALLERS:
        handler = grpc.method_handlers_generic_handler(service, {"Ask": method})
        server._main.add_generic_rpc_handlers([handler])
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0.0)


@asynccontextmanager
async def channel_of(server: Server, tls: Tls) -> AsyncIterator[grpc.aio.Channel]:
    credentials = PemFiles(tls).current().channel_credentials()
    options = [*channel_options(), *tls.channel_options()]
    async with grpc.aio.secure_channel(server.endpoint, credentials, options) as channel:
        yield channel


async def code_of(channel: grpc.aio.Channel, service: str) -> tuple[str, str]:
    """The status of a call, and what was said of it."""
    try:
        await channel.unary_unary(f"/{service}/Ask")(b"", timeout=10.0)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


async def test_roles_reach_their_services_and_no_others(tmp_path):
    issued = {role: CA.issue(role) for role in ROLES}
    folder = files(tmp_path, server=CA.issue("worker"), **issued)
    async with server_of_everything(folder) as server:
        for role in ROLES:
            async with channel_of(server, tls_of(folder, role)) as channel:
                for service, roles in CALLERS.items():
                    code, said = await code_of(channel, service)
                    assert code == ("OK" if role in roles else "PERMISSION_DENIED"), service
                    if role not in roles:
                        assert said.startswith(f"{service} is for {' and '.join(roles)}; ")
                        assert said.endswith(f"is for {role}")
                stub = health_pb2_grpc.HealthStub(channel)
                assert await stub.Check(health_pb2.HealthCheckRequest(), timeout=10.0)


async def test_server_ignores_claimed_role(tmp_path):
    """A caller's own claims count for nothing, nor does a name or another domain's path."""
    other = Authority()
    folder = files(
        tmp_path, server=CA.issue("worker"), client=CA.issue("client", "router", hosts=["router"])
    )
    write(tmp_path / "other", {"ca": CA.own, "router": other.issue("router")})
    async with server_of_everything(folder) as server:
        async with channel_of(server, tls_of(folder, "client")) as channel:
            ask = channel.unary_unary("/baton.v1.Prefill/Ask")
            metadata = (("role", "router"), ("x-forwarded-client-cert", "spiffe://a/baton/router"))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(b"", metadata=metadata, timeout=10.0)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        async with channel_of(server, tls_of(tmp_path / "other", "router")) as channel:
            assert (await code_of(channel, "baton.v1.Prefill"))[0] == "UNAVAILABLE"


async def test_server_names_missing_role_of_certificate(tmp_path, roleless):
    folder = files(tmp_path, server=CA.issue("worker"), roleless=roleless)
    async with (
        server_of_everything(folder) as server,
        channel_of(server, tls_of(folder, "roleless")) as channel,
    ):
        code, said = await code_of(channel, "baton.v1.Inference")
        assert code == "UNAUTHENTICATED"
        assert "baton.v1.Inference is for client and admin" in said
        stub = health_pb2_grpc.HealthStub(channel)
        assert await stub.Check(health_pb2.HealthCheckRequest(), timeout=10.0)


@pytest.fixture
def roleless() -> Issued:
    """A certificate of the authority that says nothing of ours: a router's with another name."""
    issued = CA.issue("router")
    cert, key = load_pem_x509_certificate(issued.cert), load_pem_private_key(CA.own.key, None)
    builder = CertificateBuilder(
        cert.issuer, cert.subject, cert.public_key(), cert.serial_number,
        cert.not_valid_before_utc, cert.not_valid_after_utc,
    )  # fmt: skip
    for extension in cert.extensions:
        value = extension.value
        if isinstance(value, SubjectAlternativeName):
            others = [name for name in value if not isinstance(name, UniformResourceIdentifier)]
            elsewhere = UniformResourceIdentifier("spiffe://x/elsewhere/baton/router")
            value = SubjectAlternativeName([elsewhere, *others])
        builder = builder.add_extension(value, extension.critical)
    return Issued(builder.sign(key, SHA256()).public_bytes(Encoding.PEM), issued.key)


PAST = {"begins_in": timedelta(days=-2), "lifetime": timedelta(days=-1)}


@pytest.mark.parametrize("what", ["another authority", "expired", "not yet", "none", "no TLS"])
async def test_server_refuses_untrusted_client(tmp_path, what):
    folder = files(
        tmp_path,
        server=CA.issue("router"),
        expired=CA.issue("client", **PAST),
        later=CA.issue("client", begins_in=timedelta(days=1)),
        stranger=Authority().issue("client"),
    )
    names = {"another authority": "stranger", "expired": "expired", "not yet": "later"}
    async with server_of_everything(folder) as server:
        if what in names:
            opened = channel_of(server, tls_of(folder, names[what], ROUTER_NAME))
        elif what == "none":
            opened = channel_of(server, Tls(folder / "ca.pem", server_name=ROUTER_NAME))
        else:
            opened = grpc.aio.insecure_channel(server.endpoint, channel_options())
        async with opened as channel:
            ask = channel.unary_unary("/baton.v1.Inference/Ask")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(b"", timeout=10.0)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    error = error_of(caught.value)
    assert isinstance(error, UnavailableError)
    assert "wants TLS, a certificate, or another one than was shown" in str(error)


async def test_client_refuses_untrusted_server_and_says_why(tmp_path):
    folder = files(tmp_path, server=CA.issue("router"), client=CA.issue("client"))
    write(tmp_path / "other", {"ca": Authority().own})
    tls = tls_of(folder, "client", ROUTER_NAME)
    refusals = {
        "no trusted authority has signed": Tls(
            tmp_path / "other" / "ca.pem", tls.cert, tls.key, ROUTER_NAME
        ),
        "is for another name than it was asked for": tls_of(folder, "client", WORKER_NAME),
    }
    async with server_of_everything(folder) as server:
        for words, refused in refusals.items():
            async with channel_of(server, refused) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary("/baton.v1.Inference/Ask")(b"", timeout=10.0)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert words in str(error_of(caught.value))
    plain = Server(ServingSettings())
    await plain.start()
    try:
        async with channel_of(plain, tls) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/baton.v1.Inference/Ask")(b"", timeout=10.0)
        assert "the other side speaks no TLS" in str(error_of(caught.value))
    finally:
        await plain.stop(0.0)


async def test_token_auth_asks_no_certificate_and_denies_other_calls(tmp_path):
    folder = files(tmp_path, server=CA.issue("router"), admin=CA.issue("admin"))
    by_token = ("baton.v1.Inference",)
    async with server_of_everything(folder, by_token=by_token) as server:
        tls = Tls(folder / "ca.pem", server_name=ROUTER_NAME)
        async with channel_of(server, tls) as channel:
            assert await code_of(channel, "baton.v1.Inference") == ("OK", "")
            for service in set(CALLERS) - set(by_token):
                assert (await code_of(channel, service))[0] == "UNAUTHENTICATED"
        async with channel_of(server, tls_of(folder, "admin", ROUTER_NAME)) as channel:
            assert (await code_of(channel, "baton.v1.Admin"))[0] == "UNAUTHENTICATED"


def test_check_role_refuses_unfit_own_certificate(tmp_path, roleless):
    folder = files(
        tmp_path,
        router=CA.issue("router"),
        worker=CA.issue("worker"),
        prefill=CA.issue("prefill"),
        client=CA.issue("client"),
        expired=CA.issue("router", **PAST),
        stranger=Authority().issue("router"),
        roleless=roleless,
    )
    check_role(tls_of(folder, "router"), ("router",), ROUTER_NAME)
    check_role(tls_of(folder, "worker"), ("decode", "worker"), WORKER_NAME)
    check_role(None, ("router",), ROUTER_NAME)

    def refusal(tls: Tls, role: Role, name: str = WORKER_NAME) -> str:
        with pytest.raises(FailedPreconditionError) as caught:
            check_role(tls, (role, "worker"), name)
        return str(caught.value)

    assert "has expired" in refusal(tls_of(folder, "expired"), "router")
    assert "do not verify" in refusal(tls_of(folder, "stranger"), "router")
    sentence = refusal(tls_of(folder, "prefill"), "decode")
    assert "is for prefill" in sentence
    assert "spiffe://example.org/baton/decode or /baton/worker" in sentence
    assert "not for the DNS name baton-worker" in refusal(tls_of(folder, "router"), "router")
    assert "certificate purpose" in refusal(tls_of(folder, "client"), "router")
    assert "is for no role" in refusal(tls_of(folder, "roleless"), "router")
    mixed = Tls(folder / "ca.pem", folder / "router.pem", folder / "worker.key")
    assert "key values mismatch" in refusal(mixed, "router")
    missing = Tls(folder / "ca.pem", folder / "nowhere.pem", folder / "worker.key")
    assert "no such file" in refusal(missing, "router")


def test_read_certificate_returns_identity_and_names(tmp_path):
    folder = files(tmp_path, router=CA.issue("router", hosts=["baton.example", "10.0.0.1"]))
    certificate = read_certificate(tls_of(folder, "router"))
    assert certificate.identity == Identity("router")
    assert certificate.names == {"baton-router", "baton.example"}
