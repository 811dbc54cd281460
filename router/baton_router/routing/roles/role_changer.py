"""Role changes of workers over their admin service, never of the last prefill or decode worker."""

from typing import TYPE_CHECKING

import grpc

from baton.errors import FailedPreconditionError, NotFoundError
from baton.rpc.errors import error_of
from baton.rpc.roles import role_to_message
from baton.rpc.worker_role import Role
from baton.v1 import admin_pb2, admin_pb2_grpc
from baton_router.routing.fleet.fleet import Fleet
from baton_router.routing.fleet.member import Member

if TYPE_CHECKING:
    from baton.v1.admin_pb2_grpc import AdminAsyncStub


class RoleChanger:
    """Role changer for the workers of one fleet. `takes_images`: whether their model does, so that
    they may have the encode role."""

    def __init__(self, fleet: Fleet, *, takes_images: bool = False) -> None:
        self._fleet = fleet
        self._takes_images = takes_images

    async def set_role(self, worker: str, role: Role, epoch: int, timeout: float) -> int:
        """Changes the worker's role. Returns its new epoch once it takes requests in that role.

        Args:
            epoch: expected epoch of the worker; 0: any.
            timeout: seconds to wait; the worker continues the change after them.

        Raises `NotFoundError` for an unknown worker, `FailedPreconditionError` for the last prefill
        or decode worker and for the encode role if the model takes no images, and the errors of
        `baton.v1.Admin.SetRole`.
        """
        member = self._member(worker)
        if role == "encode" and not self._takes_images:
            raise FailedPreconditionError(
                f"model {member.record.model!r} takes no images; expected a vision-language model "
                "for the encode role"
            )
        if member.record.role != role:
            self._check_not_last(member)
        request = admin_pb2.SetRoleRequest(
            worker=worker, role=role_to_message(role), epoch=epoch or member.record.epoch
        )
        with self._fleet.admin_channel_to(member) as channel:
            stub: AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)
            try:
                return (await stub.SetRole(request, timeout=timeout)).epoch
            except grpc.aio.AioRpcError as error:
                raise error_of(error) from error

    def _member(self, worker: str) -> Member:
        for member in self._fleet.members:
            if member.record.id == worker:
                return member
        raise NotFoundError(f"no worker {worker!r} is known here")

    def _check_not_last(self, member: Member) -> None:
        record = member.record
        if record.role == "encode":
            return  # without encode workers, prefill workers encode
        left = [
            candidate
            for candidate in self._fleet.candidates()
            if candidate.worker != record.id
            and (candidate.role, candidate.pairing) == (record.role, member.pairing)
            and not candidate.excluded
        ]
        if not left:
            raise FailedPreconditionError(
                f"{record.id} is the only {record.role} worker that can take work"
            )
