"""Request pipeline of the router, shared by gRPC and HTTP.

Knows nothing of connections: the service gives the caller and the deadline, and closes the
generator when the client disconnects.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import NoReturn

from baton.context_length import ContextLength
from baton.errors import InvalidArgumentError
from baton.serving.deadline import Deadline
from baton.serving.grpc.coalescer import Coalescer
from baton.serving.logs import name_request
from baton.serving.telemetry.stages import stage
from baton.serving.tenant import Caller, Tenant
from baton_router.call.generate_call import GenerateCall
from baton_router.call.request import Request
from baton_router.lifecycle.answers.answer import Answer
from baton_router.lifecycle.events import ClientEvent
from baton_router.lifecycle.recovery import Recovery
from baton_router.lifecycle.request_lifecycle import RequestLifecycle
from baton_router.lifecycle.services import Services
from baton_router.telemetry.request_trace import tracing_request
from baton_router.text.model_card import ModelCard

# Number of received tokens from which a thread makes their text. Bytes that are no characters are
# the slowest, at 3 to 30 us a token; fewer tokens stop the event loop for less than 10 ms.
_THREAD_FROM_TOKENS = 256
# Field of a worker's error about the schema of a tool.
_OF_TOOL = re.compile(r"sampling\.grammar\[([^\]]+)\]")


class Inference:
    """Inference API of the router: text in, tokens out.

    Includes prompts and answers in traces if `capture_content`.
    """

    def __init__(
        self, services: Services, coalesce_seconds: float, *, capture_content: bool = False
    ) -> None:
        self._services = services
        self._coalesce_seconds = coalesce_seconds
        self._capture_content = capture_content

    @property
    def card(self) -> ModelCard:
        """The model that is served."""
        return self._services.card

    @property
    def context_length(self) -> ContextLength:
        """Maximum tokens of one sequence now, prompt and output together."""
        return self._services.fleet.context_length.within(self.card.max_model_len)

    @property
    def max_model_len(self) -> int:
        """Tokens of `context_length`."""
        return self.context_length.num_tokens

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the serving workers in hex; of several ones each, with commas between;
        empty if no worker serves."""
        members = self._services.fleet.members
        fingerprints = {m.record.fingerprint.hex() for m in members if m.is_serving}
        return ",".join(sorted(fingerprints))

    def tenant_of(self, caller: Caller) -> Tenant:
        """Returns the tenant, which it counts no request of. Raises `UnauthenticatedError`."""
        return self._services.tenants.of(caller)

    async def wait_for_workers(self, deadline: Deadline, *, needs_prefill: bool = False) -> None:
        """Waits as `Services.wait_for_workers`; raises `ModelOutputError` for a model that does not
        generate."""
        self.card.check_makes(None)
        await self._services.wait_for_workers(deadline, needs_prefill=needs_prefill)

    def refuse(self, caller: Caller, error: InvalidArgumentError) -> NoReturn:
        """Raises the error of a call that its API could not read, which counts, is metered and
        traced as any other."""
        services = self._services
        with tracing_request(None, self.card), services.meter.begin(None, time.monotonic()):
            services.tenant_of(caller)
            raise error

    async def generate(
        self,
        call: GenerateCall,
        caller: Caller,
        deadline: Deadline,
        on_read: Callable[[Request], None] | None = None,
    ) -> AsyncGenerator[ClientEvent, None]:
        """Yields the events of one request, as `Inference.Generate` promises them. The reader has
        to close the generator, which ends the request immediately and releases all it holds. Calls
        `on_read` with the request before it is queued.

        Raises the errors that `baton.serving.grpc.errors` lists.
        """
        services, arrived = self._services, time.monotonic()
        with (
            tracing_request(call, self.card, with_content=self._capture_content) as trace,
            services.meter.begin(call.kind, arrived) as metered,
        ):
            request = await self._read(call, caller, deadline)
            name_request(request.request_id)
            if on_read is not None:
                on_read(request)
            answer = await self._answer_to(request, arrived, metered.first_token)
            recovery = Recovery(request.request_id, services.retry_budget)
            lifecycle = RequestLifecycle(
                request,
                services.fleet,
                services.placer,
                answer,
                recovery,
                deadline,
                Coalescer(self._coalesce_seconds),
                services.due(arrived, deadline),
            )
            admitted = services.admitted(
                lifecycle, deadline, metered, trace, lambda: answer.outcome(recovery.failures)
            )
            try:
                # Closed here, so that all is released before the request counts as ended.
                async with admitted as decision, aclosing(lifecycle.run(decision)) as responses:
                    async for response in responses:
                        yield response
            except InvalidArgumentError as error:
                raise _naming_tools(error, call, request) from error

    async def _read(self, call: GenerateCall, caller: Caller, deadline: Deadline) -> Request:
        """Returns the validated, tokenized request. Raises if it cannot be served."""
        services = self._services
        tenant = services.tenant_of(caller)
        scores_prompt = call.params.prompt_logprobs is not None
        await self.wait_for_workers(deadline, needs_prefill=scores_prompt)
        with stage("tokenize"):
            request = await services.intake.read(call, services.fleet.context_length, tenant)
            await services.fleet.hash_ahead(request.prompt)
            return request

    async def _answer_to(
        self, request: Request, arrived: float, on_first_token: Callable[[float], None]
    ) -> Answer:
        """Returns a new answer. One that resumes after many tokens reads them in a thread."""
        make = partial(Answer, request, self.card, arrived, on_first_token)
        num_received = sum(map(len, request.received))
        return make() if num_received < _THREAD_FROM_TOKENS else await asyncio.to_thread(make)

    async def check(self, call: GenerateCall, caller: Caller) -> Request:
        """Returns the request of a call. Raises what `generate` raises for an invalid one, before
        any worker is called."""
        services = self._services
        limit = services.fleet.context_length
        request = await services.intake.read(call, limit, self.tenant_of(caller))
        services.images.check(request)
        return request


def _naming_tools(
    error: InvalidArgumentError, call: GenerateCall, request: Request
) -> InvalidArgumentError:
    """Returns the error of a worker. One about a grammar that the router made of tools names the
    tools: the client has sent no grammar."""
    named = _OF_TOOL.match(error.field)
    for at, tool in enumerate(call.parsing.tools if named and call.parsing else ()):
        if named and tool.name == named[1]:
            rest = error.field[named.end() :]
            field = f"parsing.tools[{at}].parameters_json_schema{rest}"
            return InvalidArgumentError(field, error.problem)
    is_made = request.parsing is not None and call.params.grammar is None
    if is_made and error.field.startswith("sampling.grammar"):
        return InvalidArgumentError("parsing.tools", error.problem)
    return error
