"""Router process: builds its components and serves until a signal."""

import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from redis.asyncio import Redis

from baton.cluster.redis.round_trips import RoundTrips
from baton.errors import FailedPreconditionError, UnsupportedModelError
from baton.fairness.fair_threads import FairThreads
from baton.models import DESCRIPTION, checkpoint_folder, read_json
from baton.rpc.cancellation import run_until
from baton.sampling import NO_DEFAULTS
from baton.serving.allocator import return_large_blocks
from baton.serving.grpc.access import ROUTER_NAME, Access
from baton.serving.grpc.certificates import check_role
from baton.serving.grpc.channels import Channels
from baton.serving.grpc.large_messages import LargeMessages
from baton.serving.grpc.large_requests import LargeRequests
from baton.serving.optional_dependencies import check_extra
from baton.serving.process import main, settle
from baton.serving.server import Server
from baton.serving.telemetry.exposition import Exposition
from baton.serving.telemetry.scrape_server import Render
from baton.serving.telemetry.serving import serve_metrics
from baton.serving.tenant import Tenants
from baton_router.apis.grpc.admin import RouterAdmin
from baton_router.apis.grpc.call_wire import CallReader
from baton_router.apis.grpc.service import InferenceService, observe
from baton_router.call.request import Request, work_of
from baton_router.event_loop import EventLoop
from baton_router.lifecycle.in_flight import Requests
from baton_router.lifecycle.inference import Inference
from baton_router.lifecycle.pooled_inference import PooledInference
from baton_router.lifecycle.services import Services
from baton_router.metrics.connection_metrics import ConnectionMetrics
from baton_router.metrics.image_metrics import ImageMetrics
from baton_router.metrics.router_metrics import RouterMetrics
from baton_router.metrics.tenant_metrics import TenantMetrics
from baton_router.routing.admission.controller import AdmissionController
from baton_router.routing.admission.forecast import Forecasts
from baton_router.routing.admission.image_budget import ImageBudget
from baton_router.routing.admission.policy import admission_named
from baton_router.routing.admission.quotas import Quotas
from baton_router.routing.admission.rate_limit import RateLimits
from baton_router.routing.admission.readiness import Readiness, RouterReadiness
from baton_router.routing.fleet.fleet import Fleet
from baton_router.routing.fleet.fleets import Fleets
from baton_router.routing.fleet.service_discovery import PATH as TARGETS_PATH
from baton_router.routing.fleet.service_discovery import ServiceDiscovery
from baton_router.routing.placement.decision import Rules
from baton_router.routing.placement.placer import Placer
from baton_router.routing.placement.record.recorder import Recorder, recording
from baton_router.routing.roles.rebalancer import Rebalancer
from baton_router.served.served_models import Models, ServedModel
from baton_router.settings import RouterSettings
from baton_router.telemetry.access_log import AccessLog
from baton_router.telemetry.call_observer import CallObserver
from baton_router.telemetry.request_meter import RequestMeter
from baton_router.telemetry.tenant_meter import TenantMeter
from baton_router.text.conversation.in_thread import text_threads
from baton_router.text.intake import Intake
from baton_router.text.model_card import ModelCard, read_model_card
from baton_router.text.pooled_intake import PooledIntake
from baton_router.text.prompt_images import PromptImages
from baton_router.text.request_bounds import message_bounds

if TYPE_CHECKING:
    from baton_router.apis.edge.server import HttpServer

logger = logging.getLogger(__name__)

# Longest time of a drain in which new requests are still served, in seconds.
_NOTICE_SECONDS = 5.0


