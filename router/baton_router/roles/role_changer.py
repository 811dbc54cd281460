"""Role changes of workers over their admin service, never of the last worker of a role."""

from typing import TYPE_CHECKING

import grpc

from baton.errors import FailedPreconditionError, NotFoundError
from baton.role_wire import role_to_message
from baton.rpc_errors import error_of
from baton.v1 import admin_pb2, admin_pb2_grpc
from baton_router.fleet.candidate import Role
from baton_router.fleet.fleet import Fleet, Member

if TYPE_CHECKING:
    from baton.v1.admin_pb2_grpc import AdminAsyncStub


class RoleChanger:
    """Role changer for the workers of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def set_role(self, worker: str, role: Role, epoch: int, timeout: float) -> int:
        """Changes the worker's role. Returns its new epoch once it takes requests in that role.

        Args:
            epoch: expected epoch of the worker; 0: any.
            timeout: seconds to wait; the worker continues the change after them.

        Raises `NotFoundError` for an unknown worker, `FailedPreconditionError` for the last one of
        its role, and the errors of `baton.v1.Admin.SetRole`.
        """
        member = self._member(worker)
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
