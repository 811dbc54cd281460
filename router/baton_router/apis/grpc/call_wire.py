"""Conversion of clients' messages to calls of the router."""

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from baton.errors import InvalidArgumentError
from baton.models.images.encoder_input import EncoderInput
from baton.rpc.encoder_inputs import tensors_of
from baton.rpc.params import params_of
from baton.v1 import admin_pb2
from baton.v1 import inference_pb2 as pb
from baton_router.call.generate_call import (
    Conversation,
    EmbedCall,
    GenerateCall,
    GivenClip,
    GivenImage,
    PromptInput,
    ReceivedOutput,
    ScoreCall,
    ToolCall,
    Turn,
)
from baton_router.call.output_format import Choice, ParsingOptions, Tool
from baton_router.lifecycle.worker_wire import reason_of
from baton_router.text.conversation.in_thread import in_thread_if_long

_CHOICES = {
    pb.TOOL_CHOICE_UNSPECIFIED: Choice.AUTO,
    pb.TOOL_CHOICE_AUTO: Choice.AUTO,
    pb.TOOL_CHOICE_NONE: Choice.NONE,
    pb.TOOL_CHOICE_REQUIRED: Choice.REQUIRED,
    pb.TOOL_CHOICE_NAMED: Choice.NAMED,
}
_NO_PARSING = pb.OutputParsing()

WithInput = pb.GenerateRequest | pb.TokenizeRequest | admin_pb2.FlushCacheRequest


class CallReader:
    """Reader of calls. Every rejection is an `InvalidArgumentError` that names the field.

    Args:
        max_tools_chars: maximum characters of all descriptions and schemas of a call's tools.
    """

    def __init__(self, max_tools_chars: int) -> None:
        self._max_tools_chars = max_tools_chars

    async def generation(self, message: pb.GenerateRequest) -> GenerateCall:
        """Returns the call; a thread reads one with a long conversation."""
        return await in_thread_if_long(len(message.chat.messages), self.generate_call, message)

    def generate_call(self, message: pb.GenerateRequest) -> GenerateCall:
        params = params_of(message.sampling, default_seed=secrets.randbits(64))
        parsing = self._parsing(message.parsing) if message.HasField("parsing") else None
        return GenerateCall(
            _input(message, message.parsing, parsing),
            params,
            message.model,
            message.request_id,
            message.priority,
            parsing,
            images_beside(message),
            tuple(map(_encoder_input, message.encoder_inputs)),
            [_received(at, output) for at, output in enumerate(message.continue_from)],
            message.clamp_max_tokens,
            content=message.continue_content,
        )

    def _parsing(self, message: pb.OutputParsing) -> ParsingOptions:
        choice = _CHOICES.get(message.tool_choice)
        if choice is None:
            raise InvalidArgumentError(
                "parsing.tool_choice",
                f"is {message.tool_choice}; must be one of the values of ToolChoice",
            )
        limit = message.max_reasoning_tokens if message.HasField("max_reasoning_tokens") else None
        return ParsingOptions(
            self._tools(message.tools),
            choice,
            message.tool_name,
            message.one_tool_call,
            message.reasoning,
            limit,
        )

    def _tools(self, messages: Sequence[pb.Tool]) -> tuple[Tool, ...]:
        size = sum(len(tool.description) + len(tool.parameters_json_schema) for tool in messages)
        if size > self._max_tools_chars:
            raise InvalidArgumentError(
                "parsing.tools",
                f"have {size} characters; at most {self._max_tools_chars} are taken",
            )
        return tuple(_tool(at, message) for at, message in enumerate(messages))


async def input_of(message: pb.TokenizeRequest | admin_pb2.FlushCacheRequest) -> PromptInput:
    """Returns the input of a message without parsing; a thread reads a long conversation."""
    return await in_thread_if_long(len(message.chat.messages), _input, message)


def images_beside(message: pb.GenerateRequest | pb.TokenizeRequest) -> list[GivenImage]:
    """Returns the images beside an input, in order."""
    return [_image(image, f"images[{at}]") for at, image in enumerate(message.images)]


