"""Certificates that are replaced while connections made with the former ones are in use."""

import asyncio
import dataclasses
import gc
import logging
import socket
import ssl
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import grpc
import psutil
import pytest

from baton.cli.certs import Authority, write
from baton.client.client import AsyncClient, Client
from baton.errors import CancelledError, FailedPreconditionError, UnavailableError
from baton.rpc.tls import PemFiles, Tls
from baton.serving.grpc.access import ROUTER_NAME, WORKER_NAME
from baton.serving.grpc.certificates import watched
from baton.serving.grpc.channels import Channels
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import add_InferenceServicer_to_server
from tests.support.router.fake_router import free_port
from tests.support.serving.fakes import ScriptedInference
from tests.support.serving.replacing import replace

# Long enough to be looked at, and to be used.
SHORT = timedelta(seconds=4)
LOOK = 0.3
RELOAD_INTERVAL = 0.1


def tls_of(
    folder, name: str, server_name: str = ROUTER_NAME, reload_interval: float = RELOAD_INTERVAL
) -> Tls:
    files = folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key"
    return Tls(*files, server_name, reload_interval)


class Settings(ServingSettings):
    """Settings of a server that soon notices that its files were replaced."""

    @property
    def tls(self) -> Tls:
        return dataclasses.replace(super().tls, reload_interval=RELOAD_INTERVAL)


async def answer(_request, _context):
    return pb.GetModelResponse(name="there")


async def unary(_request, _context):
    return b"there"


async def streamed(_request, _context):
    for _ in range(60):
        yield b"there"
        await asyncio.sleep(0.1)


@asynccontextmanager
async def serving_with(folder, name: str = "router"):
    """A server of models, and of what workers are asked by routers."""
    own = {"cert": f"{name}.pem", "key": f"{name}.key", "ca": "ca.pem"}
    server = Server(Settings(**{f"tls_{of}": str(folder / f) for of, f in own.items()}))
    server.add(add_InferenceServicer_to_server, ScriptedInference(get_model=answer))
    methods = {
        "Ask": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.unary_stream_rpc_method_handler(streamed),
    }
    handlers = grpc.method_handlers_generic_handler("baton.v1.Prefill", methods)
    server._main.add_generic_rpc_handlers([handlers])
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0.0)


