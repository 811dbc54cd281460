"""Writer of Anthropic's Messages API: a message of blocks, whole or as a stream of typed events."""

import hashlib
from collections.abc import Sequence

from baton_router.apis.answers.answer_writer import AnswerStart, Json, named_event
from baton_router.apis.answers.blocks import Block, BlockDelta, Blocks, BlockStart, Change
from baton_router.apis.answers.sequence_reader import SequenceDelta
from baton_router.apis.anthropic.errors import error_body
from baton_router.apis.edge.errors import Failure
from baton_router.call.arguments import arguments_object

# Type of a delta and the name of its piece, by the kind of block.
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


_PING = named_event({"type": "ping"})


class MessageWriter:
    """Writer of one message, an `AnswerWriter`."""

    keep_alive = _PING
    opens_with_usage = True

    def __init__(self, start: AnswerStart) -> None:
        self._start = start
        self._blocks = Blocks(is_parsed=start.is_parsed)
        self._stop_sequence: str | None = None

    def opening(self) -> bytes:
        message = self._message([], {"stop_reason": None, "stop_sequence": None})
        return named_event({"type": "message_start", "message": message}) + _PING

    def part(self, update: SequenceDelta) -> bytes:
        self._note_end(update)
        return b"".join(map(_written, self._blocks.feed(update)))

    async def closing(self) -> bytes:
        delta = {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
        if self._start.make_extra is not None:
            delta["baton"] = self._start.make_extra(self._start.readers)
        return named_event(delta) + named_event({"type": "message_stop"})

    def failed(self, failure: Failure) -> bytes:
        return named_event(error_body(failure))

    async def whole(self, updates: Sequence[SequenceDelta]) -> Json:
        for update in updates:
            self._note_end(update)
            for _ in self._blocks.feed(update):
                pass
        blocks = self._blocks.blocks
        if self._blocks.is_cut and blocks and blocks[-1].kind == "call":
            blocks = blocks[:-1]  # its input ends somewhere, and must not be used
        message = self._message([_block(block) for block in blocks], self._ending())
        if self._start.make_extra is not None:
            message["baton"] = self._start.make_extra(self._start.readers)
        return message

    def _note_end(self, update: SequenceDelta) -> None:
        if isinstance(update.stop_reason, str):
            self._stop_sequence = update.stop_reason

    def _message(self, content: list[Json], ending: Json) -> Json:
        return {
            "id": f"msg_{self._start.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._start.model,
            "content": content,
            **ending,
            "usage": self._usage(),
        }

    def _ending(self) -> Json:
        if self._stop_sequence is not None:
            reason = "stop_sequence"
        elif self._blocks.is_cut:
            (reader,) = self._start.readers
            is_full = reader.clamped_to is not None
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif any(block.kind == "call" for block in self._blocks.blocks):
            reason = "tool_use"
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": self._stop_sequence}

    def _usage(self) -> Json:
        """Returns the usage so far. Tokens of the prompt that were cached count apart."""
        (reader,) = self._start.readers
        num_cached = reader.num_cached_prompt_tokens
        return {
            "input_tokens": reader.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": reader.num_output_tokens,
        }


def _written(change: Change) -> bytes:
    block = change.block
    if isinstance(change, BlockStart):
        content = _new_block(block)
        return _event("content_block_start", block, content_block=content)
    if isinstance(change, BlockDelta):
        kind, name = _DELTAS[block.kind]
        return _event("content_block_delta", block, delta={"type": kind, name: change.piece})
    signed = b""
    if block.kind == "reasoning":
        delta = {"type": "signature_delta", "signature": _signature(block)}
        signed = _event("content_block_delta", block, delta=delta)
    return signed + _event("content_block_stop", block)


def _event(kind: str, block: Block, **fields: Json) -> bytes:
    return named_event({"type": kind, "index": block.index, **fields})


def _new_block(block: Block) -> Json:
    """Returns a block without content, as it begins."""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _block(block: Block) -> Json:
    new = _new_block(block)
    if block.kind == "call":
        return {**new, "input": arguments_object(block.content)}
    if block.kind == "reasoning":
        return {**new, "thinking": block.content, "signature": _signature(block)}
    return {**new, "text": block.content}


def _signature(block: Block) -> str:
    """Returns the signature of a thought, without which clients drop it; the router ignores it."""
    return hashlib.sha256(block.content.encode()).hexdigest()
