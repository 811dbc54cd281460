"""Fleet of workers known to this router: their records, health, circuit breakers and load.

The registry in Redis lists the workers; each worker reports its readiness over gRPC health. So a
Redis outage, or a Redis that lost its data, never removes a serving worker. Load is not polled: the
router counts the requests that it placed and that ended.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis

from baton.cancellation import is_task_cancelled
from baton.cluster.events import KvEvents
from baton.cluster.index import LocalityIndex
from baton.cluster.prefix import PrefixNamespace
from baton.cluster.registry import WorkerRecord
from baton.cluster.subscriber import EventSubscriber
from baton.cluster.throttled_log import ThrottledLog
from baton.cluster.watcher import RegistryWatcher
from baton.serving.channels import Channels
from baton.serving.telemetry.stages import stage
from baton.v1.kv_transfer_pb2 import KvLayouts
from baton_router.fleet.candidate import Candidate
from baton_router.fleet.circuit_breaker import CircuitBreaker
from baton_router.fleet.decayed_counter import coarse
from baton_router.fleet.load import Load, Share
from baton_router.fleet.pending_prefixes import PendingPrefixes, held_blocks
from baton_router.fleet.waiting_records import WaitingRecords
from baton_router.fleet.worker_model import PoolModel, WorkerModel
from baton_router.prompt import NO_PROMPT, Prompt

logger = logging.getLogger(__name__)

State = Literal["ready", "draining", "unreachable", "starting"]

_RETRY_SECONDS = 0.5
# Workers at once that have not been ready yet. While others wait, each has `_TRIAL_SECONDS`.
_MAX_ON_TRIAL = 64
_TRIAL_SECONDS = 3.0
_PROBE_SECONDS = 1.0
_READINESS = health_pb2.HealthCheckRequest(service="readiness")


class Member:
    """Worker of the fleet: its record, health, load, circuit breaker and latency model.

    Attributes:
        pairing: workers exchange blocks only if their pairings are equal.
        namespace: namespace of the chain hashes of its blocks.
        bytes_per_token: bytes of KV per token, over all layers.
        max_held_tokens: maximum tokens of all its sequences; None if every layer has a window.
    """

    def __init__(self, record: WorkerRecord, pool: PoolModel) -> None:
        self.record = record
        self.is_serving = False
        self.is_listed = True
        self.was_reached = False
        self.was_probed = asyncio.Event()
        self.load = Load()
        # Computed once per epoch, because each request reads them.
        self.pairing = record.pairing
        self.namespace = record.namespace
        self.layouts = KvLayouts.FromString(record.layout).layouts
        self.bytes_per_token = sum(one.block_bytes / one.block_size for one in self.layouts)
        has_window = any(layout.HasField("window") for layout in self.layouts[:1])
        self.max_held_tokens = None if has_window else record.num_blocks * record.block_size
        self.circuit = CircuitBreaker()
        self.model = WorkerModel(pool, record.max_num_batched_tokens)
        self._seen: tuple[object, ...] | None = None
        self._candidate: Candidate | None = None  # cached for `_seen`

    @property
    def admin_endpoint(self) -> str:
        """Endpoint of its admin service."""
        return self.record.admin_endpoint or self.record.endpoint

    @property
    def state(self) -> State:
        """State of the worker; only a "ready" one can take requests."""
        if self.record.draining:
            return "draining"
        if self.is_serving and self.circuit.is_closed:
            return "ready"
        return "unreachable" if self.was_reached else "starting"

    @property
    def max_len(self) -> int:
        """Maximum tokens of one sequence. A decode worker must hold all of them in its pool, unless
        even the layers that see furthest back have a window."""
        record, room = self.record, self.max_held_tokens
        if record.role != "decode" or room is None:
            return record.max_model_len
        return min(record.max_model_len, room)

    @contextmanager
    def loaded(
        self,
        *,
        num_sequences: int = 1,
        num_tokens: int = 0,
        num_held_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> Iterator[None]:
        """Counts sequences, prompt tokens to compute, tokens whose KV is held and tokens of encoder
        inputs to encode as load of the worker for the `with` block."""
        share = Share(num_sequences, num_tokens, num_held_tokens, num_encoder_tokens)
        self.load.take(share, time.monotonic(), time.monotonic_ns())
        try:
            yield
        finally:
            self.load.release(share)

    def candidate(
        self,
        now: float,
        num_cached_tokens: int,
        excluded: str,
        cached_inputs: tuple[int, ...] = (),
        pending_inputs: tuple[int, ...] = (),
    ) -> Candidate:
        """Returns the worker's candidate, cached because few workers change between requests."""
        num_changes, rates = self.load.num_changes, self.model.rates
        inputs = cached_inputs, pending_inputs
        seen = now, num_cached_tokens, excluded, inputs, num_changes, rates
        if self._candidate is None or seen != self._seen:
            self._seen = seen
            self._candidate = self.load.candidate(
                self.record.id,
                self.record.role,
                self.pairing,
                now,
                num_cached_tokens=num_cached_tokens,
                max_held_tokens=self.max_held_tokens,
                excluded=excluded,
                rates=rates,
                version=self.record.version,
                cached_inputs=cached_inputs,
                pending_inputs=pending_inputs,
            )
        return self._candidate

    def excluded(self, tokenizer_hash: bytes, pooled_output: str = "") -> str:
        """Returns the reason why the worker cannot take requests now; empty if it can. Arguments as
        of `Fleet`."""
        if self.record.draining:
            return "draining"
        if not self.is_serving:
            return "not answering" if self.was_reached else "not reached yet"
        if self.record.tokenizer_hash != tokenizer_hash:
            return "another tokenizer"
        if self.record.pooled_output != pooled_output:
            return f"its model makes {self.record.pooled_output or 'text'}"
        return "" if self.circuit.is_closed else "failed a moment ago"


