"""Service of ext_proc over gRPC: one stream for each HTTP request of an Envoy.

An error that concerns the client is an answer to the client; any other one ends the stream, upon
which Envoy does what its `failure_mode_allow` says.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from baton.envoy import external_processor_pb2 as pb
from baton.envoy import external_processor_pb2_grpc as pb_grpc
from baton.errors import BatonError, InvalidArgumentError, OverloadedError
from baton_picker import envoy_messages
from baton_picker.envoy_call import EnvoyCall
from baton_router.apis.edge.errors import BodyTimeoutError, failure_of

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name


class ExternalProcessorService(pb_grpc.ExternalProcessorServicer):
    """Service of ext_proc.

    Args:
        body_timeout: seconds for a request body to arrive.
        idle_timeout: seconds without a message after which a stream is closed.

    Attributes:
        num_streams: HTTP requests in flight.
    """

    def __init__(
        self,
        new_call: Callable[[], EnvoyCall],
        max_streams: int,
        body_timeout: float,
        idle_timeout: float,
    ) -> None:
        self.num_streams = 0
        self._new_call = new_call
        self._max_streams = max_streams
        self._body_timeout = body_timeout
        self._idle_timeout = idle_timeout

    async def Process(
        self, request_iterator: AsyncIterator[pb.ProcessingRequest], _context: Any
    ) -> AsyncGenerator[pb.ProcessingResponse, None]:
        if self.num_streams >= self._max_streams:
            error = OverloadedError(
                f"the endpoint picker has {self._max_streams} requests in flight; retry later"
            )
            yield envoy_messages.refusal(failure_of(error))
            return
        self.num_streams += 1
        call = self._new_call()
        try:
            async for response in self._answers(request_iterator, call):
                yield response
        finally:
            self.num_streams -= 1
            call.close()

    async def _answers(
        self, requests: AsyncIterator[pb.ProcessingRequest], call: EnvoyCall
    ) -> AsyncGenerator[pb.ProcessingResponse, None]:
        """Yields the answers until Envoy closes the stream, is silent for too long, or the client
        was answered here."""
        body_deadline: float | None = None
        now = asyncio.get_running_loop().time
        while True:
            if call.awaits_body and body_deadline is None:
                body_deadline = now() + self._body_timeout
            deadline = body_deadline if call.awaits_body else now() + self._idle_timeout
            try:
                async with asyncio.timeout_at(deadline):
                    request = await anext(requests, None)
            except TimeoutError:
                if call.awaits_body:
                    late = BodyTimeoutError(
                        f"the body did not come within {self._body_timeout:g} s"
                    )
                    yield envoy_messages.refusal(failure_of(late))
                return
            if request is None or request.observability_mode:
                return  # Envoy ignores the answers in that mode
            try:
                answers = await call.answer(request)
            except BatonError as error:
                failure = failure_of(error)
                if failure.is_bug or _is_of_envoy(error):
                    raise
                yield envoy_messages.refusal(failure)
                return
            for answer in answers:
                yield answer


def _is_of_envoy(error: BatonError) -> bool:
    """Whether a message of Envoy is wrong, and not what its client sent."""
    return isinstance(error, InvalidArgumentError) and error.field != "body"