def embed_call(message: pb.EmbedRequest) -> EmbedCall:
    return EmbedCall(
        [_embed_input(at, given) for at, given in enumerate(message.inputs)],
        message.model,
        message.request_id,
        message.priority,
        message.dimensions if message.HasField("dimensions") else None,
    )


def score_call(message: pb.ScoreRequest) -> ScoreCall:
    pairs = [(pair.first, pair.second) for pair in message.pairs]
    return ScoreCall(pairs, message.model, message.request_id, message.priority)


def _embed_input(at: int, message: pb.EmbedInput) -> str | Sequence[int]:
    match message.WhichOneof("input"):
        case "text":
            return message.text
        case "token_ids":
            return message.token_ids.ids
    raise InvalidArgumentError(f"inputs[{at}]", "is missing; set text or token_ids")


def _input(
    message: WithInput,
    parsing: pb.OutputParsing = _NO_PARSING,
    options: ParsingOptions | None = None,
) -> PromptInput:
    match message.WhichOneof("input"):
        case "text":
            return message.text
        case "token_ids" if not isinstance(message, pb.TokenizeRequest):
            return message.token_ids.ids
        case "chat":
            return _conversation(message.chat, parsing, options)
    return None


def _conversation(
    chat: pb.Chat, parsing: pb.OutputParsing, options: ParsingOptions | None
) -> Conversation:
    variables: dict[str, Any] = {}
    if parsing.template_variables:
        variables = _json_object(parsing.template_variables, "parsing.template_variables")
    tools: Sequence[Tool] = ()
    if options is not None and options.choice is not Choice.NONE:
        tools = options.tools
    turns = [_turn(at, message) for at, message in enumerate(chat.messages)]
    return Conversation(turns, tools, variables)


def _turn(at: int, message: pb.ChatMessage) -> Turn:
    field = f"input.chat.messages[{at}]"
    parts: tuple[str | GivenImage, ...] = (message.content,)
    if message.parts:
        if message.content:
            raise InvalidArgumentError(f"{field}.parts", "is set beside content; give one of them")
        parts = tuple(_part(part, f"{field}.parts[{i}]") for i, part in enumerate(message.parts))
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls)
    return Turn(
        message.role,
        parts,
        message.name,
        message.tool_call_id,
        message.reasoning,
        calls,
        f"{field}.role",
    )


def _part(part: pb.ContentPart, field: str) -> str | GivenImage:
    match part.WhichOneof("part"):
        case "text":
            return part.text
        case "image":
            return _image(part.image, f"{field}.image")
        case "clip":
            return _image(part.clip, f"{field}.clip", GivenClip)
    raise InvalidArgumentError(field, "is empty; set text, image or clip")


def _image(
    image: pb.Image, field: str, kind: Callable[[bytes | str, str], GivenImage] = GivenImage
) -> GivenImage:
    """Returns an image or clip of a message. Raises `InvalidArgumentError` if it has no source."""
    source = image.WhichOneof("source")
    if source is None:
        raise InvalidArgumentError(field, "is empty; set data or url")
    return kind(image.data if source == "data" else image.url, f"{field}.{source}")


def _encoder_input(message: pb.EncoderInput) -> EncoderInput:
    """Returns an encoder input, whose hash is still to be computed."""
    return EncoderInput(b"", message.start, message.length, tensors_of(message))


def _received(at: int, message: pb.ReceivedTokens) -> ReceivedOutput:
    if message.finish_reason not in pb.FinishReason.values():
        raise InvalidArgumentError(
            f"continue_from[{at}].finish_reason",
            f"is {message.finish_reason}; must be one of the values of FinishReason",
        )
    return ReceivedOutput(message.ids, reason_of(message.finish_reason))


def _tool(at: int, message: pb.Tool) -> Tool:
    schema = None
    if message.parameters_json_schema:
        field = f"parsing.tools[{at}].parameters_json_schema"
        schema = _json_object(message.parameters_json_schema, field)
    return Tool(message.name, schema, message.strict, message.description)


def _json_object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgumentError(field, f"is not JSON: {problem}") from None
    if not isinstance(value, dict):
        raise InvalidArgumentError(field, "is no JSON object; must be one")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
