"""Models of one router, of which each request names one.

Whatever belongs to one model exists once for each: workers, index, admission queue, placement,
readiness, role balance. Tenants, their limits and the requests in flight are the router's.
"""

import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NoReturn, TypeVar

from baton.errors import InvalidArgumentError, NotFoundError
from baton.serving.deadline import Deadline
from baton.serving.tenant import Caller, Tenants
from baton_router.call.generate_call import EmbedCall, GenerateCall, ScoreCall
from baton_router.lifecycle.events import ClientEvent
from baton_router.lifecycle.inference import Inference
from baton_router.lifecycle.pooled_inference import Embeddings, PooledInference, Scores
from baton_router.lifecycle.services import Services
from baton_router.routing.admission.rate_limit import RateLimits
from baton_router.routing.placement.decision import Decision
from baton_router.routing.roles.rebalancer import Rebalancer
from baton_router.served.aliases import Weights, drawn, heaviest, no_aliases

# Characters of an unknown name in an error, so that the list of models after it is not cut off.
_SHOWN_CHARS = 100


_Call = TypeVar("_Call", GenerateCall, EmbedCall, ScoreCall)


class ModelNotFoundError(NotFoundError):
    """Model that the router does not serve."""


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """Model that the router serves, with all that belongs to it alone."""

    services: Services
    rebalancer: Rebalancer
    inference: Inference
    pooled: PooledInference

    @property
    def name(self) -> str:
        return self.services.card.name

    @property
    def has_workers(self) -> bool:
        """Whether a request could be placed now."""
        return not self.services.placer.why_none()


class Models:
    """Models of one router.

    Args:
        served: the models; the first one is that of requests that name none.
        aliases: returns the present aliases.
        names_of_checkpoints: names of models by hub id or folder, without slashes at its end.

    Attributes:
        num_not_found: requests that named another model.
    """

    def __init__(
        self,
        served: Sequence[ServedModel],
        tenants: Tenants,
        limits: RateLimits,
        aliases: Callable[[], Mapping[str, Weights]] = no_aliases,
        names_of_checkpoints: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.num_not_found = 0
        self._served = {model.name: model for model in served}
        self._first = served[0]
        self._tenants = tenants
        self._limits = limits
        self._aliases = aliases
        self._names_of_checkpoints = names_of_checkpoints

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served.values())

    @property
    def aliases(self) -> Mapping[str, Weights]:
        """Weights of the models of each alias."""
        return self._aliases()

    def of(self, name: str, request_id: str = "") -> ServedModel:
        """Returns the model of this name, alias or checkpoint; empty: the first one. `request_id`
        decides about an alias of several models; empty: the one with the largest weight.

        Raises `ModelNotFoundError` that lists what there is.
        """
        served = self._find(name, request_id)
        if served is None:
            self.num_not_found += 1
            shown = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}..."
            listed = ", ".join(map(repr, [*self._served, *self._aliases()]))
            raise ModelNotFoundError(f"model is {shown!r}; expected one of {listed}")
        return served

    def failing(self, name: str = "") -> AbstractContextManager[None]:
        """Meters a call for the model of this name, as `RequestMeter.failing`; for that of calls
        that name none if it is unknown."""
        return (self._find(name, "") or self._first).services.meter.failing()

    def _find(self, name: str, request_id: str) -> ServedModel | None:
        if not name:
            return self._first
        served = self._served.get(name)
        if served is not None:
            return served
        weights = self._aliases().get(name)
        if weights is not None:
            return self._served[
                drawn(weights, name, request_id) if request_id else heaviest(weights)
            ]
        own = self._names_of_checkpoints.get(name.rstrip("/"))
        return None if own is None else self._served[own]

    def generate(
        self, call: GenerateCall, caller: Caller, deadline: Deadline
    ) -> AsyncGenerator[ClientEvent, None]:
        """Returns the events of one request, as `Inference.generate` of its model."""
        served, call = self._drawn(call, caller)
        return served.inference.generate(call, caller, deadline)

    def refuse(self, model: str, caller: Caller, error: InvalidArgumentError) -> NoReturn:
        """Raises the error of a call for a generation, as `Inference.refuse` of its model."""
        self._named(model, "", caller).inference.refuse(caller, error)

    async def embed(self, call: EmbedCall, caller: Caller, deadline: Deadline) -> Embeddings:
        """Returns embeddings, as `PooledInference.embed` of the call's model."""
        served, call = self._drawn(call, caller)
        return await served.pooled.embed(call, caller, deadline)

    async def score(self, call: ScoreCall, caller: Caller, deadline: Deadline) -> Scores:
        """Returns scores, as `PooledInference.score` of the call's model."""
        served, call = self._drawn(call, caller)
        return await served.pooled.score(call, caller, deadline)

    def _drawn(self, call: _Call, caller: Caller) -> tuple[ServedModel, _Call]:
        """Returns the model that answers a call, and the call. One that names a model gets an id,
        if it has none, by which the model of an alias is drawn."""
        if call.model and not call.request_id:
            call = replace(call, request_id=secrets.token_hex(8))
        return self._named(call.model, call.request_id, caller), call

    def _named(self, model: str, request_id: str, caller: Caller) -> ServedModel:
        tenant = self._tenants.of(caller)
        try:
            return self.of(model, request_id)
        except ModelNotFoundError:
            self._limits.count_request(tenant.name)
            raise

    def decision_of(self, request_id: str, tenant: str) -> tuple[ServedModel, Decision]:
        """Returns the model and the last decision about a request. Raises as
        `Placer.decision_of`."""
        for served in self:
            if served.services.placer.remembers(request_id, tenant):
                return served, served.services.placer.decision_of(request_id, tenant)
        return self._first, self._first.services.placer.decision_of(request_id, tenant)
