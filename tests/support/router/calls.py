"""Calls of the router, made of the messages that gRPC clients send."""

from collections.abc import Iterable, Sequence

from baton.v1 import inference_pb2 as pb
from baton_router.apis.grpc.call_wire import CallReader, images_beside, input_of
from baton_router.call.ending import FinishReason
from baton_router.call.generate_call import GenerateCall, ReceivedOutput
from baton_router.lifecycle.worker_wire import reason_of
from baton_router.text.intake import Intake, _reported_reason


def call_of(message: pb.GenerateRequest, max_tools_chars: int = 10_000) -> GenerateCall:
    """Returns the call. Raises `InvalidArgumentError`."""
    return CallReader(max_tools_chars).generate_call(message)


def told_endings(received: Iterable[pb.ReceivedTokens]) -> tuple[FinishReason | None, ...]:
    """Returns the finish reasons that only the client tells of, by sequence index."""
    outputs = [ReceivedOutput(told.ids, reason_of(told.finish_reason)) for told in received]
    return tuple(map(_reported_reason, outputs))


async def tokenized(intake: Intake, message: pb.TokenizeRequest) -> tuple[Sequence[int], str]:
    """Returns the tokens of a message's input, and the text that was tokenized."""
    return await intake.tokenize(await input_of(message), images_beside(message))
