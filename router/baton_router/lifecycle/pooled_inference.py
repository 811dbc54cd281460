"""Pooled outputs of one model, embeddings and scores, shared by gRPC and HTTP.

Each input is a request of its own, which is admitted, placed on a prefill worker and metered as any
other. Knows nothing of connections.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.errors import InternalError, InvalidArgumentError
from baton.serving.deadline import Deadline
from baton.serving.logs import name_request
from baton.serving.telemetry.stages import stage
from baton.serving.tenant import Caller
from baton_router.call.generate_call import EmbedCall, ScoreCall
from baton_router.call.request import Request
from baton_router.lifecycle.pooled_lifecycle import PooledLifecycle
from baton_router.lifecycle.recovery import Recovery
from baton_router.lifecycle.services import Services
from baton_router.telemetry.request_trace import tracing_request
from baton_router.text.pooled_intake import PooledIntake

Float32Array = npt.NDArray[np.float32]

# Inputs of one call that are computed or queued at the same time: enough for full batches, few
# enough that a long call leaves room in the admission queue.
_MAX_CONCURRENT = 32

# As in torch's `normalize`: a vector of zeros stays one.
_LEAST_NORM = 1e-12


@dataclass(frozen=True, slots=True)
class PooledOutputs:
    """Pooled outputs of one call."""

    model: str
    request_id: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Embeddings(PooledOutputs):
    """Embeddings of the inputs of a call. `vectors`: `[num_inputs, width]`."""

    vectors: Float32Array


@dataclass(frozen=True, slots=True)
class Scores(PooledOutputs):
    """Scores of the pairs of a call."""

    scores: Sequence[float]


class PooledInference:
    """Embeddings and scores of one model."""

    def __init__(self, services: Services, intake: PooledIntake) -> None:
        self._services = services
        self._intake = intake
        self._card = services.card

    async def embed(self, call: EmbedCall, caller: Caller, deadline: Deadline) -> Embeddings:
        """Returns the embeddings of all inputs. Raises the errors that `baton.serving.grpc.errors`
        lists, and `ModelOutputError` for a model without embeddings."""
        arrived = time.monotonic()
        with self._services.meter.failing("pooled"):
            tenant = self._services.tenant_of(caller)
            self._card.check_makes("embedding")
            dimensions = self._dimensions(call)
            await self._services.wait_for_workers(deadline)
            with stage("tokenize"):
                limit = self._services.fleet.context_length
                requests = await self._intake.read_inputs(call, limit, tenant)
        vectors = await self._pool_all(requests, arrived, deadline)
        if dimensions is not None:
            vectors = _normalized(vectors[:, :dimensions])
        return Embeddings(self._card.name, call.request_id, _num_tokens(requests), vectors)

    async def score(self, call: ScoreCall, caller: Caller, deadline: Deadline) -> Scores:
        """Returns the scores of all pairs. Raises as `embed`."""
        arrived = time.monotonic()
        with self._services.meter.failing("pooled"):
            tenant = self._services.tenant_of(caller)
            self._card.check_makes("score")
            await self._services.wait_for_workers(deadline)
        pooling = self._card.pooling
        assert pooling is not None, "a score of a model without one"
        limit = self._services.fleet.context_length
        if pooling.kind == "score":
            with self._services.meter.failing("pooled"), stage("tokenize"):
                requests = await self._intake.read_pairs(call, limit, tenant)
            outputs = await self._pool_all(requests, arrived, deadline)
            scores = (1 + np.tanh(outputs[:, 0] / 2)) / 2  # the sigmoid, without overflows
        else:
            with self._services.meter.failing("pooled"), stage("tokenize"):
                requests, pairs = await self._intake.read_texts_of_pairs(call, limit, tenant)
            vectors = _normalized(await self._pool_all(requests, arrived, deadline))
            firsts, seconds = np.array(pairs).T
            scores = (vectors[firsts] * vectors[seconds]).sum(-1)
        return Scores(self._card.name, call.request_id, _num_tokens(requests), scores.tolist())

    def _dimensions(self, call: EmbedCall) -> int | None:
        pooling = self._card.pooling
        assert pooling is not None, "dimensions of nothing"
        if call.dimensions is not None and not 1 <= call.dimensions <= pooling.width:
            raise InvalidArgumentError(
                "dimensions", f"is {call.dimensions}; must be in [1, {pooling.width}]"
            )
        return call.dimensions

    async def _pool_all(
        self, requests: Sequence[Request], arrived: float, deadline: Deadline
    ) -> Float32Array:
        """Returns the pooled outputs, `[num_requests, width]`."""
        slots = asyncio.Semaphore(_MAX_CONCURRENT)

        async def pool(request: Request) -> Sequence[float]:
            async with slots:
                return await self._pool(request, arrived, deadline)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(pool(request)) for request in requests]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        results = [task.result() for task in tasks]
        if len({len(values) for values in results}) > 1:
            raise InternalError("workers of one model gave vectors of different lengths")
        return np.array(results, np.float32)

    async def _pool(self, request: Request, arrived: float, deadline: Deadline) -> Sequence[float]:
        """Returns the pooled output of one request."""
        services = self._services
        with (
            tracing_request(None, self._card) as trace,
            services.meter.begin("pooled", arrived) as metered,
        ):
            name_request(request.request_id)
            with stage("tokenize"):
                await services.fleet.hash_ahead(request.prompt)
            lifecycle = PooledLifecycle(
                request,
                services.fleet,
                services.placer,
                Recovery(request.request_id, services.retry_budget),
                deadline,
                arrived,
                services.due(arrived, deadline),
            )
            async with services.admitted(
                lifecycle, deadline, metered, trace, lambda: lifecycle.outcome
            ) as decision:
                return await lifecycle.run(decision)


def _num_tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.token_ids) for request in requests)


def _normalized(vectors: Float32Array) -> Float32Array:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: Float32Array = (vectors / np.maximum(norms, _LEAST_NORM)).astype(np.float32)
    return scaled
