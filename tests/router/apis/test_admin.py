"""Administration of a cluster through its router."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from baton.cluster.prefix import PrefixNamespace
from baton.errors import BatonError, InternalError, InvalidArgumentError, UnavailableError
from baton.models.images.encoder_input import EncoderInput, TensorData
from baton.serving.grpc.channels import Channels
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.serving.tenant import Tenant, Tenants
from baton.v1 import admin_pb2 as pb
from baton.v1.admin_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from baton_router.apis.grpc.admin import RouterAdmin
from baton_router.apis.grpc.call_wire import CallReader
from baton_router.call.generate_call import PromptTokens
from baton_router.call.prompt import Prompt
from baton_router.lifecycle.in_flight import Requests
from baton_router.text.images.image_reader import FileKey, ImageCache
from tests.support.router.scripted import fleet_of, lifecycle_of
from tests.support.serving.credentials import Call

ALL = pb.FlushCacheRequest()
EVERY = pb.ListRequestsRequest()


class _Worker(AdminServicer):
    """A worker that flushes its blocks, or fails; also its own `Member`."""

    def __init__(self, name: str, error: BatonError | None = None, *, drains: bool = False) -> None:
        self.record = SimpleNamespace(id=name)
        self.is_serving = not drains
        self.namespace = PrefixNamespace(b"m", b"t", "float32", 4)
        self.num_blocks = 3
        self.flushed = b""
        self._error = error

    async def FlushCache(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self._error is not None:
            raise self._error
        self.flushed = request.block_hashes
        num_blocks, self.num_blocks = self.num_blocks, 0
        return pb.FlushCacheResponse(num_blocks=num_blocks)

    async def GetMemory(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self._error is not None:
            raise self._error
        return pb.GetMemoryResponse(workers=[pb.WorkerMemory(worker=self.record.id)])


class _Fleet:
    """Workers, each behind a server."""

    def __init__(self, members: list[_Worker]) -> None:
        self.members = members
        self.endpoints: dict[str, str] = {}
        self.channels = Channels()

    @contextmanager
    def admin_channel_to(self, member: _Worker) -> Iterator[grpc.aio.Channel]:
        yield self.channels.get(self.endpoints[member.record.id])


class _Models(list[Any]):
    def of(self, _name: str) -> Any:
        return self[0]


class _Intake:
    """Intake of prompts with one image each."""

    def __init__(self) -> None:
        self.images = SimpleNamespace(cache=ImageCache(1000))
        for salt in b"", b"a":
            image = SimpleNamespace(tensors={"pixels": TensorData("uint8", (4,), b"1234")})
            self.images.cache.put(FileKey(salt, b"file", 1), [image])  # type: ignore[list-item]

    def forget(self, salt: bytes | None, *, images: bool) -> None:
        if images:
            self.images.cache.drop(salt)

    async def prompt_of(self, _message: Any, tenant: Any) -> PromptTokens:
        return PromptTokens(list(range(9)), (EncoderInput(b"i" * 16, 2, 3),))


@pytest.fixture
async def admin_of():
    """Returns the router's administration of these workers."""
    servers, fleets = [], []

    async def admin_of(*workers: _Worker) -> RouterAdmin:
        fleet = _Fleet(list(workers))
        for worker in workers:
            server = Server(ServingSettings())
            server.add(add_AdminServicer_to_server, worker)
            await server.start()
            fleet.endpoints[worker.record.id] = server.endpoint
            servers.append(server)
        fleets.append(fleet)
        tenants = SimpleNamespace(of=lambda _context: SimpleNamespace(salt=b""))
        models = _Models([SimpleNamespace(services=SimpleNamespace(fleet=fleet, intake=_Intake()))])
        return RouterAdmin(models, None, None, None, tenants, CallReader(1000), list)  # type: ignore[arg-type]

    yield admin_of
    for fleet in fleets:
        await fleet.channels.close()
    for server in servers:
        await server.stop(0.0)


async def test_administrator_lists_requests_of_all_tenants():
    requests = Requests([])
    async with fleet_of() as fleet:
        for name in ("acme", "globex"):
            requests.add(lifecycle_of(fleet, tenant=Tenant(name)))
    tenants = Tenants(lambda: {sha256(b"one").digest(): "acme"})
    admin = RouterAdmin(None, None, requests, None, tenants, CallReader(1000), list)  # type: ignore[arg-type]

    async def listed(*metadata: tuple[str, str], role: bytes) -> list[str]:
        call = Call(*metadata, uris=(b"spiffe://a/baton/" + role,))
        return [one.tenant for one in (await admin.ListRequests(EVERY, call)).requests]

    assert await listed(role=b"admin") == ["acme", "globex"]
    assert await listed(("authorization", "Bearer one"), role=b"admin") == ["acme"]
    assert await listed(role=b"client") == []


async def test_flush_reaches_draining_workers_too(admin_of):
    workers = _Worker("p0"), _Worker("d0", drains=True)
    admin = await admin_of(*workers)
    assert (await admin.FlushCache(ALL, None)).num_blocks == 6
    assert [worker.num_blocks for worker in workers] == [0, 0]


async def test_flush_covers_images_of_a_prompt(admin_of):
    worker = _Worker("p0")
    admin = await admin_of(worker)
    cache = admin._models[0].services.intake.images.cache
    await admin.FlushCache(pb.FlushCacheRequest(text="a prompt"), None)
    without_image = Prompt(tuple(range(9))).hashes(worker.namespace)
    hashes = [worker.flushed[i : i + 16] for i in range(0, len(worker.flushed), 16)]
    assert len(hashes) == 3
    assert hashes[2] == b"i" * 16
    assert not {*hashes} & {*without_image}
    assert cache.num_bytes == 4  # of the other tenant
    await admin.FlushCache(ALL, None)
    assert cache.num_bytes == 0


async def test_flush_names_workers_that_were_not_flushed(admin_of):
    well, gone = _Worker("p0"), _Worker("d1")
    admin = await admin_of(well, _Worker("d0", InternalError("it broke")), gone)
    admin._models[0].services.fleet.endpoints["d1"] = "127.0.0.1:1"
    with pytest.raises(UnavailableError, match=r"^the cache of d0, d1 was not .*it broke.* again"):
        await admin.FlushCache(ALL, None)
    assert well.num_blocks == 0
    assert [used.worker for used in (await admin.GetMemory(None, None)).workers] == ["p0"]


async def test_flush_passes_on_invalid_arguments(admin_of):
    wrong = InvalidArgumentError("block_hashes", "has 5 bytes")
    admin = await admin_of(_Worker("p0", wrong), _Worker("d0"))
    with pytest.raises(InvalidArgumentError, match="5 bytes"):
        await admin.FlushCache(pb.FlushCacheRequest(block_hashes=b"short"), None)