def expiry_shown(server: Server, tls: Tls) -> datetime:
    """Returns the expiry of the certificate that a server shows to a new connection."""
    context = ssl.create_default_context(cafile=tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    context.set_alpn_protocols(["h2"])
    connecting = socket.create_connection(("127.0.0.1", server.port), timeout=5.0)
    with connecting, context.wrap_socket(connecting, server_hostname=tls.server_name) as secured:
        shown = ssl.cert_time_to_seconds(secured.getpeercert()["notAfter"])
    return datetime.fromtimestamp(shown, UTC)


@pytest.mark.slow
async def test_certificates_rotate_under_load_until_old_ones_expire(tmp_path):
    """No call fails, and one that lasts all the while ends as it should."""
    authority = Authority()
    old = {role: authority.issue(role, lifetime=SHORT) for role in ("worker", "router")}
    write(tmp_path, {"ca": authority.own, **old})
    write(tmp_path / "old", {"ca": authority.own, **old})
    expiry = time.monotonic() + SHORT.total_seconds()
    num_done, is_over = 0, False
    tls = tls_of(tmp_path, "router", WORKER_NAME)
    async with serving_with(tmp_path, "worker") as server:
        channels, renewals = Channels(tls=tls), []
        channels.on_renewal(lambda: renewals.append(time.monotonic()))

        async def call_on() -> None:
            nonlocal num_done
            while not is_over:
                ask = channels.get(server.endpoint).unary_unary("/baton.v1.Prefill/Ask")
                assert await ask(b"", timeout=10.0) == b"there"
                num_done += 1
                await asyncio.sleep(0.002)

        async def last() -> int:
            ask = channels.get(server.endpoint).unary_stream("/baton.v1.Prefill/Stream")
            return len([_ async for _ in ask(b"", timeout=30.0)])

        calls = [asyncio.create_task(call_on()) for _ in range(4)]
        lasting = asyncio.create_task(last())
        await asyncio.sleep(0.5)
        replace(tmp_path, **{role: authority.issue(role) for role in old})
        await asyncio.sleep(max(0.0, expiry - time.monotonic()) + 1.0)
        before = num_done
        await asyncio.sleep(0.5)
        is_over = True
        await asyncio.gather(*calls)
        assert await lasting == 60
        assert num_done > before > 0
        assert 1 <= len(renewals) <= 2  # more than one file is replaced
        # Who comes now is shown the new one, and the old one is believed no more.
        shown = await asyncio.to_thread(expiry_shown, server, tls)
        assert shown > datetime.now(UTC) + timedelta(days=300)
        stale = tls_of(tmp_path / "old", "router", WORKER_NAME)
        credentials = PemFiles(stale).current().channel_credentials()
        options = stale.channel_options()
        async with grpc.aio.secure_channel(server.endpoint, credentials, options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/baton.v1.Prefill/Ask")(b"", timeout=10.0)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await channels.close()


async def test_certificate_authority_is_replaced_in_three_steps(tmp_path):
    """Both are believed, then certificates are the new one's, then the old one is not believed."""
    old, new = Authority(), Authority()
    write(tmp_path, {"ca": old.own, **{role: old.issue(role) for role in ("router", "client")}})
    async with (
        serving_with(tmp_path) as server,
        AsyncClient(server.endpoint, tls=tls_of(tmp_path, "client"), timeout=10.0) as client,
    ):
        for step in range(4):
            if step == 1:
                (tmp_path / "ca.pem").write_bytes(old.own.cert + new.own.cert)
            elif step == 2:
                replace(tmp_path, router=new.issue("router"), client=new.issue("client"))
            elif step == 3:
                (tmp_path / "ca.pem").write_bytes(new.own.cert)
            await asyncio.sleep(LOOK if step else 0.0)
            assert (await client.get_model()).name == "there"
        write(tmp_path / "old", {"ca": new.own, "client": old.issue("client")})
        stale = AsyncClient(server.endpoint, tls=tls_of(tmp_path / "old", "client"), timeout=10.0)
        async with stale:
            with pytest.raises(UnavailableError, match="hangs up at once"):
                await stale.get_model()


@pytest.mark.parametrize("kind", ["garbage", "half", "strange", "another role", "gone"])
async def test_certificates_are_kept_when_new_files_are_invalid(tmp_path, kind, caplog):
    authority = Authority()
    write(tmp_path, {"ca": authority.own, "router": authority.issue("router")})
    files = watched(tls_of(tmp_path, "router", reload_interval=0.01))
    before = files.current()
    good = authority.issue("router")
    if kind == "garbage":
        (tmp_path / "router.pem").write_bytes(b"no certificate")
    elif kind == "half":
        (tmp_path / "router.pem").write_bytes(good.cert)
    elif kind == "strange":
        replace(tmp_path, router=Authority().issue("router"))
    elif kind == "another role":
        replace(tmp_path, router=authority.issue("worker"))
    else:
        (tmp_path / "router.key").unlink()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            await asyncio.sleep(0.02)
            assert files.current() is before
        assert len(caplog.records) == 1
        assert "earlier content is kept" in caplog.messages[0]
        replace(tmp_path, router=good)
        await asyncio.sleep(0.02)
        assert files.current().cert == good.cert
        assert "reloaded" in caplog.messages[1]


def test_certificates_are_refused_when_invalid_at_start(tmp_path):
    authority = Authority()
    write(tmp_path, {"ca": authority.own, "router": Authority().issue("router")})
    with pytest.raises(FailedPreconditionError, match="do not verify"):
        watched(tls_of(tmp_path, "router"))
    with pytest.raises(FailedPreconditionError, match="cannot read"):
        Client(tls=Tls(tmp_path / "nowhere.pem"))
    with pytest.raises(FailedPreconditionError, match="come together"):
        Tls("ca.pem", cert="a.pem")


async def test_client_closes_connection_of_replaced_certificate(tmp_path):
    authority = Authority()
    write(
        tmp_path,
        {"ca": authority.own, **{role: authority.issue(role) for role in ("router", "client")}},
    )

    def connections(port: int) -> int:
        found = psutil.Process().net_connections("tcp")
        return sum(c.raddr != () and c.raddr.port == port for c in found)

    def ask_twice(server: Server) -> tuple[int, int]:
        with Client(server.endpoint, tls=tls_of(tmp_path, "client"), timeout=10.0) as client:
            assert client.get_model().name == "there"
            first = connections(server.port)
            replace(tmp_path, client=authority.issue("client"))
            time.sleep(LOOK)
            assert client.get_model().name == "there"
            gc.collect()
            deadline = time.monotonic() + 10.0
            while connections(server.port) != first and time.monotonic() < deadline:
                time.sleep(0.05)
            return first, connections(server.port)

    async with serving_with(tmp_path) as server:
        assert await asyncio.to_thread(ask_twice, server) == (1, 1)


async def test_closed_client_stays_closed_when_certificates_change(tmp_path):
    authority = Authority()
    write(tmp_path, {"ca": authority.own, "client": authority.issue("client")})
    address = f"127.0.0.1:{free_port()}"
    clients = [kind(address, tls=tls_of(tmp_path, "client")) for kind in (Client, AsyncClient)]
    blocking, client = clients
    blocking.close()
    await client.close()
    channels = [each._connections._channels for each in clients]
    replace(tmp_path, client=authority.issue("client"))
    await asyncio.sleep(LOOK)
    for call in (blocking.get_model, lambda: blocking.generate("Hi").text()):
        with pytest.raises(CancelledError, match="client is closed"):
            call()
    with pytest.raises(CancelledError, match="client is closed"):
        await client.get_model()
    with pytest.raises(CancelledError, match="client is closed"):
        await client.generate("Hi").text()
    assert all(each._connections._channels is c for each, c in zip(clients, channels, strict=True))
