"""Tenant of a call: by certificate, by token, or anonymous."""

import hashlib
from pathlib import Path

import grpc
import pytest

from baton.cli.certs import Authority, write
from baton.errors import FailedPreconditionError, UnauthenticatedError
from baton.rpc.tls import PemFiles, Tls
from baton.serving.grpc.access import ROUTER_NAME
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.serving.tenant import Tenant, Tenants, is_administrator
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.support.serving.credentials import Call, bearing


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


def test_tenant_follows_from_token(tenants):
    names = {token: tenants.of(bearing(token)).name for token in ("one", "two", "three")}
    assert names == {"one": "acme", "two": "acme", "three": "globex"}
    assert tenants.of(Call(("authorization", "bearer  one"))).name == "acme"


@pytest.mark.parametrize("token", ["four", "One", hash_of("one"), "one,two"])
def test_tenants_refuse_unknown_token_without_repeating_it(tenants, token):
    with pytest.raises(UnauthenticatedError) as caught:
        tenants.of(bearing(token))
    assert token not in str(caught.value)


def test_tenant_is_default_without_credentials(tenants):
    for call in (Call(), Call(("authorization", "Basic b25l")), Call(("tenant", "acme"))):
        assert tenants.of(call) == Tenant("default", b"")
    assert Tenants().of(bearing("one")).name == "default", "no tokens are known at all"


def test_tenant_of_certificate_precedes_token(tenants):
    token = ("authorization", "Bearer three")
    assert tenants.of(Call(token, uris=(b"spiffe://a/baton/client/acme",))).name == "acme"
    for uri in (b"spiffe://a/baton/client", b"spiffe://a/baton/admin", b"spiffe://a/acme"):
        assert tenants.of(Call(token, uris=(uri,))).name == "globex"
        assert tenants.of(Call(uris=(uri,))).name == "default"


def test_admin_certificate_needs_no_token(tmp_path):
    path = tmp_path / "tenants"
    path.write_text(f"{hash_of('one')} acme\n")
    tenants = Tenants.read(path, needs_token=True)
    assert tenants.of(Call(uris=(b"spiffe://a/baton/admin",))).name == "default"
    assert tenants.of(Call(uris=(b"spiffe://a/baton/client/acme",))).name == "acme"
    with pytest.raises(UnauthenticatedError, match="a token is needed"):
        tenants.of(Call(uris=(b"spiffe://a/baton/client",)))


def test_administrator_has_a_certificate_and_no_token():
    admin, client = b"spiffe://a/baton/admin", b"spiffe://a/baton/client"
    assert is_administrator(Call(uris=(admin,)))
    assert not is_administrator(Call(("authorization", "Bearer three"), uris=(admin,)))
    assert not is_administrator(Call(uris=(client,)))
    assert not is_administrator(Call())


def test_tenants_name_owners_of_tokens(tenants):
    assert tenants.names == {"acme", "globex"}
    assert Tenants().names == frozenset()


def test_tenants_have_distinct_salts_unless_they_share(tenants):
    salts = {token: tenants.of(bearing(token)).salt for token in ("one", "two", "three")}
    assert salts["one"] == salts["two"] != salts["three"]
    assert b"" not in salts.values()
    sharing = Tenants(lambda: {hashlib.sha256(b"one").digest(): "acme"}, share_prefixes=True)
    assert sharing.of(bearing("one")) == Tenant("acme", b"")


@pytest.mark.parametrize(
    "content", ["acme", f"{'0' * 63} acme", f"{'0' * 64}", f"{'0' * 64} two words", "token acme"]
)
def test_tenants_file_error_names_line(tmp_path, content):
    path = tmp_path / "tenants"
    path.write_text(f"# first\n{content}\n")
    with pytest.raises(FailedPreconditionError, match="tenants:2 is no line"):
        Tenants.read(path)
    with pytest.raises(FailedPreconditionError, match="cannot read the tenants"):
        Tenants.read(tmp_path / "nowhere")


class WhoAmI(inference_pb2_grpc.InferenceServicer):
    """Answers with the caller's tenant."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    async def GetModel(self, _request, context):  # noqa: N802
        return inference_pb2.GetModelResponse(name=self._tenants.of(context).name)


async def test_tenant_follows_from_certificate_over_mutual_tls(tmp_path, tenants):
    authority = Authority()
    issued = {"server": authority.issue("router"), "acme": authority.issue("client", "acme")}
    write(tmp_path, {"ca": authority.own, **issued, "admin": authority.issue("admin")})
    files = {"tls_cert": "server.pem", "tls_key": "server.key", "tls_ca": "ca.pem"}
    server = Server(ServingSettings(**{name: str(tmp_path / f) for name, f in files.items()}))
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, WhoAmI(tenants))
    await server.start()
    forged, names = (("authorization", "Bearer three"),), {}
    try:
        for who in ("acme", "admin"):
            tls = Tls(*(tmp_path / name for name in ("ca.pem", f"{who}.pem", f"{who}.key")))
            shown = PemFiles(tls).current().channel_credentials()
            options = [("grpc.ssl_target_name_override", ROUTER_NAME)]
            async with grpc.aio.secure_channel(server.endpoint, shown, options) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                request = inference_pb2.GetModelRequest()
                names[who] = (await stub.GetModel(request, metadata=forged, timeout=10.0)).name
    finally:
        await server.stop(0.0)
    assert names == {"acme": "acme", "admin": "globex"}


def test_salt_of_a_text_is_the_tenants_own():
    tenants = [Tenant("a", b"1"), Tenant("b", b"2"), Tenant()]
    salts = {tenant.salted(text).salt for tenant in tenants for text in ("x", "y")}
    assert len(salts) == 6
    assert all(tenant.salted("") == tenant for tenant in tenants)
    assert [tenant.salted("x").name for tenant in tenants] == [tenant.name for tenant in tenants]