async def serve(settings: RouterSettings) -> None:
    """Serves until a signal. Raises `FailedPreconditionError` without a Redis URL."""
    check_role(settings.tls, ("router",), ROUTER_NAME)
    round_trips = RoundTrips()
    redis = settings.redis.connect(round_trips)
    if redis is None:
        raise FailedPreconditionError(
            "a router finds its workers through Redis; set --redis-url, or let `baton up` start all"
        )
    if settings.http.port is not None:
        check_extra("http", "--http-port")
    tenants, quotas = settings.tenants(), settings.all_quotas()
    limits = RateLimits(quotas.of)
    cards = [_card(settings, name, path) for name, path in settings.models.items()]
    for card in cards:
        logger.info(
            "tool calls of %s are parsed in the format %s, reasoning in the format %s",
            card.name,
            card.tool_format or "none",
            card.reasoning_format or "none",
        )
        card.warm_up()
    return_large_blocks()
    large = LargeRequests(settings.large_request_budget_bytes)
    bounds = message_bounds(
        max(card.max_model_len for card in cards),
        settings.limits,
        settings.images,
        settings.server.max_message_bytes,
    )
    meter = TenantMeter(lambda: {*quotas.named, *tenants.names})
    access_log = None if settings.access_log is None else AccessLog(settings.access_log)
    observer = CallObserver(tenants, meter, access_log)
    server = Server(
        settings,
        by_token=settings.by_token,
        observe=partial(observe, observer),
        large=LargeMessages(large, bounds, holder_of=lambda caller: tenants.of(caller).name),
        connection_limits=settings.grpc,
    )
    async with AsyncExitStack() as stack:
        stack.callback(large.close)
        if access_log is not None:
            stack.callback(access_log.close)
        stack.push_async_callback(redis.aclose)
        channels = Channels(
            settings.server.max_message_bytes + settings.max_encoder_input_bytes,
            tls=settings.tls_to_workers,
            options=[("grpc.max_receive_message_length", settings.server.max_message_bytes)],
        )
        stack.push_async_callback(channels.close)
        fleets = Fleets(
            redis,
            channels,
            {card.name: card.tokenizer_hash for card in cards},
            settings.max_indexed_hashes,
            settings.max_workers,
            {card.name: card.pooling.kind for card in cards if card.pooling is not None},
        )
        stack.push_async_callback(fleets.stop)
        rules = Rules(settings.placement, settings.conditional_disaggregation)
        recorder = await stack.enter_async_context(recording(settings.record_file, rules))
        controllers: list[AdmissionController] = []  # filled once the models are made
        requests = Requests(controllers)
        images = ImageBudget(settings.max_encoder_input_bytes, settings.encoder_input_budget_bytes)
        threads = text_threads()
        stack.callback(threads.close)
        shared = _Shared(
            settings,
            redis,
            tenants,
            limits,
            images,
            quotas,
            requests,
            rules,
            recorder,
            meter,
            threads,
        )
        prompt_images = [await _prompt_images(card, settings, stack) for card in cards]
        served = [
            _served(card, fleets.of[card.name], shared, of_prompts)
            for card, of_prompts in zip(cards, prompt_images, strict=True)
        ]
        controllers += [model.services.admission_controller for model in served]
        models = Models(served, tenants, limits, settings.aliases(), settings.names_of_checkpoints)
        readiness = RouterReadiness({model.name: model.services.readiness for model in served})
        calls = CallReader(settings.limits.max_prompt_bytes)
        service = InferenceService(models, tenants, limits, settings.default_timeout_s, calls)
        server.add(InferenceService.add_to_server, service)
        exposition = Exposition()
        exposition.add(RouterMetrics(models, fleets, requests, round_trips))
        exposition.add(TenantMetrics(meter))
        exposition.add(ConnectionMetrics(server))
        readers = {model.name: model.services.intake.images.reader for model in served}
        pools = {name: None if one is None else one.pool for name, one in readers.items()}
        exposition.add(ImageMetrics(images, pools))
        admin = RouterAdmin(models, fleets, requests, readiness, tenants, calls, server.begin_drain)
        server.add_admin(RouterAdmin.add_to_server, admin)
        fleets.start()
        for model in served:
            model.rebalancer.start()
            stack.push_async_callback(model.rebalancer.stop)
        await serve_metrics(settings, exposition, server, stack, partial(_pages, fleets))
        http = None
        if settings.http.port is not None:
            parts = (
                redis,
                models,
                requests,
                readiness,
                tenants,
                limits,
                observer,
                exposition,
                large,
            )
            http = _http_server(settings, *parts)
            await http.start(settings.http.port)
            stack.push_async_callback(http.stop)
        _on_drain(server, requests, readiness, http, settings.drain_timeout_s)
        await server.start()
        stack.push_async_callback(server.stop)
        settle()
        await run_until(server.run_until_signal(), readiness.run(server.set_ready))


