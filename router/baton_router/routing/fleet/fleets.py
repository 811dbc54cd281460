"""Fleets of several models: one registry watcher whose records are split by the model's name."""

from collections.abc import Mapping
from types import MappingProxyType

from redis.asyncio import Redis

from baton.cluster.index import LocalityIndex
from baton.cluster.registry.registry import WorkerRecord
from baton.cluster.registry.watcher import INTERVAL, RegistryWatcher
from baton.errors import NotFoundError
from baton.serving.grpc.channels import Channels
from baton_router.routing.fleet.fleet import Fleet
from baton_router.routing.fleet.member import Member


class Fleets:
    """Fleets of all models of a router. A worker belongs to the fleet of the model that its record
    names, so that no request reaches a worker of another model.

    Args:
        tokenizer_hashes: hash of the tokenizer of each model, by its name.
        max_indexed_hashes: maximum hashes in the locality index of each model.
        max_workers: maximum workers of each model.
        pooled_outputs: `WorkerRecord.pooled_output` of the models that do not generate, by name.
        poll_interval: seconds between polls of the registry.

    Attributes:
        of: fleet of each model, by its name.
    """

    def __init__(
        self,
        redis: Redis,
        channels: Channels,
        tokenizer_hashes: Mapping[str, bytes],
        max_indexed_hashes: int,
        max_workers: int,
        pooled_outputs: Mapping[str, str] = MappingProxyType({}),
        poll_interval: float = INTERVAL,
    ) -> None:
        self._registry = RegistryWatcher(redis, self._on_change, interval=poll_interval)
        self.of = {
            model: Fleet(
                redis,
                channels,
                tokenizer_hash,
                LocalityIndex(max_indexed_hashes),
                max_workers,
                self._registry,
                pooled_outputs.get(model, ""),
            )
            for model, tokenizer_hash in tokenizer_hashes.items()
        }

    def start(self) -> None:
        self._registry.start()
        for fleet in self.of.values():
            fleet.start()

    async def stop(self) -> None:
        await self._registry.stop()
        for fleet in self.of.values():
            await fleet.stop()

    @property
    def is_redis_up(self) -> bool:
        """Whether Redis has answered the latest poll of the registry."""
        return not self._registry.stale

    @property
    def staleness(self) -> dict[str, float]:
        """Seconds since Redis last answered, by subscription; 0 while it answers."""
        found = [fleet.staleness for fleet in self.of.values()]
        return {what: max(one[what] for one in found) for what in found[0]}

    @property
    def refused_records(self) -> Mapping[str, str]:
        """Reasons why records in Redis are not used, by worker id: refused ones, those of models
        that this router does not serve, and those of workers whose id another one has."""
        listed = ", ".join(map(repr, self.of))
        others = {
            worker: f"it serves the model {record.model!r}; expected one of {listed}"
            for worker, record in self._registry.records.items()
            if record.model not in self.of
        }
        rivals = {
            worker: f"the worker at {record.rival} has this id, too, and gets no work, beside the "
            f"one at {record.endpoint}; give each an id of its own (--worker-id)"
            for worker, record in self._registry.records.items()
            if record.rival
        }
        return {**others, **rivals, **self._registry.refused}

    @property
    def members(self) -> list[tuple[str, Member]]:
        """All workers with the names of their models, sorted by id."""
        found = [(model, one) for model, fleet in self.of.items() for one in fleet.members]
        return sorted(found, key=lambda pair: pair[1].record.id)

    def model_of(self, worker: str) -> str:
        """Returns the model of a worker. Raises `NotFoundError` for an unknown one."""
        for model, member in self.members:
            if member.record.id == worker:
                return model
        raise NotFoundError(f"no worker {worker!r} is known here")

    def _on_change(self, worker: str, record: WorkerRecord | None) -> None:
        for model, fleet in self.of.items():
            if record is None or record.model == model:
                fleet.on_change(worker, record)
            else:
                fleet.forget(worker)
