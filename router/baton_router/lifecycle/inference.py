"""Request pipeline of the router, shared by gRPC and HTTP.

Knows nothing of connections: the service gives the caller and the deadline, and closes the
generator when the client disconnects.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

from baton.errors import InvalidArgumentError, UnavailableError
from baton.serving.coalescer import Coalescer
from baton.serving.deadline import Deadline
from baton.serving.logs import name_request
from baton.serving.telemetry.stages import stage
from baton.serving.tenant import Caller, Tenants
from baton.v1 import inference_pb2 as pb
from baton_router.admission.controller import AdmissionController
from baton_router.admission.rate_limit import RateLimits
from baton_router.admission.readiness import Readiness
from baton_router.fleet.fleet import Fleet
from baton_router.intake.intake import Intake
from baton_router.intake.model_card import ModelCard
from baton_router.lifecycle.answer import Answer
from baton_router.lifecycle.chunk import ClientEvent
from baton_router.lifecycle.in_flight import Requests
from baton_router.lifecycle.recovery import Recovery
from baton_router.lifecycle.request_lifecycle import RequestLifecycle
from baton_router.lifecycle.retry_budget import RetryBudget
from baton_router.placement.placer import Placer
from baton_router.request import Request, RequestOutcome
from baton_router.telemetry.request_meter import RequestMeter
from baton_router.telemetry.request_trace import tracing_request

# Seconds that a router which has just started waits for its first look at Redis and the workers; if
# Redis does not answer, its clients should rather get an error and try another router.
_DISCOVERY_SECONDS = 5.0

# Number of received tokens from which a thread makes their text. Bytes that are no characters are
# the slowest, at 3 to 30 us a token; fewer tokens stop the event loop for less than 10 ms.
_THREAD_FROM_TOKENS = 256

Observer = Callable[[RequestOutcome], None]
"""Callback that takes the outcome of a request once."""


async def wait_for_workers(
    fleet: Fleet, readiness: Readiness, deadline: Deadline, *, needs_prefill: bool = False
) -> None:
    """Waits until the workers of a model are known and, of a router that has just started, until
    the first can take requests; raises as `Readiness.wait_for_workers`."""
    await fleet.wait_for_discovery(min(deadline.remaining(), _DISCOVERY_SECONDS))
    deadline.check()
    if fleet.is_redis_up:  # else no worker can join
        await readiness.wait_for_workers(deadline, needs_prefill=needs_prefill)


class Inference:
    """Inference API of the router: text in, tokens out.

    Attributes:
        card: the model that is served.
    """

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
        coalesce_seconds: float,
        ttft_objective: float,
        *,
        capture_content: bool = False,
    ) -> None:
        """Tells workers that first tokens are due `ttft_objective` seconds after a request's
        arrival. Includes prompts and answers in traces if `capture_content`."""
        self.card = card
        self._intake = intake
        self._fleet = fleet
        self._requests = requests
        self._tenants = tenants
        self._limits = limits
        self._admission = admission_controller
        self._readiness = readiness
        self._placer = placer
        self._meter = meter
        self._coalesce_seconds = coalesce_seconds
        self._ttft_objective = ttft_objective
        self._capture_content = capture_content
        self._budget = RetryBudget()

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of one sequence now, prompt and output together."""
        return min(self.card.max_model_len, self._fleet.max_model_len)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the serving workers in hex; of several ones each, with commas between;
        empty if no worker serves."""
        fingerprints = {m.record.fingerprint.hex() for m in self._fleet.members if m.is_serving}
        return ",".join(sorted(fingerprints))

    async def wait_for_workers(self, deadline: Deadline, *, needs_prefill: bool = False) -> None:
        """Waits until the workers are known and, of a router that has just started, until the first
        can take requests; raises as `Readiness.wait_for_workers`, and `ModelOutputError` for a
        model that does not generate."""
        self.card.check_makes(None)
        await wait_for_workers(self._fleet, self._readiness, deadline, needs_prefill=needs_prefill)

    async def generate(
        self, message: pb.GenerateRequest, caller: Caller, deadline: Deadline
    ) -> AsyncGenerator[ClientEvent, None]:
        """Yields the events of one request, as `Inference.Generate` promises them. The reader has
        to close the generator, which ends the request immediately and releases all it holds.

        Raises the errors that `baton.serving.errors` lists.
        """
        arrived = time.monotonic()
        with (
            tracing_request(message, self.card, with_content=self._capture_content) as trace,
            self._meter.begin(message.WhichOneof("input"), arrived) as metered,
        ):
            request = await self._read(message, caller, deadline)
            name_request(request.request_id)
            answer = await self._answer_to(request, arrived, metered.first_token)
            recovery = Recovery(request.request_id, self._budget)
            lifecycle = RequestLifecycle(
                request,
                self._fleet,
                self._placer,
                answer,
                recovery,
                deadline,
                Coalescer(self._coalesce_seconds),
                Deadline(min(arrived + self._ttft_objective, deadline.expires_at)),
            )
            observers: list[Observer] = [metered.ended, self._placer.ended]
            if trace is not None:
                observers.append(trace.ended)
            self._requests.add(lifecycle)
            self._budget.deposit()
            try:
                tenant = request.tenant.name
                observers.append(self._limits.reserve(tenant, request.most_tokens).end)
                decision = await self._admission.admit(request, tenant, deadline)
                observers.append(self._admission.end)
                # Closed here, so that all is released before the request counts as ended.
                async with aclosing(lifecycle.run(decision)) as responses:
                    async for response in responses:
                        yield response
            except InvalidArgumentError as error:
                raise _naming_tools(error, message, request) from error
            finally:
                self._requests.remove(lifecycle)
                outcome = answer.outcome(recovery.failures)
                # Capacity is released first, so that no failing metric can keep it.
                for observe in reversed(observers):
                    observe(outcome)

    async def _read(
        self, message: pb.GenerateRequest, caller: Caller, deadline: Deadline
    ) -> Request:
        """Returns the validated, tokenized request. Raises if it cannot be served."""
        tenant = self._tenants.of(caller)
        self._limits.count_request(tenant.name)
        if self._requests.is_draining:
            raise UnavailableError("the router is draining; another one will serve this")
        scores_prompt = message.sampling.HasField("prompt_logprobs")
        await self.wait_for_workers(deadline, needs_prefill=scores_prompt)
        with stage("tokenize"):
            return await self._intake.read(message, self._fleet.max_model_len, tenant)

    async def _answer_to(
        self, request: Request, arrived: float, on_first_token: Callable[[float], None]
    ) -> Answer:
        """Returns the answer to a request, made in a thread where it begins with many tokens."""
        make = partial(Answer, request, self.card, arrived, on_first_token)
        num_received = sum(map(len, request.received))
        return make() if num_received < _THREAD_FROM_TOKENS else await asyncio.to_thread(make)

    async def check(self, message: pb.GenerateRequest, caller: Caller) -> None:
        """Raises what `generate` raises for an invalid request, before any worker is called."""
        await self._intake.read(message, self._fleet.max_model_len, self._tenants.of(caller))

    async def tokenize(self, message: pb.TokenizeRequest) -> tuple[list[int], str]:
        """Returns the tokens of an input, and the text that was tokenized."""
        return await self._intake.tokenize(message)


def _naming_tools(
    error: InvalidArgumentError, message: pb.GenerateRequest, request: Request
) -> InvalidArgumentError:
    """Returns the error of a worker. One about a grammar that the router made of tools names the
    tools: the client has sent no grammar."""
    is_made = request.parsing is not None and not message.sampling.HasField("grammar")
    if is_made and error.field.startswith("sampling.grammar"):
        return InvalidArgumentError("parsing.tools", error.problem)
    return error
