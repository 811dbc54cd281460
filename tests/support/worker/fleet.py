"""Real workers in this process as the fleet of a router's request lifecycle.

There is no Redis and no discovery: the order of the workers is the order in which they are
preferred.
"""

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from baton.client.client import Completion
from baton.client.progress import Progress
from baton.client.router_messages import generate_request, resumed_request
from baton.client.types import TokenLogprobs
from baton.cluster.prefix import PrefixNamespace
from baton.context_length import ContextLength
from baton.engine.core.engine_core import OnPlanned
from baton.engine.outputs import StepOutput
from baton.models.images.encoder_input import EncoderInput
from baton.rpc.worker_role import Role
from baton.sampling import SamplingParams
from baton.serving.deadline import Deadline
from baton.worker.engine_messages import layouts_to_messages
from baton_kvtransfer.exchange.exchange import KvExchange
from baton_router.apis.grpc.client_wire import to_message
from baton_router.call.prompt import NO_PROMPT, Prompt
from baton_router.lifecycle.answers.answer import Answer
from baton_router.lifecycle.recovery import Recovery
from baton_router.lifecycle.request_lifecycle import RequestLifecycle
from baton_router.lifecycle.retry_budget import RetryBudget
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.circuit_breaker import CircuitBreaker
from baton_router.routing.fleet.worker_model import PoolModel, WorkerModel
from baton_router.routing.placement.decision import Rules
from baton_router.routing.placement.placer import Placer
from baton_router.text.intake import Intake
from baton_router.text.request_bounds import RequestLimits
from tests.support.router.calls import call_of
from tests.support.router.scripted import HANDOFFS, NO_PAUSES, FakeFleet, card
from tests.support.worker.crew import Crew, Member, crew_of

SECONDS = 20.0


class FleetMember:
    """One worker of a crew as the request lifecycle sees it."""

    block_size = 16
    max_num_seqs = 256
    bytes_per_token = 0.0

    def __init__(self, name: str, member: Member) -> None:
        worker = member.worker
        pairing = worker.component(KvExchange).pairing
        self.name = name
        self.id = worker.membership.id
        self.role: Role = worker.membership.role
        self.endpoint = worker.server.main.endpoint
        self.kv_endpoint = worker.server.kv.endpoint
        self.epoch = worker.membership.epoch
        self.version = pairing.version
        self.fingerprint = pairing.fingerprint
        self.content = worker.model.engine.facts.info.content
        self.layouts = layouts_to_messages(pairing.layouts)
        self.circuit = CircuitBreaker()
        self.model = WorkerModel(PoolModel())
        self.is_lost = False
        self.num_sequences = 0
        self._worker = worker

    @property
    def record(self) -> "FleetMember":
        return self

    @property
    def excluded(self) -> str:
        return "lost" if self.is_lost else "draining" if self._worker.membership.is_draining else ""

    @property
    def stats(self) -> Any:
        return self._worker.model.engine.reading.stats

    @property
    def namespace(self) -> PrefixNamespace:
        return self._worker.model.engine.facts.info.namespace

    @contextmanager
    def loaded(self, *, num_sequences: int = 1, **_tokens: int) -> Iterator[None]:
        self.num_sequences += num_sequences
        try:
            yield
        finally:
            self.num_sequences -= num_sequences

    @contextmanager
    def slowed(self, seconds: float = 0.04) -> Iterator[None]:
        """Makes its engine rest before each step, so that the event loop keeps up with it."""
        core = self._worker.model.engine.handle.core  # type: ignore[attr-defined]
        step = core.step

        def rested(on_planned: OnPlanned) -> StepOutput:
            time.sleep(seconds)
            return step(on_planned)

        core.step = rested
        try:
            yield
        finally:
            core.step = step

    async def kill(self) -> None:
        """Ends all its calls and closes its port at once, as the death of a process does."""
        self.is_lost = True
        await self._worker.server.main.stop(0.0)

    async def drain(self) -> None:
        await self._worker.membership.drain()


class WorkerFleet(FakeFleet):
    """Workers in the order in which they are preferred, unless they are lost or drain."""

    def __init__(self, crew: Crew) -> None:
        numbers = Counter[str]()
        members = []
        for member in crew.members:
            role = member.membership.role
            members.append(FleetMember(f"{role}-{numbers[role]}", member))
            numbers[role] += 1
        super().__init__(members)  # type: ignore[arg-type]
        self.members = members
        self.crew = crew

    def candidates(self, prompt: Prompt = NO_PROMPT) -> list[Candidate]:
        return [
            Candidate(m.id, m.role, b"", num_queued_tokens=i, num_sequences=i, excluded=m.excluded)
            for i, m in enumerate(self.members)
        ]

    def report_loss(self, member: Any) -> None:
        member.is_lost = True

    def report_failure(self, member: Any) -> None:
        pass

    def member(self, name: str) -> Any:
        return next(m for m in self.members if name in (m.id, m.name))


@asynccontextmanager
async def fleet_of_workers(model: str, *roles: Role, **settings: Any) -> AsyncIterator[WorkerFleet]:
    """Workers of these roles on one checkpoint. Keywords are settings of all.

    The workers that are left at the end of the block must hold nothing.
    """
    async with crew_of(model, *roles, **settings) as crew:
        fleet = WorkerFleet(crew)
        try:
            yield fleet
        finally:
            await fleet.channels.close()
        await crew.nothing_held()


class Request:
    """One request of a client: an intake, a lifecycle, and the events as a client adds them up."""

    def __init__(
        self,
        fleet: WorkerFleet,
        prompt: str | list[int],
        params: SamplingParams,
        rules: Rules = HANDOFFS,
        encoder_inputs: tuple[EncoderInput, ...] = (),
    ) -> None:
        self.progress = Progress(params.n)
        self._fleet = fleet
        self._rules = rules
        self._encoder_inputs = encoder_inputs
        self._message = generate_request(prompt, params, "", "", 0)

    @property
    def answer(self) -> tuple[list[Completion], list[TokenLogprobs]]:
        """Valid after `run`."""
        return self.progress.completions(), self.progress.prompt_logprobs

    @property
    def num_migrations(self) -> int:
        """Valid after `run`."""
        assert self.progress.finished is not None, "a request that has not ended"
        return self.progress.finished.usage.num_migrations

    async def run(self) -> None:
        """Runs the request to its end; a task of it may be cancelled, and `resume` be called."""
        self.progress.begin_call()
        async with aclosing((await self._lifecycle()).run()) as events:
            async for event in events:
                self.progress.add(to_message(event))

    def resume(self) -> None:
        """Makes the next `run` go on behind what the client has received."""
        self._message = resumed_request(
            self._message, self.progress.accepted, self.progress.received
        )

    async def _lifecycle(self) -> RequestLifecycle:
        read = await Intake(card(), RequestLimits()).read(
            call_of(self._message), ContextLength(card().max_model_len)
        )
        asked = replace(read, encoder_inputs=self._encoder_inputs)
        recovery = Recovery(asked.request_id, RetryBudget(), NO_PAUSES)
        answer = Answer(asked, card(), time.monotonic())
        placer = Placer(self._fleet, self._rules)  # type: ignore[arg-type]
        deadline = Deadline.after(SECONDS)
        return RequestLifecycle(asked, self._fleet, placer, answer, recovery, deadline)  # type: ignore[arg-type]
