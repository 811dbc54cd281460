"""Encoder leases: outputs of a prompt's encoder inputs, such as images, computed or kept by other
workers for the one that computes the prompt, by open calls.

They never fail an attempt: where a call fails, that worker encodes the input itself.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import grpc
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from baton.errors import BatonError, InternalError
from baton.serving.deadline import Deadline
from baton.serving.telemetry.stages import stage
from baton_router.call.failure import AttemptFailure
from baton_router.call.request import Work
from baton_router.call.usage import EncodedBy, EncodedInput
from baton_router.lifecycle import worker_wire
from baton_router.lifecycle.attempts import worker_methods
from baton_router.lifecycle.attempts.worker_call import WorkerCall, learn
from baton_router.lifecycle.worker_events import Encoded
from baton_router.routing.fleet.fleet import Fleet
from baton_router.routing.fleet.member import Member
from baton_router.routing.placement.encoder_sources import EncoderChoice

logger = logging.getLogger(__name__)


class EncoderLeases:
    """Encoder leases of one prompt. Use: `open`, `end` once the prompt is computed, `close`.

    Encoder tokens count as load of the source until it has encoded them. Those that the claimant
    encodes itself, also after a source has failed, are its load until the end. Meanwhile outputs
    are pending at both, so that other requests with equal inputs need not compute them.

    Args:
        claimant: worker that computes the prompt.
        on_encoded: is called with where each input was encoded.
    """

    def __init__(
        self,
        choices: Iterable[EncoderChoice],
        work: Work,
        claimant: Member,
        fleet: Fleet,
        deadline: Deadline,
        on_encoded: Callable[[EncodedInput], None],
    ) -> None:
        self._work = work
        self._claimant = claimant
        self._fleet = fleet
        self._on_encoded = on_encoded
        self._load = ExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._leases: list[_EncoderLease] = []
        for choice in choices:
            content = [work.request.encoder_inputs[choice.input].content_hash]
            self._load.enter_context(fleet.pending.pending(claimant.record.id, content))
            if choice.worker:
                call = WorkerCall(fleet.member(choice.worker), fleet, deadline)
                lease = _EncoderLease(choice, call)
                if not choice.only_cached:
                    pending = fleet.pending.pending(choice.worker, content)
                    lease.load.enter_context(pending)
                self._leases.append(lease)
            else:
                self._encode_locally(choice, "local")

    def open(self, first_token_due: Deadline | None) -> list[worker_wire.EncoderSource]:
        """Calls the sources, without waiting for any. Returns what the claimant fetches from."""
        self._tasks = [
            asyncio.create_task(self._hold(lease, first_token_due)) for lease in self._leases
        ]
        return [lease.source for lease in self._leases]

    def end(self) -> None:
        """Ends the leases, which releases the outputs. Idempotent."""
        self._load.close()
        for lease in self._leases:
            lease.load.close()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Ends the leases, and waits until the calls have ended."""
        self.end()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _encode_locally(self, choice: EncoderChoice, source: EncodedBy) -> None:
        load = self._claimant.loaded(num_sequences=0, num_encoder_tokens=choice.num_tokens)
        self._load.enter_context(load)
        self._on_encoded(EncodedInput(source))

    def _note_held(self, member: Member, choice: EncoderChoice) -> None:
        encoder_input = self._work.request.encoder_inputs[choice.input]
        self._fleet.note_held(member, [encoder_input.content_hash])

    async def _hold(self, lease: "_EncoderLease", first_token_due: Deadline | None) -> None:
        """Holds a lease until the claimant has the output, or its call fails."""
        choice, source = lease.choice, lease.call.member
        request = worker_wire.encode_request(
            self._work, lease.id, choice, self._claimant.record.id, first_token_due
        )
        try:
            with self._fleet.channel_to(source) as channel:
                self._on_encoded(await self._encoded(lease, channel, request))
                lease.load.close()
                source.circuit.record_success()
                self._note_held(source, choice)
                await lease.next("released")
                self._note_held(self._claimant, choice)
                await lease.call.read()  # the call's end
        except BatonError as error:
            logger.debug("%s encodes no input: %s", choice.worker, error)
            lease.load.close()
            self._encode_locally(choice, "failed")
        finally:
            lease.call.cancel()

    async def _encoded(
        self, lease: "_EncoderLease", channel: grpc.aio.Channel, request: worker_wire.EncodeRequest
    ) -> EncodedInput:
        """Waits until the source has the output. Raises the error by which its call failed."""
        choice, began = lease.choice, time.monotonic()
        encoder_input = self._work.request.encoder_inputs[choice.input]
        sent = () if choice.only_cached else encoder_input.tensors.values()
        details: dict[str, AttributeValue] = {
            "baton.worker": choice.worker,
            "baton.encode.num_tokens": choice.num_tokens,
            "baton.encode.num_bytes": sum(len(tensor.data) for tensor in sent),
        }
        with stage("encode", details, kind=SpanKind.CLIENT) as span:
            lease.call.start(*await worker_methods.encode(channel, request, encoder_input))
            await lease.next("admitted")
            encoded: Encoded = await lease.next("encoded")
            span.set_attributes(
                {
                    "baton.encode.was_cached": encoded.was_cached,
                    "baton.encode.queue_ms": 1000 * encoded.queue_seconds,
                    "baton.encode.step_ms": 1000 * encoded.elapsed,
                }
            )
        learn(lease.call.member, encoded)
        if encoded.was_cached:
            return EncodedInput("cached_remote")
        return EncodedInput("encode", time.monotonic() - began)


class _EncoderLease:
    """Lease on one output.

    Attributes:
        load: load of the source until it has encoded the input.
    """

    def __init__(self, choice: EncoderChoice, call: WorkerCall) -> None:
        self.choice = choice
        self.call = call
        self.id = worker_wire.new_lease_id()
        self.load = ExitStack()
        if not choice.only_cached:
            self.load.enter_context(call.member.loaded(num_encoder_tokens=choice.num_tokens))

    @property
    def source(self) -> worker_wire.EncoderSource:
        return worker_wire.encoder_source(self.choice.input, self.call.member, self.id)

    async def next(self, kind: str) -> Any:
        """Returns the next event, which has to be of this kind. Raises the error of the call if it
        fails."""
        got, received = await self.call.read()
        if isinstance(received, AttemptFailure):
            raise received.error
        if got != kind:
            raise InternalError(f"{self.choice.worker} sent {got!r} in place of {kind!r}")
        return received