def _on_drain(
    server: Server,
    requests: Requests,
    readiness: RouterReadiness,
    http: "HttpServer | None",
    timeout: float,
) -> None:
    """Orders what a drain does: it tells clients of it, serves those that have not heard of it, and
    refuses new requests only then."""
    if http is not None:
        server.on_drain(http.begin_drain)
    server.on_drain(requests.begin_drain)
    server.on_drain(readiness.drain)
    server.on_drain(server.release_connections)
    if http is not None:
        notice = min(_NOTICE_SECONDS, timeout / 2)
        server.on_drain(partial(http.release_connections, notice))
    server.on_drain(requests.drain)
    if http is not None:
        server.on_drain(http.wait_idle)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Parts of a router that its models share."""

    settings: RouterSettings
    redis: Redis
    tenants: Tenants
    limits: RateLimits
    images: ImageBudget
    quotas: Quotas
    requests: Requests
    rules: Rules
    recorder: Recorder | None
    meter: TenantMeter
    threads: FairThreads


def _card(settings: RouterSettings, name: str, path: str) -> ModelCard:
    """Returns the card of a model under the router's settings. Raises as `read_model_card`."""
    template = settings.chat_templates.get(name)
    card = read_model_card(path, name, *settings.format_names, template)
    if settings.sampling_defaults == "api":
        card = replace(card, sampling_defaults=NO_DEFAULTS)
    if given := card.sampling_defaults.given:
        shown = ", ".join(f"{field} {value:g}" for field, value in given.items())
        logger.info(
            "requests to %s that name no sampling parameters have %s, as its "
            "generation_config.json says (--sampling-defaults api turns that off)",
            name,
            shown,
        )
    return card


async def _prompt_images(
    card: ModelCard, settings: RouterSettings, stack: AsyncExitStack
) -> PromptImages:
    """Returns the images of a model's prompts, with a reader if they can be read; logs why they
    cannot. Closing the stack ends the reader's processes."""
    if not card.takes_images:
        return PromptImages(card)
    try:
        check_extra("vision", f"images for model {card.name!r}")
        from baton.models.images.families import VISION_TOWERS
        from baton_router.text.images.image_reader import start_reader

        folder = checkpoint_folder(settings.models[card.name], DESCRIPTION)
        if (kind := read_json(folder / "config.json").get("model_type")) not in VISION_TOWERS:
            raise UnsupportedModelError(
                f"images of models of type {kind!r} are not implemented; expected one of "
                f"{', '.join(VISION_TOWERS)}"
            )
        reader = await start_reader(str(folder), settings.images, stack)
        return PromptImages(card, reader)
    except (FailedPreconditionError, UnsupportedModelError) as error:
        why = f"model {card.name!r} takes no images: {' '.join(str(error).split())}"
        logger.warning("%s", why)
        return PromptImages(card, why_none=why)


