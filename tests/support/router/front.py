"""The HTTP front of a router in this process: requests reach scripted workers, and no socket is
opened between client and router."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import anthropic
import httpx
import httpx2
import openai
from redis.asyncio import Redis

from baton.cluster.redis.client import connect
from baton.context_length import ContextLength
from baton.serving.grpc.large_requests import LargeRequests
from baton.serving.tenant import Tenants
from baton_router.apis.answers.http_call import MAX_SILENCE
from baton_router.apis.anthropic.messages import Messages
from baton_router.apis.edge.body.bodies import Bodies
from baton_router.apis.edge.body.structure import bounds_of
from baton_router.apis.edge.body.unknown_fields import UnknownFields
from baton_router.apis.openai.embeddings import PooledOutputs
from baton_router.apis.openai.generations import Generations
from baton_router.apis.page.timeline import timeline_for
from baton_router.apis.responses.limits import ResponseLimits
from baton_router.apis.responses.responses import Responses
from baton_router.apis.responses.store import ResponseStore
from baton_router.apis.routes import Routes
from baton_router.call.request import Request, work_of
from baton_router.lifecycle.in_flight import Requests
from baton_router.lifecycle.inference import Inference
from baton_router.lifecycle.pooled_inference import PooledInference
from baton_router.lifecycle.services import Services
from baton_router.routing.admission.admission_queue import MAX_WAITING
from baton_router.routing.admission.controller import AdmissionController
from baton_router.routing.admission.forecast import Forecasts
from baton_router.routing.admission.policy import admission_named
from baton_router.routing.admission.quotas import Quota, Quotas
from baton_router.routing.admission.rate_limit import RateLimits
from baton_router.routing.admission.readiness import Readiness, RouterReadiness
from baton_router.routing.placement.decision import DEFAULT_RULES
from baton_router.routing.placement.placer import Placer
from baton_router.served.aliases import Weights
from baton_router.served.served_models import Models, ServedModel
from baton_router.telemetry.access_log import AccessLog
from baton_router.telemetry.call_observer import CallObserver
from baton_router.telemetry.request_meter import RequestMeter
from baton_router.telemetry.tenant_meter import TenantMeter
from baton_router.text.images.image_reader import ImageReader
from baton_router.text.intake import Intake
from baton_router.text.model_card import ModelCard
from baton_router.text.pooled_intake import PooledIntake
from baton_router.text.prompt_images import PromptImages
from baton_router.text.request_bounds import RequestLimits
from tests.support.router.api_types import Checked
from tests.support.router.scripted import HANDOFFS, FakeFleet, Worker, card, fleet_of

MAX_INPUTS, MAX_INPUT_TOKENS = 8, 60
LIMITS = RequestLimits(max_inputs=MAX_INPUTS, max_input_tokens=MAX_INPUT_TOKENS)
MAX_BODY_BYTES = 8 * 2**20
SECONDS = 20.0
TTFT_OBJECTIVE = 2.0
NO_LIMITS = Quota()
NO_REDIS = "redis://127.0.0.1:1"  # it does not answer


class _FrontFleet(FakeFleet):
    """Scripted workers, as all of a router sees them."""

    members: tuple[Worker, ...] = ()
    is_redis_up = True

    def __init__(self, fleet: FakeFleet, context_length: ContextLength) -> None:
        super().__init__(fleet.workers)
        self.context_length = context_length
        self.is_discovered = fleet.is_discovered

    async def wait_for_discovery(self, seconds: float) -> None:
        """Waits for the first workers, too, as a router does after that: up to the deadline."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds if seconds < 1.0 else SECONDS):
                await self.is_discovered.wait()


def routes_to(
    fleet: FakeFleet,
    model: ModelCard,
    quotas: Quotas,
    max_waiting: int = MAX_WAITING,
    responses_ttl: float = 0.0,
    redis: Redis | None = None,
    reasoning_field: str = "both",
    unknown: UnknownFields | None = None,
    origins: str | None = None,
    images: ImageReader | None = None,
    *,
    clamps: bool = True,
    max_silence: float = MAX_SILENCE,
) -> Routes:
    """The routes of a router without tenants, of one model."""
    return routes_of(
        {model.name: fleet},
        {model.name: model},
        quotas,
        max_waiting,
        responses_ttl=responses_ttl,
        redis=redis,
        reasoning_field=reasoning_field,
        unknown=unknown,
        origins=origins,
        images=images,
        clamps=clamps,
        max_silence=max_silence,
    )


def inference_of(fleet: FakeFleet, quotas: Quotas) -> Inference:
    """The request pipeline of the shipped model."""
    return served_by(routes_to(fleet, card(), quotas)).inference


def served_by(routes: Routes) -> ServedModel:
    """Returns the one model of these routes."""
    (served,) = routes._models
    return served


