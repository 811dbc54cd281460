"""Worker in any role, put together: a server that already answers, a model, and a membership.

Each of the three knows only those before it: `server.py`, `membership.py`, `model_host.py`.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import NoReturn, TypeVar, cast

from baton.cluster.registry.registry import WorkerRecord
from baton.context_length import POOL_SETTINGS
from baton.engine.core.process.engine_child import EngineChild
from baton.engine.facts import EngineFacts
from baton.rpc.cancellation import run_until
from baton.rpc.worker_role import Role
from baton.serving.grpc.channels import LARGE_FRAMES, Channels
from baton.serving.process import settle
from baton.version import version
from baton.worker.engine_messages import serialize_layouts
from baton.worker.membership import Membership
from baton.worker.model_host import ModelHost
from baton.worker.server import WorkerServer
from baton.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

_Component = TypeVar("_Component")

# Seconds after which the channel to a worker closes that no blocks were fetched from.
_CHANNEL_IDLE_SECONDS = 600.0


class Worker:
    """Worker process. Roles and components add services and metrics to `server`, and callbacks to
    `model` and `membership`; then `run` is called (`baton.worker.process`).

    Attributes:
        channels: to other workers, for their blocks.
        load_reports: each returns fields of `GetLoadResponse`, which are summed by name.
    """

    def __init__(
        self, role: Role, settings: WorkerSettings, child: EngineChild | None = None
    ) -> None:
        """`child`: the process for the engine; None: a thread of this one. Raises the errors of
        `Membership`."""
        self.settings = settings
        self.server = WorkerServer(settings)
        self.membership = Membership(role, settings, self.server)
        self.model = ModelHost(settings, self.membership, child)
        self.channels = Channels(
            max(settings.server.max_message_bytes, settings.kv_max_message_bytes),
            tls=settings.tls_to_workers,
            options=LARGE_FRAMES,
            idle_seconds=_CHANNEL_IDLE_SECONDS,
        )
        self.load_reports: list[Callable[[], Mapping[str, int]]] = []
        self._components: dict[object, object] = {}

    def component(self, kind: "Callable[[Worker], _Component]") -> _Component:
        """Returns this worker's `kind`, such as the KV exchange that all roles share. The first
        call, before the worker runs, makes it."""
        if kind not in self._components:
            self._components[kind] = kind(self)
        return cast("_Component", self._components[kind])

    async def run(self) -> None:
        """Serves until a signal, drains and stops. Raises what prevented it from serving."""
        async with AsyncExitStack() as stack:
            await self.server.start(stack)
            self.server.main.on_drain(self.membership.drain)
            await run_until(self.server.main.run_until_signal(), self._load_and_watch(stack))

    async def load(self, stack: AsyncExitStack) -> None:
        """Loads the model and takes work. The server has started. Closing `stack` undoes it."""
        stack.push_async_callback(self.channels.close)
        await self.model.load(stack)
        await self.membership.join(self._record(), stack)
        room, where = _room(self.model.engine.facts), self.server.main.endpoint
        logger.info("%s is ready at %s%s", self.membership.id, where, room)

    async def _load_and_watch(self, stack: AsyncExitStack) -> NoReturn:
        """Loads the model; raises `UnavailableError` once the engine has failed."""
        await self.load(stack)
        settle()
        await self.model.failure()

    def _record(self) -> WorkerRecord:
        server, membership, engine = self.server, self.membership, self.model.engine
        pool = engine.pools[0]  # the one that looks back furthest: it bounds a sequence
        return WorkerRecord(
            id=membership.id,
            role=membership.role,
            endpoint=server.main.endpoint,
            kv_endpoint=server.kv.endpoint,
            epoch=membership.epoch,
            model=self.model.name,
            fingerprint=engine.facts.info.fingerprint,
            layout=serialize_layouts(engine.facts.layouts),
            tokenizer_hash=engine.facts.info.namespace.tokenizer,
            kv_dtype=pool.layout.dtype,
            block_size=pool.layout.block_size,
            max_model_len=engine.facts.info.max_model_len,
            num_blocks=pool.num_blocks,
            draining=membership.is_draining,
            max_num_batched_tokens=engine.facts.max_num_batched_tokens,
            metrics_endpoint=server.metrics_endpoint,
            admin_endpoint=server.main.admin_endpoint,
            version=version(),
            pooled_output=pooling.kind if (pooling := engine.facts.info.pooling) else "",
            keeps_role=bool(membership.why_keeps_role),
            content=engine.facts.info.content,
            max_num_seqs=engine.facts.max_num_seqs,
        )


def _room(facts: EngineFacts) -> str:
    """Returns a clause about the tokens that the KV cache holds; empty if that does not bound a
    sequence."""
    length = facts.context_length
    if length.pool is None:
        return ""
    advice = f" ({POOL_SETTINGS} gives it more)" if length.is_bound_by_pool else ""
    return f": room for {length.pool:,} tokens; the model takes {length.model:,}{advice}"
