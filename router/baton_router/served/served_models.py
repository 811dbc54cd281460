"""Models of one router, of which each request names one.

Whatever belongs to one model exists once for each: workers, index, admission queue, placement,
readiness, role balance. Tenants, their limits and the requests in flight are the router's.
"""

import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.errors import NotFoundError
from baton.serving.deadline import Deadline
from baton.serving.tenant import Caller, Tenants
from baton.v1 import inference_pb2 as pb
from baton_router.lifecycle.events import ClientEvent
from baton_router.lifecycle.inference import Inference
from baton_router.lifecycle.pooled_inference import PooledInference
from baton_router.lifecycle.services import Services
from baton_router.routing.admission.rate_limit import RateLimits
from baton_router.routing.placement.decision import Decision
from baton_router.routing.roles.rebalancer import Rebalancer
from baton_router.served.aliases import Weights, drawn, heaviest, no_aliases

# Characters of an unknown name in an error, so that the list of models after it is not cut off.
_SHOWN_CHARS = 100


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

    Attributes:
        num_not_found: requests that named another model.
    """

    def __init__(
        self,
        served: Sequence[ServedModel],
        tenants: Tenants,
        limits: RateLimits,
        aliases: Callable[[], Mapping[str, Weights]] = no_aliases,
    ) -> None:
        self.num_not_found = 0
        self._served = {model.name: model for model in served}
        self._first = served[0]
        self._tenants = tenants
        self._limits = limits
        self._aliases = aliases

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served.values())

    @property
    def aliases(self) -> Mapping[str, Weights]:
        """Weights of the models of each alias."""
        return self._aliases()

    def of(self, name: str, request_id: str = "") -> ServedModel:
        """Returns the model of this name or alias; empty: the first one. `request_id` decides about
        an alias of several models; empty: the one with the largest weight.

        Raises `ModelNotFoundError` that lists what there is.
        """
        if not name:
            return self._first
        served = self._served.get(name)
        if served is not None:
            return served
        aliases = self._aliases()
        weights = aliases.get(name)
        if weights is None:
            self.num_not_found += 1
            shown = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}..."
            listed = ", ".join(map(repr, [*self._served, *aliases]))
            raise ModelNotFoundError(f"model is {shown!r}; expected one of {listed}")
        return self._served[drawn(weights, name, request_id) if request_id else heaviest(weights)]

    def generate(
        self, message: pb.GenerateRequest, caller: Caller, deadline: Deadline
    ) -> AsyncGenerator[ClientEvent, None]:
        """Returns the events of one request, as `Inference.generate` of its model."""
        return self._drawn(message, caller).inference.generate(message, caller, deadline)

    async def embed(
        self, message: pb.EmbedRequest, caller: Caller, deadline: Deadline
    ) -> pb.EmbedResponse:
        """Returns embeddings, as `PooledInference.embed` of the request's model."""
        return await self._drawn(message, caller).pooled.embed(message, caller, deadline)

    async def score(
        self, message: pb.ScoreRequest, caller: Caller, deadline: Deadline
    ) -> pb.ScoreResponse:
        """Returns scores, as `PooledInference.score` of the request's model."""
        return await self._drawn(message, caller).pooled.score(message, caller, deadline)

    def _drawn(
        self, message: pb.GenerateRequest | pb.EmbedRequest | pb.ScoreRequest, caller: Caller
    ) -> ServedModel:
        """Returns the model that answers a request. Gives a request that names one an id, if it has
        none, by which the model of an alias is drawn."""
        tenant = self._tenants.of(caller)
        if message.model and not message.request_id:
            message.request_id = secrets.token_hex(8)
        try:
            return self.of(message.model, message.request_id)
        except ModelNotFoundError:
            self._limits.count_request(tenant.name)
            raise

    async def tokenize(self, message: pb.TokenizeRequest) -> tuple[list[int], str]:
        """Returns the tokens of an input, and the text that was tokenized."""
        return await self.of(message.model).inference.tokenize(message)

    def decision_of(self, request_id: str, tenant: str) -> tuple[ServedModel, Decision]:
        """Returns the model and the last decision about a request. Raises as
        `Placer.decision_of`."""
        for served in self:
            if served.services.placer.remembers(request_id, tenant):
                return served, served.services.placer.decision_of(request_id, tenant)
        return self._first, self._first.services.placer.decision_of(request_id, tenant)