def routes_of(
    fleets: Mapping[str, FakeFleet],
    cards: Mapping[str, ModelCard],
    quotas: Quotas,
    max_waiting: int = MAX_WAITING,
    aliases: Mapping[str, Weights] = MappingProxyType({}),
    checkpoints: Mapping[str, str] = MappingProxyType({}),
    responses_ttl: float = 0.0,
    redis: Redis | None = None,
    reasoning_field: str = "both",
    unknown: UnknownFields | None = None,
    origins: str | None = None,
    images: ImageReader | None = None,
    *,
    clamps: bool = True,
    max_silence: float = MAX_SILENCE,
    meter: TenantMeter | None = None,
    access_log: AccessLog | None = None,
) -> Routes:
    """The routes of a router without tenants, of several models."""
    meter = meter or TenantMeter()
    controllers: list[AdmissionController] = []
    requests, limits, tenants = Requests(controllers), RateLimits(quotas.of), Tenants()
    served = [
        served_model(fleets[name], model, quotas, requests, limits, max_waiting, images, meter)
        for name, model in cards.items()
    ]
    controllers += [model.services.admission_controller for model in served]
    models = Models(served, tenants, limits, lambda: aliases, checkpoints)
    extra_of = partial(timeline_for, tenants=tenants)
    generations = Generations(
        models,
        SECONDS,
        extra_of,
        reasoning_field=reasoning_field,
        clamps_max_tokens=clamps,
        max_silence=max_silence,
    )
    store = ResponseStore(
        redis or connect(NO_REDIS), ResponseLimits(ttl_s=responses_ttl, per_tenant=9)
    )
    longest = max(model.max_model_len for model in cards.values())
    bodies = Bodies(MAX_BODY_BYTES, bounds_of(longest, request=LIMITS), LargeRequests(), unknown)
    readiness = RouterReadiness({model.name: model.services.readiness for model in served})
    return Routes(
        models,
        generations,
        Responses(generations, store, tenants),
        Messages(generations),
        PooledOutputs(models, SECONDS),
        requests,
        readiness,
        tenants,
        limits,
        CallObserver(tenants, meter, access_log),
        None,
        bodies,
        origins=origins,
    )


def served_model(
    fleet: FakeFleet,
    model: ModelCard,
    quotas: Quotas,
    requests: Requests,
    limits: RateLimits,
    max_waiting: int,
    images: ImageReader | None = None,
    meter: TenantMeter | None = None,
) -> ServedModel:
    """A model that scripted workers serve."""
    known = _FrontFleet(fleet, ContextLength(model.max_model_len))
    intake = Intake(model, LIMITS, images=PromptImages(model, images))
    is_pooled = model.pooling is not None
    rules = DEFAULT_RULES if is_pooled else HANDOFFS
    placer = Placer(known, rules, prefill_alone=is_pooled)  # type: ignore[arg-type]
    forecasts = Forecasts[Request](
        lambda request, earlier: placer.explain(work_of(request), earlier),
        lambda request: request.demand,
        admission_named("none"),
    )
    admission_controller = AdmissionController(quotas, forecasts, max_waiting)
    readiness = Readiness(lambda _needs_prefill: "")
    services = Services(
        model,
        intake,
        known,  # type: ignore[arg-type]
        requests,
        Tenants(),
        limits,
        admission_controller,
        readiness,
        placer,
        RequestMeter(model.name),
        TTFT_OBJECTIVE,
        tenant_meter=meter or TenantMeter(),
    )
    inference = Inference(services, coalesce_seconds=0.0)
    pooled_intake = PooledIntake(model, LIMITS)
    pooled_inference = PooledInference(services, pooled_intake)
    return ServedModel(services, None, inference, pooled_inference)  # type: ignore[arg-type]


@asynccontextmanager
async def front_of(
    *workers: Worker,
    model: ModelCard | None = None,
    limits: Quota = NO_LIMITS,
    max_waiting: int = MAX_WAITING,
    responses_ttl: float = 0.0,
    redis: Redis | None = None,
    reasoning_field: str = "both",
    unknown: UnknownFields | None = None,
    origins: str | None = None,
    images: ImageReader | None = None,
    on_body: Callable[[bytes], None] | None = None,
    clamps: bool = True,
    max_silence: float = MAX_SILENCE,
    is_discovered: asyncio.Event | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a front over these workers, which serve the shipped model or another one.
    `on_body` is called with each part of an answer as it is written; httpx waits for the last.
    `is_discovered`: set once the workers are known; None: they are from the beginning."""
    async with fleet_of(*workers) as fleet:
        fleet.is_discovered = is_discovered or fleet.is_discovered
        quotas = Quotas(default=limits)
        routes = routes_to(
            fleet,
            model or card(),
            quotas,
            max_waiting,
            responses_ttl,
            redis,
            reasoning_field,
            unknown,
            origins,
            images,
            clamps=clamps,
            max_silence=max_silence,
        )
        app = Checked(routes.app())
        transport = httpx.ASGITransport(app if on_body is None else _noted(app, on_body))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            yield client


def _noted(app: Any, on_body: Callable[[bytes], None]) -> Any:
    async def noted(scope: Any, receive: Any, send: Any) -> None:
        async def send_on(message: Any) -> None:
            on_body(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_on)

    return noted


def openai_client_of(front: httpx.AsyncClient) -> openai.AsyncOpenAI:
    """OpenAI's client of a front."""
    return openai.AsyncOpenAI(
        base_url="http://router/v1", api_key="any", max_retries=0, http_client=front
    )


def anthropic_client_of(front: httpx.AsyncClient) -> anthropic.AsyncAnthropic:
    """Anthropic's client of a front, which has an HTTP client of its own kind."""
    transport: Any = front._transport
    client = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(transport.app), base_url="http://router"
    )
    return anthropic.AsyncAnthropic(
        base_url="http://router", api_key="any", max_retries=0, http_client=client
    )
