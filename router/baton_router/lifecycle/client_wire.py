"""Conversion of the router's data to messages for clients."""

from collections.abc import Iterable, Iterator

from google.protobuf.duration_pb2 import Duration

from baton.role_wire import role_to_message
from baton.v1 import inference_pb2 as pb
from baton_router.lifecycle.reorder_buffer import Token
from baton_router.lifecycle.worker_wire import Ending, duration
from baton_router.output_parsing.parts import Part, Reasoning, Text, ToolCallStart
from baton_router.placement.placement import Placement, Scored
from baton_router.request import Request
from baton_router.usage import Account, Timings


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


def prompt_logprobs(message: pb.PromptLogprobs, num_known: int) -> list[pb.GenerateResponse]:
    """Returns the log-probabilities of the prompt after the first `num_known`, if any."""
    num_repeated = max(0, num_known - message.position)
    rest = pb.PromptLogprobs(
        position=message.position + num_repeated,
        logprobs=message.logprobs[num_repeated:],
        top_logprobs=message.top_logprobs[num_repeated:],
    )
    return [pb.GenerateResponse(prompt_logprobs=rest)] if rest.logprobs else []


def chunk(
    index: int,
    tokens: list[Token],
    text: str,
    reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED,
) -> pb.GenerateResponse:
    """Returns tokens with the text that is ready, or the text alone if there are none.

    `reason`: why the sequence is complete with them.
    """
    response = pb.GenerateResponse()
    chunk = response.tokens  # filled in place: assigning a submessage copies it
    chunk.sequence_index = index
    chunk.text = text
    chunk.finish_reason = reason
    if tokens:
        chunk.position = tokens[0].position
        chunk.token_ids.extend([t.token_id for t in tokens])
        logprobs = [t.logprob for t in tokens if t.logprob is not None]
        if logprobs:
            chunk.logprobs.extend(logprobs)
        for token in tokens:
            if token.top is not None:
                chunk.top_logprobs.add(token_ids=token.top.token_ids, logprobs=token.top.logprobs)
    return response


def add_parts(chunk: pb.TokenChunk, parts: Iterable[Part], request: Request) -> None:
    """Adds parts to a chunk of a request that is parsed. Adjacent pieces become one part."""
    for part in parts:
        if chunk.parts:
            _add_part(chunk, _part_to_message(part, chunk.sequence_index, request))
        elif isinstance(part, Text):  # hot path: filled in place
            chunk.parts.add().text = part.text
        elif isinstance(part, Reasoning):
            chunk.parts.add().reasoning = part.text
        else:
            chunk.parts.append(_part_to_message(part, chunk.sequence_index, request))


def _part_to_message(part: Part, sequence_index: int, request: Request) -> pb.OutputPart:
    match part:
        case Text():
            return pb.OutputPart(text=part.text)
        case Reasoning():
            return pb.OutputPart(reasoning=part.text)
        case ToolCallStart():
            assert request.parsing is not None, "a part of an output that is not parsed"
            call_id = request.parsing.call_id(request.request_id, sequence_index, part.index)
            start = pb.ToolCallStart(index=part.index, id=call_id, name=part.name)
            return pb.OutputPart(tool_call_start=start)
    arguments = pb.ToolCallArguments(index=part.index, json=part.json)
    return pb.OutputPart(tool_call_arguments=arguments)


def _add_part(chunk: pb.TokenChunk, part: pb.OutputPart) -> None:
    """Adds a part, or continues the last one if it is a piece of the same."""
    last = chunk.parts[-1] if chunk.parts else None
    kind = part.WhichOneof("part")
    if last is None or last.WhichOneof("part") != kind:
        chunk.parts.append(part)
    elif kind == "text":
        last.text += part.text
    elif kind == "reasoning":
        last.reasoning += part.reasoning
    elif kind == "tool_call_arguments" and (
        last.tool_call_arguments.index == part.tool_call_arguments.index
    ):
        last.tool_call_arguments.json += part.tool_call_arguments.json
    else:
        chunk.parts.append(part)


def coalesced(responses: list[pb.GenerateResponse]) -> Iterator[pb.GenerateResponse]:
    """Yields the responses in fewer messages: adjacent tokens of a sequence become one chunk. Text
    or parts without tokens, held back to the end, stay by themselves: by them a client that resumes
    knows that it has all the text, and the finish reason came with the tokens before it."""
    held: dict[int, pb.GenerateResponse] = {}
    for response in responses:
        index = response.tokens.sequence_index
        if not response.HasField("tokens"):
            yield from held.values()
            held.clear()
            yield response
        elif index in held and response.tokens.token_ids:
            _append(held[index].tokens, response.tokens)
        else:
            if index in held:
                yield held.pop(index)
            held[index] = response
    yield from held.values()


def _append(chunk: pb.TokenChunk, more: pb.TokenChunk) -> None:
    chunk.token_ids.extend(more.token_ids)
    chunk.text += more.text
    chunk.logprobs.extend(more.logprobs)
    chunk.top_logprobs.extend(more.top_logprobs)
    chunk.finish_reason = more.finish_reason
    for part in more.parts:
        _add_part(chunk, part)


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
