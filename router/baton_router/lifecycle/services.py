"""Services of one model, which all its requests go through, generated or pooled: tenants, workers,
limits, admission, observers."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from baton.serving.deadline import Deadline
from baton.serving.tenant import Caller, Tenant, Tenants
from baton_router.call.request import RequestOutcome
from baton_router.lifecycle.in_flight import Lifecycle, Requests
from baton_router.lifecycle.retry_budget import RetryBudget
from baton_router.routing.admission.controller import AdmissionController
from baton_router.routing.admission.image_budget import ImageBudget
from baton_router.routing.admission.rate_limit import RateLimits
from baton_router.routing.admission.readiness import Readiness
from baton_router.routing.fleet.fleet import Fleet
from baton_router.routing.placement.decision import Decision
from baton_router.routing.placement.placer import Placer
from baton_router.telemetry import call_observer
from baton_router.telemetry.request_meter import MeteredRequest, RequestMeter
from baton_router.telemetry.request_trace import RequestTrace
from baton_router.telemetry.tenant_meter import TenantMeter
from baton_router.text.intake import Intake
from baton_router.text.model_card import ModelCard

# Seconds that a router which has just started waits for its first look at Redis and the workers; if
# Redis does not answer, its clients should rather get an error and try another router.
_DISCOVERY_SECONDS = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Services:
    """Services of one model. `requests`, `tenants`, `limits`, `images` and `tenant_meter` are the
    router's.

    Attributes:
        ttft_objective: seconds after a request's arrival when workers are told that its first
            token, or its pooled output, is due.
    """

    card: ModelCard
    intake: Intake
    fleet: Fleet
    requests: Requests
    tenants: Tenants
    limits: RateLimits
    admission_controller: AdmissionController
    readiness: Readiness
    placer: Placer
    meter: RequestMeter
    ttft_objective: float
    images: ImageBudget = field(default_factory=ImageBudget)
    retry_budget: RetryBudget = field(default_factory=RetryBudget)
    tenant_meter: TenantMeter = field(default_factory=TenantMeter)

    def tenant_of(self, caller: Caller) -> Tenant:
        """Returns the tenant, whose request counts towards its limits. Raises if it is over one, or
        the router drains."""
        tenant = self.tenants.of(caller)
        self.limits.count_request(tenant.name)
        self.requests.check_open()
        return tenant

    async def wait_for_workers(self, deadline: Deadline, *, needs_prefill: bool = False) -> None:
        """Waits until the workers are known and, of a router that has just started, until the first
        can take requests; raises as `Readiness.wait_for_workers`."""
        await self.fleet.wait_for_discovery(min(deadline.remaining(), _DISCOVERY_SECONDS))
        deadline.check()
        if self.fleet.is_redis_up:  # else no worker can join
            await self.readiness.wait_for_workers(deadline, needs_prefill=needs_prefill)

    def due(self, arrived: float, deadline: Deadline) -> Deadline:
        """Returns when the first token is due of a request that arrived at this time."""
        return Deadline(min(arrived + self.ttft_objective, deadline.expires_at))

    @asynccontextmanager
    async def admitted(
        self,
        lifecycle: Lifecycle,
        deadline: Deadline,
        metered: MeteredRequest,
        trace: RequestTrace | None,
        outcome: Callable[[], RequestOutcome],
    ) -> AsyncIterator[Decision | None]:
        """Admits a request, which is in flight within the block. Raises if it is not admitted.

        `outcome` is called once after the block, for all who were told of the request.
        """
        request = lifecycle.request
        observers: list[Callable[[RequestOutcome], None]] = [
            metered.ended,
            self.placer.ended,
            call_observer.ended,
        ]
        if trace is not None:
            observers.append(trace.ended)
        self.requests.add(lifecycle)
        self.retry_budget.deposit()
        try:
            if request.encoder_inputs:
                observers.append(self.images.reserve(request, self.admission_controller.abandon))
            tenant = request.tenant.name
            observers.append(self.limits.reserve(tenant, request.most_tokens).end)
            decision = await self.admission_controller.admit(request, tenant, deadline)
            observers += [self.tenant_meter.ended, self.admission_controller.end]
            yield decision
        finally:
            self.requests.remove(lifecycle)
            ended = outcome()
            # Capacity is released first, so that no failing metric can keep it.
            for observe in reversed(observers):
                observe(ended)
