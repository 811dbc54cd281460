"""Role change of a worker: drains, then begins a new epoch with the model already loaded.

Independent of messages and of the reason for the change.
"""

import asyncio
import logging

from baton.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError
from baton.rpc.worker_role import Role
from baton.worker.worker import Worker

logger = logging.getLogger(__name__)


class RoleChanges:
    """Role changes of one worker, one at a time. A change continues after its caller has stopped
    waiting, so that no worker is left between its roles."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._wanted = worker.role
        self._change: asyncio.Task[None] | None = None

    async def set_role(self, role: Role, epoch: int = 0) -> int:
        """Changes the worker's role, and returns the epoch in which it has the role. Begins no
        other change if the worker has the role already, or is changing to it.

        Raises:
            FailedPreconditionError: `epoch` is not 0 and not the worker's, so the caller knows an
                earlier incarnation; or it is changing to another role, keeps the one that it has
                (`Worker.why_keeps_role`), or its model has no encoder for the encode role.
            UnavailableError: it is loading its model, or draining for good; or Redis does not
                answer, so that no router would learn of another role.
            DeadlineExceededError: calls in flight did not end within `drain_timeout_s`. They
                continue, and the worker takes work in its present role again.
        """
        worker = self._worker
        if self._change is None and role == worker.role:
            return worker.epoch
        if worker.why_keeps_role:
            raise FailedPreconditionError(
                f"worker {worker.id} stays in the {worker.role} role: {worker.why_keeps_role}"
            )
        if epoch not in (0, worker.epoch):
            raise FailedPreconditionError(
                f"this worker's epoch is {worker.epoch}, the request's is {epoch}: it has "
                "restarted or changed its role since"
            )
        if self._change is None:
            worker.engine_for_new_work()
            worker.check_serves(role)
            if not worker.redis_answers:
                raise UnavailableError(
                    "Redis does not answer: no router would learn of another role"
                )
            self._wanted = role
            self._change = asyncio.create_task(self._run(role))
            self._change.add_done_callback(self._done)
        elif role != self._wanted:
            raise FailedPreconditionError(f"this worker is changing to the {self._wanted} role")
        await asyncio.shield(self._change)
        return worker.epoch

    async def _run(self, role: Role) -> None:
        worker, timeout = self._worker, self._worker.settings.drain_timeout_s
        logger.info("draining, to change to the %s role", role)
        await worker.pause()
        try:
            async with asyncio.timeout(timeout):
                await worker.idle()
        except TimeoutError:
            await worker.resume()
            raise DeadlineExceededError(
                f"{worker.num_calls} calls did not end within drain_timeout_s = {timeout:g}; the "
                f"worker stays in the {worker.role} role"
            ) from None
        if worker.is_shutting_down:
            raise UnavailableError(f"worker {worker.id} is draining for good")
        await worker.begin_epoch(role)
        logger.info("changed to the %s role, in epoch %d", role, worker.epoch)

    def _done(self, change: "asyncio.Task[None]") -> None:
        self._change = None
        if not change.cancelled() and change.exception() is not None:
            logger.info("the role did not change: %s", change.exception())
