"""Writer of OpenAI's Responses API: an object of items, whole or as a stream of typed events."""

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import msgspec

from baton.sampling import SamplingDefaults
from baton_router.apis.answers.answer_writer import COMMENT, DONE, AnswerStart, Json, named_event
from baton_router.apis.answers.blocks import Block, BlockDelta, Blocks, BlockStart, Change, Kind
from baton_router.apis.answers.sequence_reader import ScoredToken, SequenceDelta
from baton_router.apis.edge.errors import Failure
from baton_router.apis.responses.functions import Functions
from baton_router.apis.responses.schemas import FunctionTool, Namespace, ResponsesRequest
from baton_router.apis.responses.store import item_id, new_response_id
from baton_router.apis.responses.text_scores import TextScores

_ID_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_CONTENTS = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
}

# As which tier a request is served that leaves it to the server.
_TIERS = {None: "default", "auto": "default"}

Tool = FunctionTool | Namespace

Save = Callable[[Json], Awaitable[bool]]
"""Function that stores a response, and returns whether it is stored."""


class ResponseWriter:
    """Writer of one response, an `AnswerWriter`.

    Args:
        functions: of the request.
        save: stores the response once it has ended; None: it is not to be stored.
    """

    keep_alive = COMMENT
    opens_with_usage = False

    def __init__(
        self, body: ResponsesRequest, functions: Functions, save: Save | None, start: AnswerStart
    ) -> None:
        self._body = body
        self._functions = functions
        self._start = start
        self._save = save
        self._id = new_response_id(start.request_id)
        self._created = int(time.time())
        self._blocks = Blocks(is_parsed=start.is_parsed)
        self._num_events = 0
        self._scores: TextScores | None = None
        if body.has_logprobs and start.tokens is not None:
            self._scores = TextScores(start.tokens)
        self._scored: dict[int, list[ScoredToken]] = {}  # by the index of their block

    def opening(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def part(self, update: SequenceDelta) -> bytes:
        if self._scores is None:  # hot path
            return b"".join(map(self._written, self._blocks.feed(update)))
        changes = self._scored_changes(update, self._scores)
        return b"".join([self._written(*change) for change in changes])

    async def closing(self) -> bytes:
        response = await self._finished()
        return self._event(f"response.{response['status']}", response=response) + DONE

    def failed(self, failure: Failure) -> bytes:
        # Clients read no event before the one that creates the response.
        opened = b"" if self._num_events else self.opening()
        ended = b"".join(map(self._written, self._blocks.cut()))
        error = self._event(
            "error", code=failure.code, message=failure.message, param=failure.param
        )
        code = "rate_limit_exceeded" if failure.status == 429 else "server_error"
        response = self._response(
            "failed",
            error={"code": code, "message": failure.message},
            output=self._items(),
        )
        return opened + ended + error + self._event("response.failed", response=response) + DONE

    async def whole(self, updates: Sequence[SequenceDelta]) -> Json:
        for update in updates:
            changes: Iterator[object] = self._blocks.feed(update)
            if self._scores is not None:
                changes = self._scored_changes(update, self._scores)
            for _ in changes:
                pass
        return await self._finished()

    def _scored_changes(
        self, update: SequenceDelta, scores: TextScores
    ) -> Iterator[tuple[Change, Sequence[ScoredToken]]]:
        """Yields what changes with a piece of the answer, each with the scored tokens of its
        text."""
        scores.add(update.tokens)
        for change in self._blocks.feed(update):
            taken: Sequence[ScoredToken] = ()
            if change.block.kind == "call":
                scores.pass_call()
            elif isinstance(change, BlockDelta):
                taken = scores.take(change.piece)
            if taken and change.block.kind == "text":
                self._scored.setdefault(change.block.index, []).extend(taken)
            yield change, taken

    # The response.

    async def _finished(self) -> Json:
        is_cut = self._blocks.is_cut
        response = self._response(
            "incomplete" if is_cut else "completed",
            output=self._items(),
            usage=self._usage(),
            completed_at=None if is_cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            store=self._save is not None,
        )
        if self._start.make_extra is not None:
            response["baton"] = self._start.make_extra(self._start.readers)
        if self._save is not None:
            response["store"] = await self._save(response)
        return response

    def _response(self, status: str, **more: object) -> Json:
        body = self._body
        given = SamplingDefaults(temperature=body.temperature, top_p=body.top_p)
        applied = given.over(self._start.defaults)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "frequency_penalty": body.frequency_penalty,
            "incomplete_details": None,
            "instructions": body.instructions or None,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata,
            "model": self._start.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "presence_penalty": body.presence_penalty,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
            "safety_identifier": body.safety_identifier,
            "service_tier": _TIERS.get(body.service_tier, body.service_tier),
            "store": self._save is not None,
            "temperature": applied.temperature,
            "text": msgspec.to_builtins(body.text),
            "tool_choice": msgspec.to_builtins(body.tool_choice),
            "tools": msgspec.to_builtins(list(_known(body.tools))),
            "top_logprobs": body.top_logprobs,
            "top_p": applied.top_p,
            "truncation": body.truncation,
            "usage": None,
            "user": body.user or None,
            **more,
        }

    def _items(self) -> list[Json]:
        blocks = self._blocks.blocks
        cut = blocks[-1:] if self._blocks.is_cut else []
        return [self._item(b, "incomplete" if b in cut else "completed") for b in blocks]

    def _item(self, block: Block, status: str, *, is_new: bool = False) -> Json:
        """Returns the item of a block; `is_new`: without content, as it begins."""
        item: Json = {"id": self._item_id(block), "type": "message", "status": status}
        if block.kind == "call":
            arguments = "" if is_new else block.content
            call = {"call_id": block.call_id, "arguments": arguments}
            return {
                **item,
                "type": "function_call",
                **call,
                **self._functions.fields_of(block.name),
            }
        content = [] if is_new else [self._part(block)]
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "role": "assistant", "content": content}

    def _part(self, block: Block) -> Json:
        """Returns the content of a text or of reasoning."""
        return _part(block.kind, block.content, self._entries(block))

    def _entries(self, block: Block) -> list[Json]:
        scored = self._scored.get(block.index, ())
        return [] if self._scores is None else self._scores.entries(scored)

    def _item_id(self, block: Block) -> str:
        return item_id(_ID_PREFIXES[block.kind], self._id, block.index)

    def _usage(self) -> Json:
        (reader,) = self._start.readers
        num_cached = reader.num_cached_prompt_tokens
        return {
            "input_tokens": reader.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": reader.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": reader.num_reasoning_tokens},
            "total_tokens": reader.num_prompt_tokens + reader.num_output_tokens,
        }

    # Its events.

    def _event(self, name: str, /, **fields: object) -> bytes:
        written = named_event({"type": name, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return written

    def _written(self, change: Change, scored: Sequence[ScoredToken] = ()) -> bytes:
        block = change.block
        item = {"item_id": self._item_id(block), "output_index": block.index}
        place = item if block.kind == "call" else {**item, "content_index": 0}
        if isinstance(change, BlockStart):
            return self._started(block, place)
        if isinstance(change, BlockDelta):
            more: Json = {}
            if block.kind == "text":
                more = {"logprobs": [] if self._scores is None else self._scores.entries(scored)}
            return self._event(f"{_name(block)}.delta", **place, delta=change.piece, **more)
        return self._ended(block, place)

    def _started(self, block: Block, place: Json) -> bytes:
        item = self._item(block, "in_progress", is_new=True)
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return added
        part = _part(block.kind, "", [])
        return added + self._event("response.content_part.added", **place, part=part)

    def _ended(self, block: Block, place: Json) -> bytes:
        if block.kind == "call":
            name = self._functions.fields_of(block.name)["name"]
            fields: Json = {"name": name, "arguments": block.content}
        elif block.kind == "text":
            fields = {"text": block.content, "logprobs": self._entries(block)}
        else:
            fields = {"text": block.content}
        written = self._event(f"{_name(block)}.done", **place, **fields)
        if block.kind != "call":
            part = self._part(block)
            written += self._event("response.content_part.done", **place, part=part)
        item = self._item(block, "incomplete" if self._blocks.is_cut else "completed")
        done = self._event("response.output_item.done", output_index=block.index, item=item)
        return written + done


def _known(tools: Iterable[Tool | None]) -> Iterator[Tool]:
    """Yields the tools of a request without those that were left out, also of namespaces."""
    for tool in tools:
        if isinstance(tool, Namespace):
            functions = [function for function in tool.tools if function is not None]
            about = tool.description or ""  # clients take no null
            yield msgspec.structs.replace(tool, description=about, tools=functions)
        elif tool is not None:
            yield tool


def _name(block: Block) -> str:
    """Returns the beginning of the names of the events of a block's content."""
    return f"response.{_CONTENTS[block.kind]}"


def _part(kind: Kind, text: str, logprobs: list[Json]) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
