"""Role changes that a router asks workers for, over their admin service."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from baton.errors import FailedPreconditionError, NotFoundError
from baton.rpc.roles import role_of
from baton.rpc.worker_role import Role
from baton.serving.grpc.channels import Channels
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.v1 import admin_pb2 as pb
from baton.v1.admin_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.roles.role_changer import RoleChanger


class _Workers(AdminServicer):
    """Workers of a fleet by role, behind one admin service that changes roles at once."""

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self.roles = dict(roles)
        self._channels = Channels()
        self._endpoint = ""

    @property
    def members(self) -> list[Any]:
        return [
            SimpleNamespace(
                record=SimpleNamespace(id=worker, role=role, epoch=7, model="tiny"), pairing=b""
            )
            for worker, role in self.roles.items()
        ]

    def candidates(self) -> list[Candidate]:
        return [Candidate(worker, role, b"") for worker, role in self.roles.items()]

    @contextmanager
    def admin_channel_to(self, _member: Any) -> Iterator[grpc.aio.Channel]:
        yield self._channels.get(self._endpoint)

    async def SetRole(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.roles[request.worker] = role_of(request.role)
        return pb.SetRoleResponse(epoch=request.epoch + 1)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["_Workers"]:
        server = Server(ServingSettings())
        server.add(add_AdminServicer_to_server, self)
        await server.start()
        self._endpoint = server.endpoint
        try:
            yield self
        finally:
            await self._channels.close()
            await server.stop(0.0)


def changer_of(workers: _Workers, *, takes_images: bool = True) -> RoleChanger:
    return RoleChanger(workers, takes_images=takes_images)  # type: ignore[arg-type]


async def test_role_changer_moves_worker_into_and_out_of_encode():
    async with _Workers({"p0": "prefill", "d0": "decode", "d1": "decode"}).serving() as workers:
        changer = changer_of(workers)
        assert await changer.set_role("d1", "encode", 0, 5.0) == 8
        assert workers.roles["d1"] == "encode"
        await changer.set_role("d1", "prefill", 0, 5.0)  # the last encode worker may leave
        assert workers.roles == {"p0": "prefill", "d0": "decode", "d1": "prefill"}


@pytest.mark.parametrize("worker", ["p0", "d0"])
async def test_role_changer_keeps_last_prefill_and_decode_worker(worker):
    async with _Workers({"e0": "encode", "p0": "prefill", "d0": "decode"}).serving() as workers:
        with pytest.raises(FailedPreconditionError, match=rf"^{worker} is the only "):
            await changer_of(workers).set_role(worker, "encode", 0, 5.0)


async def test_role_changer_refuses_encode_role_without_images():
    async with _Workers({"d0": "decode", "d1": "decode"}).serving() as workers:
        changer = changer_of(workers, takes_images=False)
        with pytest.raises(FailedPreconditionError, match="model 'tiny' takes no images"):
            await changer.set_role("d0", "encode", 0, 5.0)
        with pytest.raises(NotFoundError):
            await changer.set_role("unknown", "encode", 0, 5.0)
