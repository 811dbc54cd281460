"""Conversion of the router's data to messages for clients."""

from collections.abc import Iterable

from google.protobuf.duration_pb2 import Duration

from baton.role_wire import role_to_message
from baton.v1 import inference_pb2 as pb
from baton_router.call.chunk import Chunk, ClientEvent
from baton_router.call.parts import (
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)
from baton_router.call.request import Request
from baton_router.call.usage import Account, Timings
from baton_router.lifecycle.worker_wire import Ending, duration
from baton_router.routing.placement.encoder_sources import EncoderChoice
from baton_router.routing.placement.placement import Placement, Scored

_POOLED_OUTPUTS = {
    "embedding": pb.POOLED_OUTPUT_EMBEDDING,
    "score": pb.POOLED_OUTPUT_SCORE,
}


def accepted(request: Request, placement: Placement | None) -> pb.GenerateResponse:
    """Returns `accepted` with the chosen workers alone; `placement` None: nothing is left to do."""
    return pb.GenerateResponse(
        accepted=pb.Accepted(
            request_id=request.request_id,
            num_prompt_tokens=len(request.token_ids),
            placement=None if placement is None else _chosen(placement),
            seed=request.params.seed,
            model=request.model,
        )
    )


def pooled_output_to_message(kind: str) -> pb.PooledOutput.ValueType:
    """Converts the kind of a pooled output; empty: the model generates."""
    return _POOLED_OUTPUTS.get(kind, pb.POOLED_OUTPUT_UNSPECIFIED)


def _chosen(placement: Placement) -> pb.Placement:
    message = placement_to_message(placement, placement.chosen)
    for candidate in message.candidates:
        candidate.computes_prompt = not placement.prefill
    return message


def placement_to_message(placement: Placement, scored: Iterable[Scored]) -> pb.Placement:
    return pb.Placement(
        prefill_worker=placement.prefill,
        decode_worker=placement.decode,
        candidates=map(candidate_to_message, scored),
        prefix_source=placement.source,
        encoders=map(_encoder_to_message, placement.encoders),
    )


def _encoder_to_message(choice: EncoderChoice) -> pb.EncoderChoice:
    return pb.EncoderChoice(
        input=choice.input,
        num_tokens=choice.num_tokens,
        worker=choice.worker,
        only_cached=choice.only_cached,
        terms=choice.terms,
    )


def candidate_to_message(scored: Scored, *, computes_prompt: bool = False) -> pb.PlacementCandidate:
    candidate = scored.candidate
    return pb.PlacementCandidate(
        worker=candidate.worker,
        role=role_to_message(candidate.role),
        terms=scored.terms,
        excluded=candidate.excluded,
        num_cached_tokens=candidate.num_cached_tokens,
        computes_prompt=computes_prompt,
    )


def prompt_logprobs(message: pb.PromptLogprobs, num_known: int) -> list[ClientEvent]:
    """Returns the log-probabilities of the prompt after the first `num_known`, if any."""
    num_repeated = max(0, num_known - message.position)
    rest = pb.PromptLogprobs(
        position=message.position + num_repeated,
        logprobs=message.logprobs[num_repeated:],
        top_logprobs=message.top_logprobs[num_repeated:],
    )
    return [pb.GenerateResponse(prompt_logprobs=rest)] if rest.logprobs else []


def to_message(event: ClientEvent) -> pb.GenerateResponse:
    """Returns the message of an event. Hot path: filled in place, since assigning a submessage
    copies it, and only by what differs from a field's default."""
    if not isinstance(event, Chunk):
        return event
    response = pb.GenerateResponse()
    chunk = response.tokens
    chunk.text = event.text
    if event.sequence_index:
        chunk.sequence_index = event.sequence_index
    if event.finish_reason:
        chunk.finish_reason = event.finish_reason
    tokens = event.tokens
    if tokens.token_ids:
        chunk.position = tokens.position
        chunk.token_ids.extend(tokens.token_ids)
    if tokens.logprobs:
        chunk.logprobs.extend(tokens.logprobs)
    for top in tokens.tops:
        chunk.top_logprobs.add(token_ids=top.token_ids, logprobs=top.logprobs)
    for part in event.parts:
        _fill_part(chunk.parts.add(), part)
    return response


def _fill_part(message: pb.OutputPart, part: Part) -> None:
    match part:
        case Text(text):
            message.text = text
        case Reasoning(text):
            message.reasoning = text
        case ToolCallStart(index, name, call_id):
            message.tool_call_start.MergeFrom(pb.ToolCallStart(index=index, id=call_id, name=name))
        case ToolCallArguments(index, json):
            message.tool_call_arguments.MergeFrom(pb.ToolCallArguments(index=index, json=json))


def finished(index: int, ending: Ending, account: Account) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        finished=pb.Finished(
            sequence_index=index,
            reason=ending.reason,
            stop_string=ending.stop_string or "",
            score=ending.score,
            stop_token_id=ending.stop_token_id,
            usage=pb.Usage(
                num_prompt_tokens=account.num_prompt_tokens,
                num_output_tokens=account.num_output_tokens,
                num_cached_prompt_tokens=account.num_cached_prompt_tokens,
                num_transferred_blocks=account.num_transferred_blocks,
                num_transferred_bytes=account.num_transferred_bytes,
                num_reused_decode_blocks=account.num_reused_decode_blocks,
                num_migrations=account.num_migrations,
            ),
            timings=_timings(account.timings),
        )
    )


def _timings(timings: Timings) -> pb.Timings:
    def since(moment: float | None) -> Duration | None:
        return None if moment is None else duration(moment - timings.arrived)

    def lasting(length: float | None) -> Duration | None:
        return None if length is None else duration(length)

    return pb.Timings(
        admission=since(timings.admitted),
        prefill_queue=lasting(timings.prefill_queue_s),
        time_to_first_token=since(timings.first_token),
        exposed_transfer=lasting(timings.exposed_transfer_s),
        total=since(timings.finished),
        prefill_started=since(timings.prefill_started),
        handed_over=since(timings.handed_over),
    )
