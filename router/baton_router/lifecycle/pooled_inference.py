"""Pooled outputs of one model, embeddings and scores, shared by gRPC and HTTP.

Each input is a request of its own, which is admitted, placed on a prefill worker and metered as any
other. Knows nothing of connections.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from baton.errors import InternalError, InvalidArgumentError, UnavailableError
from baton.serving.deadline import Deadline
from baton.serving.logs import name_request
from baton.serving.telemetry.stages import stage
from baton.serving.tenant import Caller, Tenant, Tenants
from baton.v1 import inference_pb2 as pb
from baton_router.admission.controller import AdmissionController
from baton_router.admission.rate_limit import RateLimits
from baton_router.admission.readiness import Readiness
from baton_router.fleet.fleet import Fleet
from baton_router.intake.intake import Intake
from baton_router.intake.model_card import ModelCard
from baton_router.lifecycle.in_flight import Requests
from baton_router.lifecycle.inference import wait_for_workers
from baton_router.lifecycle.pooled_lifecycle import PooledLifecycle
from baton_router.lifecycle.recovery import Recovery
from baton_router.lifecycle.retry_budget import RetryBudget
from baton_router.placement.placer import Placer
from baton_router.request import Request, RequestOutcome
from baton_router.telemetry.request_meter import RequestMeter
from baton_router.telemetry.request_trace import tracing_request

Float32Array = npt.NDArray[np.float32]

# Inputs of one call that are computed or queued at the same time: enough for full batches, few
# enough that a long call leaves room in the admission queue.
_MAX_CONCURRENT = 32

# As in torch's `normalize`: a vector of zeros stays one.
_LEAST_NORM = 1e-12


class PooledInference:
    """Embeddings and scores of one model. Tells workers that results are due `ttft_objective`
    seconds after a call's arrival."""

    def __init__(
        self,
        card: ModelCard,
        intake: Intake,
        fleet: Fleet,
        requests: Requests,
        tenants: Tenants,
        limits: RateLimits,
        admission_controller: AdmissionController,
        readiness: Readiness,
        placer: Placer,
        meter: RequestMeter,
        ttft_objective: float,
    ) -> None:
        self._card = card
        self._intake = intake
        self._fleet = fleet
        self._requests = requests
        self._tenants = tenants
        self._limits = limits
        self._admission = admission_controller
        self._readiness = readiness
        self._placer = placer
        self._meter = meter
        self._ttft_objective = ttft_objective
        self._budget = RetryBudget()

    async def embed(
        self, message: pb.EmbedRequest, caller: Caller, deadline: Deadline
    ) -> pb.EmbedResponse:
        """Returns the embeddings of all inputs. Raises the errors that `baton.serving.errors`
        lists, and `ModelOutputError` for a model without embeddings."""
        arrived = time.monotonic()
        tenant = self._tenant_of(caller)
        self._card.check_makes("embedding")
        dimensions = self._dimensions(message)
        await wait_for_workers(self._fleet, self._readiness, deadline)
        with stage("tokenize"):
            requests = await self._intake.read_inputs(message, self._fleet.max_model_len, tenant)
        vectors = await self._pool_all(requests, arrived, deadline)
        if dimensions is not None:
            vectors = _normalized(vectors[:, :dimensions])
        return pb.EmbedResponse(
            model=self._card.name,
            request_id=message.request_id,
            embeddings=[pb.Embedding(values=vector) for vector in vectors],
            num_prompt_tokens=_num_tokens(requests),
        )

    async def score(
        self, message: pb.ScoreRequest, caller: Caller, deadline: Deadline
    ) -> pb.ScoreResponse:
        """Returns the scores of all pairs. Raises as `embed`."""
        arrived = time.monotonic()
        tenant = self._tenant_of(caller)
        self._card.check_makes("score")
        pooling = self._card.pooling
        assert pooling is not None, "a score of a model without one"
        await wait_for_workers(self._fleet, self._readiness, deadline)
        limit = self._fleet.max_model_len
        if pooling.kind == "score":
            with stage("tokenize"):
                requests = await self._intake.read_pairs(message, limit, tenant)
            outputs = await self._pool_all(requests, arrived, deadline)
            scores = (1 + np.tanh(outputs[:, 0] / 2)) / 2  # the sigmoid, without overflows
        else:
            with stage("tokenize"):
                requests, pairs = await self._intake.read_texts_of_pairs(message, limit, tenant)
            vectors = _normalized(await self._pool_all(requests, arrived, deadline))
            firsts, seconds = np.array(pairs).T
            scores = (vectors[firsts] * vectors[seconds]).sum(-1)
        return pb.ScoreResponse(
            model=self._card.name,
            request_id=message.request_id,
            scores=scores,
            num_prompt_tokens=_num_tokens(requests),
        )

    def _tenant_of(self, caller: Caller) -> Tenant:
        """Returns the tenant, whose call counts towards its limits. Raises if it is over one, or
        the router drains."""
        tenant = self._tenants.of(caller)
        self._limits.count_request(tenant.name)
        if self._requests.is_draining:
            raise UnavailableError("the router is draining; another one will serve this")
        return tenant

    def _dimensions(self, message: pb.EmbedRequest) -> int | None:
        if not message.HasField("dimensions"):
            return None
        pooling = self._card.pooling
        assert pooling is not None, "dimensions of nothing"
        if not 1 <= message.dimensions <= pooling.width:
            raise InvalidArgumentError(
                "dimensions", f"is {message.dimensions}; must be in [1, {pooling.width}]"
            )
        return message.dimensions

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
        message = pb.GenerateRequest(model=request.model, request_id=request.request_id)
        with (
            tracing_request(message, self._card) as trace,
            self._meter.begin("pooled", arrived) as metered,
        ):
            name_request(request.request_id)
            lifecycle = PooledLifecycle(
                request,
                self._fleet,
                self._placer,
                Recovery(request.request_id, self._budget),
                deadline,
                arrived,
                Deadline(min(arrived + self._ttft_objective, deadline.expires_at)),
            )
            observers: list[Callable[[RequestOutcome], None]] = [metered.ended, self._placer.ended]
            if trace is not None:
                observers.append(trace.ended)
            self._requests.add(lifecycle)
            self._budget.deposit()
            try:
                tenant = request.tenant.name
                observers.append(self._limits.reserve(tenant, request.most_tokens).end)
                decision = await self._admission.admit(request, tenant, deadline)
                observers.append(self._admission.end)
                return await lifecycle.run(decision)
            finally:
                self._requests.remove(lifecycle)
                # Capacity is released first, so that no failing metric can keep it.
                for observe in reversed(observers):
                    observe(lifecycle.outcome)


def _num_tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.token_ids) for request in requests)


def _normalized(vectors: Float32Array) -> Float32Array:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: Float32Array = (vectors / np.maximum(norms, _LEAST_NORM)).astype(np.float32)
    return scaled