class Fleet:
    """Fleet of the workers of one model. Owns the locality index of their cached blocks.

    Records that were never confirmed by a ready worker cost little, whatever their number: at most
    `_MAX_ON_TRIAL` of them are members at a time, and take turns. At most `max_workers` are members
    in all.

    Args:
        registry: watcher that several fleets share, whose owner starts it and reports its changes
            here (`baton_router.fleet.fleets`); None: one of its own.
        pooled_output: that of the model, as `WorkerRecord.pooled_output`.
    """

    def __init__(
        self,
        redis: Redis,
        channels: Channels,
        tokenizer_hash: bytes,
        index: LocalityIndex | None = None,
        max_workers: int = 1024,
        registry: RegistryWatcher | None = None,
        pooled_output: str = "",
    ) -> None:
        self.index = LocalityIndex() if index is None else index
        self.pending = PendingPrefixes()
        self._channels = channels
        self._tokenizer_hash = tokenizer_hash
        self._pooled_output = pooled_output
        self._waiting = WaitingRecords()
        self._max_workers = max_workers
        self._on_trial: dict[str, float] = {}  # since when, oldest first
        self._log = ThrottledLog(logger)
        self._members: dict[str, Member] = {}
        self._namespaces: frozenset[PrefixNamespace] = frozenset()  # of all members
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._watch_calls: set[Any] = set()
        self._pools: dict[tuple[str, bytes], PoolModel] = {}
        self._probes: dict[Member, asyncio.Task[None]] = {}
        self._num_users: Counter[str] = Counter()  # of the channel to each endpoint
        self._closing: set[asyncio.Task[None]] = set()
        self._is_discovered = False
        self._owns_registry = registry is None
        self._registry = registry or RegistryWatcher(redis, self.on_change)
        self._events = EventSubscriber(redis, self.index)
        channels.on_renewal(self._restart_watches)

    def start(self) -> None:
        if self._owns_registry:
            self._registry.start()
        self._events.start()

    async def stop(self) -> None:
        if self._owns_registry:
            await self._registry.stop()
        await self._events.stop()
        tasks = [*self._watches.values(), *self._probes.values(), *self._closing]
        self._watches = {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_for_discovery(self, timeout: float) -> None:
        """Waits until Redis was read and each worker listed there has reported its readiness or
        could not be reached. Waits up to `timeout` seconds; returns immediately once this has
        succeeded."""
        if self._is_discovered:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                with stage("admit.router"):
                    await self._registry.first_read()
                    await asyncio.gather(*(member.was_probed.wait() for member in self.members))
                self._is_discovered = True

    @property
    def is_warm(self) -> bool:
        """Whether the index has all events that the known workers have published."""
        return self._events.is_warm

    @property
    def staleness(self) -> dict[str, float]:
        """Seconds since Redis last answered, by subscription; 0 while it answers."""
        return {"registry": self._registry.staleness, "kv_events": self._events.staleness}

    @property
    def refused_records(self) -> Mapping[str, str]:
        """Reasons why records in Redis were refused, by worker id."""
        return self._registry.refused

    @property
    def members(self) -> list[Member]:
        """All workers, sorted by id."""
        return [self._members[worker] for worker in sorted(self._members)]

    def member(self, worker: str) -> Member:
        return self._members[worker]

    def channel_to(self, member: Member) -> AbstractContextManager[grpc.aio.Channel]:
        """Returns the channel to a worker, open for the `with` block."""
        return self._channel(member.record.endpoint)

    def admin_channel_to(self, member: Member) -> AbstractContextManager[grpc.aio.Channel]:
        """Returns the channel to the worker's admin service, open for the `with` block."""
        return self._channel(member.admin_endpoint)

    @contextmanager
    def _channel(self, endpoint: str) -> Iterator[grpc.aio.Channel]:
        self._num_users[endpoint] += 1
        try:
            yield self._channels.get(endpoint)
        finally:
            self._num_users[endpoint] -= 1
            self._close_unused(endpoint)

    def report_loss(self, member: Member) -> None:
        """Trips the circuit of a dead or silent worker: no requests until a probe succeeds."""
        member.circuit.trip()
        self._start_probing(member)

    def report_failure(self, member: Member) -> None:
        """Counts an internal error that the worker reported; several in a row open its circuit."""
        member.circuit.record_failure()
        self._start_probing(member)

    def _start_probing(self, member: Member) -> None:
        if not member.circuit.is_closed and member not in self._probes:
            self._probes[member] = asyncio.create_task(self._probe(member))

    @property
    def max_model_len(self) -> int:
        """Shortest maximum length of the serving workers, in tokens; 2**31 if none serves."""
        return min((m.max_len for m in self.members if m.is_serving), default=2**31)

    def candidates(self, prompt: Prompt = NO_PROMPT) -> list[Candidate]:
        """Returns a snapshot of all workers, with the prompt tokens and the encoder outputs that
        each has cached, or will have soon."""
        cached = self._cached_blocks(prompt)
        cached_inputs = _inputs_by_worker(self.index, prompt)
        pending_inputs = _inputs_by_worker(self.pending, prompt)
        now = coarse(time.monotonic())
        return [
            m.candidate(
                now,
                cached.get(m.record.id, 0) * m.record.block_size,
                m.excluded(self._tokenizer_hash, self._pooled_output),
                cached_inputs.get(m.record.id, ()),
                pending_inputs.get(m.record.id, ()),
            )
            for m in self.members
        ]

    async def hash_ahead(self, prompt: Prompt) -> None:
        """Computes the chain hashes of a long prompt for all workers, without blocking the loop."""
        await prompt.hash_ahead(self._namespaces)

    def note_held(self, member: Member, hashes: Sequence[bytes]) -> None:
        """Adds blocks that a worker has computed or received to the index during a Redis outage.
        While Redis answers, the worker's own KV events report them, and their eviction."""
        if self._events.stale:
            record = member.record
            self.index.apply(record.id, record.epoch, KvEvents(stored=tuple(hashes)))

    @property
    def is_redis_up(self) -> bool:
        """Whether Redis has answered the latest poll of the registry."""
        return not self._registry.stale

    def _cached_blocks(self, prompt: Prompt) -> dict[str, int]:
        """Returns the number of leading blocks that each worker has cached or pending. Workers of
        one namespace share one lookup."""
        cached: dict[str, int] = {}
        for namespace in self._namespaces:
            cached |= held_blocks(self.index, self.pending, prompt.hashes(namespace))
        return cached

    def on_change(self, worker: str, record: WorkerRecord | None) -> None:
        """Applies a registry change: a worker joined, changed, or is not listed any more."""
        known = self._members.get(worker)
        if record is None:
            self._waiting.remove(worker)
            if known is not None:
                known.is_listed = False
                self._drop_if_gone(worker)
            return
        if known is not None and known.record.epoch == record.epoch:
            known.record, known.is_listed = record, True
            return
        self._leave(worker)
        self._waiting.add(record)
        self._admit()

    def forget(self, worker: str) -> None:
        """Forgets a worker that serves another model now, if it was known."""
        self._waiting.remove(worker)
        self._leave(worker)
        self._admit()

    def _admit(self) -> None:
        """Makes waiting records members as long as there is room."""
        while self._waiting:
            is_full = len(self._members) >= self._max_workers
            if is_full or len(self._on_trial) >= _MAX_ON_TRIAL:
                worker, began = next(iter(self._on_trial.items()), ("", math.inf))
                if is_full and not worker:
                    text = "ignoring workers beyond the %d that --max-workers allows"
                    self._log.warning(text, self._max_workers)
                if time.monotonic() - began < _TRIAL_SECONDS:
                    return
                self._retire(worker)
            self._join(self._waiting.take())

    def _join(self, record: WorkerRecord) -> None:
        """Makes a worker a member, unless its record is malformed."""
        try:
            member = Member(record, self._pool_of(record))
        except (DecodeError, ArithmeticError) as error:
            self._log.warning("ignoring the record of worker %r: %s", record.id, error)
            return
        worker = record.id
        self._members[worker] = member
        self._on_trial[worker] = time.monotonic()
        self._namespaces = self._namespaces | {member.namespace}
        self._watches[worker] = asyncio.create_task(self._watch(member))
        if not self._waiting:  # among many records, only those of workers that are ready
            self._events.follow(worker, record.epoch)

    def _pool_of(self, record: WorkerRecord) -> PoolModel:
        """Returns the latency model of the worker's pool. A pool with a new pairing, such as that
        of a new version, starts with the coefficients of the latest prefill pool."""
        pairing = record.pairing
        if ("prefill", pairing) not in self._pools:
            former = [pool for (role, _), pool in self._pools.items() if role == "prefill"]
            prefill = PoolModel(former[-1] if former else None)
            self._pools["prefill", pairing] = prefill
            for role in ("decode", "encode"):
                self._pools[role, pairing] = PoolModel(prefill)
        return self._pools[record.role, pairing]

    async def _watch(self, member: Member) -> None:
        """Watches one worker's readiness until it has left."""
        trial = asyncio.get_running_loop().call_later(_TRIAL_SECONDS, self._end_trial, member)
        try:
            while self._members.get(member.record.id) is member:
                with contextlib.suppress(grpc.aio.AioRpcError), self.channel_to(member) as channel:
                    if await self._follow(member, channel):
                        continue
                member.is_serving = False
                member.was_probed.set()
                self._drop_if_gone(member.record.id)
                await asyncio.sleep(_RETRY_SECONDS)
                self._end_trial(member)
        finally:
            trial.cancel()

    def _end_trial(self, member: Member) -> None:
        """Makes room for waiting records if the worker has not been ready yet."""
        worker = member.record.id
        if self._waiting and worker in self._on_trial and self._members[worker] is member:
            self._retire(worker)
            self._admit()

    def _retire(self, worker: str) -> None:
        """Makes a member that has not been ready wait for its next trial."""
        record = self._members[worker].record
        self._leave(worker)
        self._waiting.add_again(record)

    async def _follow(self, member: Member, channel: grpc.aio.Channel) -> bool:
        """Follows the health stream of a worker. Returns True if the watch must reconnect while the
        last readiness stays valid; raises `AioRpcError` if the connection is lost."""
        watch: Any = health_pb2_grpc.HealthStub(channel).Watch(_READINESS)
        self._watch_calls.add(watch)
        try:
            async for response in watch:
                member.is_serving = _is_serving(response)
                if member.is_serving and not member.was_reached:
                    self._confirm(member)
                member.was_probed.set()
                if member.is_serving:
                    member.circuit.probe_succeeded()
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            return True
        finally:
            self._watch_calls.discard(watch)
        return False

    def _confirm(self, member: Member) -> None:
        """Marks that the worker was ready once."""
        worker = member.record.id
        logger.info("%s joined at %s", worker, member.record.endpoint)
        member.was_reached = True
        self._on_trial.pop(worker, None)
        self._waiting.forget(worker)
        self._events.follow(worker, member.record.epoch)
        self._admit()

    def _restart_watches(self) -> None:
        """Cancels all health watches, so that they reconnect with renewed certificates."""
        for call in self._watch_calls:
            call.cancel()

    async def _probe(self, member: Member) -> None:
        """Probes a failed worker with backoff until its circuit closes or it has left."""
        try:
            while not member.circuit.is_closed and self._members.get(member.record.id) is member:
                await asyncio.sleep(member.circuit.seconds_to_probe)
                if await self._is_healthy(member):
                    member.circuit.probe_succeeded()
                else:
                    member.circuit.probe_failed()
        finally:
            del self._probes[member]

    async def _is_healthy(self, member: Member) -> bool:
        with self.channel_to(member) as channel:
            try:
                stub = health_pb2_grpc.HealthStub(channel)
                return _is_serving(await stub.Check(_READINESS, timeout=_PROBE_SECONDS))
            except grpc.aio.AioRpcError:
                return False

    def _drop_if_gone(self, worker: str) -> None:
        """Removes a worker that is neither listed nor serving."""
        member = self._members.get(worker)
        if member is not None and not member.is_listed and not member.is_serving:
            if member.was_reached:
                logger.info("%s left", worker)
            self._leave(worker)
            self._admit()

    def _leave(self, worker: str) -> None:
        member = self._members.pop(worker, None)
        if member is None:
            return
        self._on_trial.pop(worker, None)
        self._namespaces = frozenset(m.namespace for m in self._members.values())
        member.was_probed.set()  # releases `wait_for_discovery`
        self._events.unfollow(worker)
        task = self._watches.pop(worker)
        if task is not asyncio.current_task():
            task.cancel()
        self._close_unused(member.record.endpoint)

    def _close_unused(self, endpoint: str) -> None:
        """Closes the channel to an endpoint without a member, once no call uses it."""
        is_used = any(m.record.endpoint == endpoint for m in self._members.values())
        if is_used or self._num_users[endpoint] > 0:
            return
        closing = asyncio.create_task(self._close(endpoint))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close(self, endpoint: str) -> None:
        if self._num_users[endpoint] == 0:  # no new user since the task was created
            del self._num_users[endpoint]
            await self._channels.discard(endpoint)


def _inputs_by_worker(
    holders: LocalityIndex | PendingPrefixes, prompt: Prompt
) -> dict[str, tuple[int, ...]]:
    """Returns the encoder inputs, by index, whose outputs each worker holds by their content."""
    found: dict[str, tuple[int, ...]] = {}
    for index, (_, _, content) in enumerate(prompt.images):
        for worker in holders.match((content,)):
            found[worker] = (*found.get(worker, ()), index)
    return found


def _is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