def _served(card: ModelCard, fleet: Fleet, shared: _Shared, images: PromptImages) -> ServedModel:
    """Returns a model with all that belongs to it alone."""
    settings = shared.settings
    intake = Intake(
        card,
        settings.limits,
        allow_special_tokens=settings.allow_special_tokens_in_chat,
        images=images,
        threads=shared.threads,
    )
    is_pooled = card.pooling is not None
    placer = Placer(fleet, shared.rules, shared.recorder, prefill_alone=is_pooled)
    forecasts = Forecasts[Request](
        lambda request, earlier: placer.explain(work_of(request), earlier),
        lambda request: request.demand,
        admission_named(settings.admission),
    )
    admission_controller = AdmissionController(shared.quotas, forecasts, settings.max_waiting)
    readiness = Readiness(
        placer.why_none,
        settings.max_waiting,
        needs_workers=not settings.ready_without_workers,
        hold_seconds=settings.unready_after_s,
    )
    objectives = settings.objectives
    services = Services(
        card,
        intake,
        fleet,
        shared.requests,
        shared.tenants,
        shared.limits,
        admission_controller,
        readiness,
        placer,
        RequestMeter(card.name),
        objectives.ttft,
        shared.images,
        tenant_meter=shared.meter,
    )
    rebalancer = Rebalancer(
        shared.redis,
        fleet,
        admission_controller,
        forecasts,
        objectives,
        settings.hysteresis,
        is_elastic=settings.elastic,
        takes_images=card.takes_images,
        model=card.name,
    )
    inference = Inference(
        services, settings.coalesce_ms / 1000, capture_content=settings.capture_content
    )
    pooled_intake = PooledIntake(card, settings.limits, shared.threads)
    pooled_inference = PooledInference(services, pooled_intake)
    return ServedModel(services, rebalancer, inference, pooled_inference)


def _pages(fleets: Fleets, endpoint: str) -> dict[str, Render]:
    """Returns the pages served beside the metrics at `endpoint`: service discovery."""
    return {TARGETS_PATH: ServiceDiscovery(fleets, endpoint).render}


def _http_server(
    settings: RouterSettings,
    redis: Redis,
    models: Models,
    requests: Requests,
    readiness: RouterReadiness,
    tenants: Tenants,
    limits: RateLimits,
    observer: CallObserver,
    exposition: Exposition,
    large: LargeRequests,
) -> "HttpServer":
    from baton_router.apis.anthropic.messages import Messages
    from baton_router.apis.edge.allowed_hosts import allowed_hosts
    from baton_router.apis.edge.body.bodies import Bodies
    from baton_router.apis.edge.body.structure import bounds_of
    from baton_router.apis.edge.body.unknown_fields import UnknownFields
    from baton_router.apis.edge.metrics import HttpMetrics
    from baton_router.apis.edge.server import HttpServer
    from baton_router.apis.openai.embeddings import PooledOutputs
    from baton_router.apis.openai.generations import Generations
    from baton_router.apis.page.timeline import timeline_for
    from baton_router.apis.responses.responses import Responses
    from baton_router.apis.responses.store import ResponseStore
    from baton_router.apis.routes import Routes

    timeout = settings.default_timeout_s
    generations = Generations(
        models,
        timeout,
        partial(timeline_for, tenants=tenants),
        reasoning_field=settings.http.reasoning_field,
        clamps_max_tokens=settings.http.excess_max_tokens == "clamp",
    )
    responses = Responses(generations, ResponseStore(redis, settings.responses), tenants)
    render = exposition.render if settings.metrics else None
    bounds = bounds_of(
        max(model.services.card.max_model_len for model in models), settings.http, settings.limits
    )
    unknown = UnknownFields(refuses=settings.http.unknown_fields == "refuse")
    exposition.add(HttpMetrics(unknown))
    bodies = Bodies(settings.http.max_body_bytes, bounds, large, unknown)
    access = None if settings.tls is None else Access(settings.by_token)
    hosts = allowed_hosts(settings.http.allowed_hosts, settings.host)
    routes = Routes(
        models,
        generations,
        responses,
        Messages(generations),
        PooledOutputs(models, timeout),
        requests,
        readiness,
        tenants,
        limits,
        observer,
        render,
        bodies,
        access,
        hosts,
        settings.http.allowed_origins,
    )
    asks = settings.client_auth == "certificate"
    return HttpServer(
        routes.app(), settings.host, settings.tls, settings.http, asks_for_certificates=asks
    )


def run(arguments: Sequence[str], program: str) -> None:
    """Runs a router until a signal. `arguments` follow `program` on the command line."""
    # With asyncio's own event loop, the loop takes a sixth of the time per message.
    main(
        RouterSettings,
        "router",
        serve,
        new_loop=EventLoop,
        arguments=arguments,
        program=program,
    )
