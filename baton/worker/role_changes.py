"""Role change of a worker: drains, then begins a new epoch with the model already loaded.

Independent of messages and of the reason for the change.
"""

import asyncio
import logging

from baton.errors import FailedPreconditionError, UnavailableError
from baton.rpc.worker_role import Role
from baton.worker.membership import Membership
from baton.worker.model_host import ModelHost

logger = logging.getLogger(__name__)


class RoleChanges:
    """Role changes of one worker, one at a time. A change continues after its caller has stopped
    waiting, so that no worker is left between its roles."""

    def __init__(self, membership: Membership, model: ModelHost) -> None:
        self._membership = membership
        self._model = model
        self._wanted = membership.role
        self._change: asyncio.Task[None] | None = None

    async def set_role(self, role: Role, epoch: int = 0) -> int:
        """Changes the worker's role, and returns the epoch in which it has the role. Begins no
        other change if the worker has the role already, or is changing to it.

        Raises:
            FailedPreconditionError: `epoch` is not 0 and not the worker's, so the caller knows an
                earlier incarnation; or it is changing to another role, keeps the one that it has
                (`Membership.why_keeps_role`), or its model has no encoder for the encode role.
            UnavailableError: it is loading its model, or draining for good; or Redis does not
                answer, so that no router would learn of another role.
            DeadlineExceededError: calls in flight did not end within `drain_timeout_s`. They
                continue, and the worker takes work in its present role again.
        """
        member = self._membership
        if self._change is None and role == member.role:
            return member.epoch
        if member.why_keeps_role:
            raise FailedPreconditionError(
                f"worker {member.id} stays in the {member.role} role: {member.why_keeps_role}"
            )
        if epoch:
            member.check_epoch(epoch)
        if self._change is None:
            self._model.engine_for(None)
            self._model.check_serves(role)
            if not member.redis_answers:
                raise UnavailableError(
                    "Redis does not answer: no router would learn of another role"
                )
            self._wanted = role
            self._change = asyncio.create_task(self._run(role))
            self._change.add_done_callback(self._done)
        elif role != self._wanted:
            raise FailedPreconditionError(f"this worker is changing to the {self._wanted} role")
        await asyncio.shield(self._change)
        return member.epoch

    async def _run(self, role: Role) -> None:
        member = self._membership
        logger.info("draining, to change to the %s role", role)
        await member.pause()
        if member.is_shutting_down:
            raise UnavailableError(f"worker {member.id} is draining for good")
        await member.begin_epoch(role)
        logger.info("changed to the %s role, in epoch %d", role, member.epoch)

    def _done(self, change: "asyncio.Task[None]") -> None:
        self._change = None
        if not change.cancelled() and change.exception() is not None:
            logger.info("the role did not change: %s", change.exception())
