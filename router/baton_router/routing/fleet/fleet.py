"""Fleet of workers known to this router: which are members, and a snapshot of all for placement.

The registry in Redis lists the workers; each worker reports its readiness over gRPC health. So a
Redis outage, or a Redis that lost its data, never removes a serving worker. Load is not polled: the
router counts the requests that it placed and that ended.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.events.subscriber import EventSubscriber
from baton.cluster.index import LocalityIndex
from baton.cluster.prefix import PrefixNamespace
from baton.cluster.registry.registry import WorkerRecord
from baton.cluster.registry.watcher import INTERVAL, RegistryWatcher
from baton.cluster.throttled_log import ThrottledLog
from baton.context_length import ContextLength
from baton.serving.grpc.channels import Channels
from baton.serving.telemetry.stages import stage
from baton_router.call.prompt import NO_PROMPT, Prompt
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.decayed_counter import coarse
from baton_router.routing.fleet.health_checks import HealthChecks
from baton_router.routing.fleet.member import Member
from baton_router.routing.fleet.pending_prefixes import PendingPrefixes, held_blocks, held_inputs
from baton_router.routing.fleet.waiting_records import WaitingRecords
from baton_router.routing.fleet.weights_warning import WeightsWarning
from baton_router.routing.fleet.worker_model import PoolModels

logger = logging.getLogger(__name__)

_Kind = TypeVar("_Kind", bytes, str)

# Workers at once that have not been ready yet. While others wait, each has `_TRIAL_SECONDS`.
_MAX_ON_TRIAL = 64
_TRIAL_SECONDS = 3.0


class Fleet:
    """Fleet of the workers of one model. Owns the locality index of their cached blocks.

    Records that were never confirmed by a ready worker cost little, whatever their number: at most
    `_MAX_ON_TRIAL` of them are members at a time, and take turns. At most `max_workers` are members
    in all.

    Args:
        registry: watcher that several fleets share, whose owner starts it and reports its changes
            here (`baton_router.routing.fleet.fleets`); None: one of its own.
        pooled_output: that of the model, as `WorkerRecord.pooled_output`.
        poll_interval: seconds between polls of its own registry watcher.
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
        poll_interval: float = INTERVAL,
    ) -> None:
        self.index = LocalityIndex() if index is None else index
        self.pending = PendingPrefixes()
        self._channels = channels
        self._tokenizer_hash = tokenizer_hash
        self._pooled_output = pooled_output
        self._waiting = WaitingRecords()
        self._max_workers = max_workers
        self._on_trial: dict[str, asyncio.TimerHandle] = {}  # until when, oldest first
        self._log = ThrottledLog(logger)
        self._weights_warning = WeightsWarning(self._log)
        self._members: dict[str, Member] = {}
        self._namespaces: frozenset[PrefixNamespace] = frozenset()  # of all members
        self._health = HealthChecks(
            self._channels, self._confirm, self._drop_if_gone, self._end_trial
        )
        self._pools = PoolModels()
        self._is_discovered = False
        self._changed = asyncio.Event()
        self._owns_registry = registry is None
        self._registry = registry or RegistryWatcher(redis, self.on_change, interval=poll_interval)
        self._events = EventSubscriber(redis, self.index)
        channels.on_renewal(self._health.restart)

    def start(self) -> None:
        if self._owns_registry:
            self._registry.start()
        self._events.start()

    async def stop(self) -> None:
        if self._owns_registry:
            await self._registry.stop()
        await self._events.stop()
        for trial in self._on_trial.values():
            trial.cancel()
        await self._health.stop()

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
        return self._channels.use(member.record.endpoint)

    def admin_channel_to(self, member: Member) -> AbstractContextManager[grpc.aio.Channel]:
        """Returns the channel to the worker's admin service, open for the `with` block."""
        return self._channels.use(member.admin_endpoint)

    def report_loss(self, member: Member) -> None:
        """Trips the circuit of a dead or silent worker: no requests until a probe succeeds."""
        member.circuit.trip()
        self._health.probe(member)

    def report_failure(self, member: Member) -> None:
        """Counts an internal error that the worker reported; several in a row open its circuit."""
        member.circuit.record_failure()
        self._health.probe(member)

    @property
    def context_length(self) -> ContextLength:
        """Maximum tokens of a sequence of the largest worker that makes answers, of those that
        have been ready; of any other if there is none; 2**31 if none was ready yet."""
        known = [m for m in self.members if m.was_reached]
        role = "prefill" if self._pooled_output else "decode"
        answering = [m.limits.context_length() for m in known if m.record.role == role]
        others = [ContextLength(m.limits.max_model_len) for m in known]
        return max(answering or others, key=attrgetter("num_tokens"), default=ContextLength(2**31))

    def candidates(self, prompt: Prompt = NO_PROMPT) -> list[Candidate]:
        """Returns a snapshot of all workers, with the prompt tokens and the encoder outputs that
        each has cached, or will have soon."""
        cached = self._cached_blocks(prompt)
        contents = [content for _, _, content in prompt.images]
        cached_inputs = held_inputs(self.index, contents)
        pending_inputs = held_inputs(self.pending, contents)
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

    async def wait_for_change(self) -> None:
        """Waits until a worker joins or changes, or can take requests again."""
        await self._changed.wait()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def on_change(self, worker: str, record: WorkerRecord | None) -> None:
        """Applies a registry change: a worker joined, changed, or is not listed any more."""
        self._note_change()
        known = self._members.get(worker)
        if record is None:
            self._waiting.remove(worker)
            if known is not None:
                known.is_listed = False
                self._drop_if_gone(known)
            return
        if record.rival:
            self._log.warning(
                "worker id %r is that of two workers, at %s and at %s; the latter gets no work",
                worker,
                record.endpoint,
                record.rival,
            )
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
                oldest = next(iter(self._on_trial), None)
                if oldest is None:
                    text = "ignoring workers beyond the %d that --max-workers allows"
                    self._log.warning(text, self._max_workers)
                    return
                if asyncio.get_running_loop().time() < self._on_trial[oldest].when():
                    return
                self._retire(oldest)
            self._join(self._waiting.take())

    def _join(self, record: WorkerRecord) -> None:
        """Makes a worker a member, unless its record is malformed."""
        try:
            member = Member(record, self._pools.of(record.role, record.pairing))
        except (DecodeError, ArithmeticError) as error:
            self._log.warning("ignoring the record of worker %r: %s", record.id, error)
            return
        worker = record.id
        self._members[worker] = member
        self._on_trial[worker] = asyncio.get_running_loop().call_later(
            _TRIAL_SECONDS, self._end_trial, member
        )
        self._namespaces = self._namespaces | {member.namespace}
        self._health.watch(member)
        if not self._waiting:  # among many records, only those of workers that are ready
            self._events.follow(worker, record.epoch)

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

    def _confirm(self, member: Member) -> None:
        """Ends the trial of a worker that is ready."""
        self._note_change()
        if member.was_reached:
            return
        worker = member.record.id
        logger.info("%s joined at %s", worker, member.record.endpoint)
        member.was_reached = True
        self._note_weights(member.record.model)
        self._on_trial.pop(worker).cancel()
        self._waiting.forget(worker)
        self._events.follow(worker, member.record.epoch)
        self._admit()

    @property
    def contents(self) -> Mapping[bytes, list[str]]:
        """Workers that have been ready, by the hash of their weights, as far as it is known."""
        return self._reached_by(lambda record: record.content)

    def _reached_by(self, kind: Callable[[WorkerRecord], _Kind]) -> dict[_Kind, list[str]]:
        """Returns the workers that have been ready by a part of their records; without those that
        do not report it."""
        workers: dict[_Kind, list[str]] = {}
        for member in self.members:
            if member.was_reached and (value := kind(member.record)):
                workers.setdefault(value, []).append(member.record.id)
        return workers

    def _note_weights(self, model: str) -> None:
        dtypes = self._reached_by(lambda record: record.kv_dtype)
        self._weights_warning.update(model, self.contents, dtypes)

    def _drop_if_gone(self, member: Member) -> None:
        """Removes a worker that is neither listed nor serving."""
        if not member.is_listed and not member.is_serving:
            if member.was_reached:
                logger.info("%s left", member.record.id)
            self._leave(member.record.id)
            self._admit()

    def _leave(self, worker: str) -> None:
        member = self._members.pop(worker, None)
        if member is None:
            return
        trial = self._on_trial.pop(worker, None)
        if trial is not None:
            trial.cancel()
        self._namespaces = frozenset(m.namespace for m in self._members.values())
        member.was_probed.set()  # releases `wait_for_discovery`
        self._events.unfollow(worker)
        self._health.unwatch(member)
        self._note_weights(member.record.model)
