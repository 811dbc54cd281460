"""What a prefill worker lets others have of its pools, once its model is loaded."""

from contextlib import AsyncExitStack

from baton.errors import UnavailableError
from baton.worker.worker import Worker
from kvtransfer.service import ServedPools
from kvtransfer.shm_source import Doorkeeper


class PoolServer:
    """The pools of one worker and the ways to them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._served: ServedPools | None = None

    async def open(self, stack: AsyncExitStack) -> None:
        """Opens the ways. Closing the stack closes them."""
        worker = self._worker
        pools = worker.engine.engine.cache.pools
        served = ServedPools(pools, worker.pairing(), worker.epoch)
        if all(pool.shared is not None for pool in pools):
            keeper = await stack.enter_async_context(Doorkeeper(pools))
            served = ServedPools(pools, worker.pairing(), worker.epoch, keeper.door)
        self._served = served

    def served(self) -> ServedPools:
        """Raises `UnavailableError` while the model is being loaded."""
        if self._served is None:
            raise UnavailableError(f"worker {self._worker.id} is not ready yet")
        return self._served
