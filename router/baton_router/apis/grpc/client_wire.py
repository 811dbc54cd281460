"""Conversion of the router's data to messages for clients."""

from collections.abc import Iterable

from baton.rpc.roles import role_to_message
from baton.v1 import inference_pb2 as pb
from baton_router.call.output_delta import OutputDelta
from baton_router.call.parts import (
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)
from baton_router.lifecycle.events import Accepted, ClientEvent, Finished
from baton_router.lifecycle.worker_events import PromptScores
from baton_router.lifecycle.worker_wire import duration, reason_to_message
from baton_router.routing.placement.encoder_sources import EncoderChoice
from baton_router.routing.placement.placement import Placement, Scored

_POOLED_OUTPUTS = {
    "embedding": pb.POOLED_OUTPUT_EMBEDDING,
    "score": pb.POOLED_OUTPUT_SCORE,
}


def pooled_output_to_message(kind: str) -> pb.PooledOutput.ValueType:
    """Converts the kind of a pooled output; empty: the model generates."""
    return _POOLED_OUTPUTS.get(kind, pb.POOLED_OUTPUT_UNSPECIFIED)


def _accepted(event: Accepted) -> pb.GenerateResponse:
    request, placement = event.request, event.placement
    return pb.GenerateResponse(
        accepted=pb.Accepted(
            request_id=request.request_id,
            num_prompt_tokens=len(request.token_ids),
            placement=None if placement is None else _chosen(placement),
            seed=request.params.seed or 0,
            model=request.model,
            content=event.content,
        )
    )


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


def to_message(event: ClientEvent) -> pb.GenerateResponse:
    """Returns the message of an event."""
    match event:
        case OutputDelta():
            return _tokens(event)  # hot path
        case Accepted():
            return _accepted(event)
        case PromptScores():
            return _prompt_logprobs(event)
        case Finished():
            return _finished(event)


def _tokens(delta: OutputDelta) -> pb.GenerateResponse:
    """Returns the message of a piece of a sequence: filled in place, since assigning a submessage
    copies it, and only by what differs from a field's default."""
    response = pb.GenerateResponse()
    chunk = response.tokens
    chunk.text = delta.text
    if delta.sequence_index:
        chunk.sequence_index = delta.sequence_index
    if delta.finish_reason:
        chunk.finish_reason = reason_to_message(delta.finish_reason)
    tokens = delta.tokens
    if tokens.token_ids:
        chunk.position = tokens.position
        chunk.token_ids.extend(tokens.token_ids)
    if tokens.logprobs:
        chunk.logprobs.extend(tokens.logprobs)
    for top in tokens.tops:
        chunk.top_logprobs.add(token_ids=top.token_ids, logprobs=top.logprobs)
    for part in delta.parts:
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


def _prompt_logprobs(scores: PromptScores) -> pb.GenerateResponse:
    message = pb.PromptLogprobs(position=scores.position, logprobs=scores.logprobs)
    for top in scores.tops:
        message.top_logprobs.add(token_ids=top.token_ids, logprobs=top.logprobs)
    return pb.GenerateResponse(prompt_logprobs=message)


def _finished(event: Finished) -> pb.GenerateResponse:
    ending, account = event.ending, event.account
    durations = account.timings.durations().items()
    return pb.GenerateResponse(
        finished=pb.Finished(
            sequence_index=event.sequence_index,
            reason=reason_to_message(ending.reason),
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
            timings=pb.Timings(
                **{name: None if last is None else duration(last) for name, last in durations}
            ),
        )
    )
