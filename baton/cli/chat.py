"""`baton chat`: a conversation, one line a turn."""

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from baton.client.client import (
    Client,
    Clip,
    Finished,
    FinishReason,
    Image,
    Message,
    OutputParsing,
    Part,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
)
from baton.errors import BatonError, FailedPreconditionError, InvalidArgumentError
from baton.models import DEFAULT_MODEL, INTRODUCTION
from baton.sampling import GrammarKind, SamplingDefaults, SamplingParams

# Of a model that advises nothing.
_OF_CHAT = SamplingDefaults(temperature=0.7, top_p=0.95)


def read_tools(path: Path) -> list[Tool]:
    """Reads tools, a JSON list in the form of OpenAI's API. Raises `InvalidArgumentError`."""
    try:
        functions = [tool["function"] for tool in json.loads(path.read_text(encoding="utf-8"))]
        return [
            Tool(
                function["name"],
                function.get("description") or "",
                function.get("parameters"),
                bool(function.get("strict")),
            )
            for function in functions
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidArgumentError(
            "--tools",
            f"cannot be read from {path}: {error!r}; expected a JSON list of tools as OpenAI's API "
            'has them, such as [{"type": "function", "function": {"name": "time"}}]',
        ) from None


def read_image(path: Path) -> Image:
    """Reads an image. Raises `InvalidArgumentError`."""
    return Image(_read("--image", path))


def read_clip(path: Path) -> Clip:
    """Reads a clip. Raises `InvalidArgumentError`."""
    return Clip(_read("--clip", path))


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(option, f"cannot be read from {path}: {error}") from None


class ShownAnswer:
    """Answer of the model, shown as it comes.

    Reasoning is dim on a terminal; elsewhere it goes to stderr, so that stdout has the answer
    alone.
    """

    def __init__(self) -> None:
        self._out = Console()
        self._aside = self._out if self._out.is_terminal else Console(stderr=True)
        self._parts: list[Part] = []
        self._open: Console | None = None  # where a line has begun

    def show(self, part: Part) -> None:
        """Writes a part, with reasoning and each call on lines of their own."""
        is_reasoning = isinstance(part, ReasoningPart)
        was_reasoning = bool(self._parts) and isinstance(self._parts[-1], ReasoningPart)
        follows_call = bool(self._parts) and isinstance(self._parts[-1], ToolCallArguments)
        begins_text = isinstance(part, TextPart) and follows_call
        if is_reasoning != was_reasoning or begins_text or isinstance(part, ToolCallStart):
            self.end_line()
        self._parts.append(part)
        match part:
            case ReasoningPart(text):
                self._write(self._aside, text, "dim")
            case TextPart(text):
                self._write(self._out, text)
            case ToolCallStart(name=name):
                self._write(self._out, f"{name} ", "bold")
            case ToolCallArguments(json=piece):
                self._write(self._out, piece, "cyan")

    def end_line(self) -> None:
        if self._open is not None:
            self._open.out()
            self._open = None

    def message(self, *, is_whole: bool) -> Message:
        """Returns it as a message of a conversation. Calls of an answer that was cut short are left
        out: the last one may be half a call."""
        arguments: dict[int, str] = {}
        for part in self._parts:
            if isinstance(part, ToolCallArguments):
                arguments[part.index] = arguments.get(part.index, "") + part.json
        starts = [part for part in self._parts if isinstance(part, ToolCallStart) and is_whole]
        return Message(
            "assistant",
            "".join(part.text for part in self._parts if isinstance(part, TextPart)),
            tuple(ToolCall(s.id, s.name, arguments.get(s.index, "")) for s in starts),
            reasoning="".join(p.text for p in self._parts if isinstance(p, ReasoningPart)),
        )

    def _write(self, console: Console, text: str, style: str = "") -> None:
        if text:
            # As a segment, since Rich would replace tabs in a text.
            console.print(Segments([Segment(text, Style.parse(style))]), end="", soft_wrap=True)
            console.file.flush()
            self._open = None if text.endswith("\n") else console


class Conversation:
    """Conversation so far; a turn that failed is not part of it.

    Attributes:
        pending: calls of the last answer whose results are missing.
    """

    def __init__(
        self,
        client: Client,
        params: SamplingParams,
        system: str,
        priority: int = 0,
        tools: Sequence[Tool] = (),
        images: Sequence[Image | Clip] = (),
        model: str = "",
    ) -> None:
        self._client = client
        self._model = model
        self._params = params
        self._priority = priority
        self._tools = tools
        self._images = images
        # A grammar that is no JSON schema binds the output from its beginning on.
        grammar = params.grammar
        self._splits = grammar is None or grammar.kind is GrammarKind.JSON_SCHEMA
        self.messages = [Message("system", system)] if system else []
        self.pending: list[ToolCall] = []

    def say(self, content: str) -> None:
        """Adds a turn of the user, the first one with the images, or the result of the first
        pending call, and streams the answer to stdout once no call is pending.

        Ctrl-C cuts the answer short; the conversation continues from there.
        """
        has_turns = any(message.role == "user" for message in self.messages)
        given: str | Sequence[str | Image | Clip] = content
        if self._images and not has_turns:
            given = [*self._images, content]
        turn, pending = Message("user", given), self.pending
        if pending:
            call, *pending = pending
            turn = Message("tool", content, tool_call_id=call.id, name=call.name)
        messages = [*self.messages, turn]
        if not pending:
            answer = self._answer(messages)
            messages, pending = [*messages, answer], list(answer.tool_calls)
        self.messages, self.pending = messages, pending

    def _answer(self, messages: list[Message]) -> Message:
        parsing = None
        if self._splits or self._tools:
            parsing = OutputParsing(self._tools, reasoning=self._splits)
        answer, is_whole, finished = ShownAnswer(), False, None
        with (
            contextlib.suppress(KeyboardInterrupt),
            self._client.generate(
                messages,
                self._params,
                model=self._model,
                priority=self._priority,
                parsing=parsing,
                clamp_max_tokens=True,
            ) as generation,
        ):
            for chunk in generation:
                for part in [TextPart(chunk.text)] if parsing is None else chunk.parts:
                    answer.show(part)
            finished = generation.finished
            is_whole = finished is not None and finished.reason is not FinishReason.LENGTH
        print(flush=True)
        if finished is not None and not is_whole:
            self._tell_cut(finished)
        return answer.message(is_whole=is_whole)

    def _tell_cut(self, finished: Finished) -> None:
        """Tells on stderr by which bound an answer was cut."""
        is_own = finished.usage.num_output_tokens >= self._params.max_tokens
        bound = "--max-tokens" if is_own else "the model's length"
        told = Text(f"[the answer was cut at {bound}]", "dim")
        Console(stderr=True, highlight=False).print(told)


def run(
    client: Client,
    params: SamplingParams,
    system: str,
    priority: int,
    tools: Sequence[Tool],
    images: Sequence[Image | Clip] = (),
    model: str = "",
) -> None:
    """Reads turns from stdin until it ends. `model`: name or alias; empty: the router's first.

    At a terminal a failed turn is printed and the conversation continues; otherwise it raises.
    """
    served = client.get_model(model)
    if not served.has_chat_template:
        raise FailedPreconditionError(f"{served.name} has no chat template; use `baton generate`")
    params = params.with_defaults(served.sampling_defaults.over(_OF_CHAT))
    conversation = Conversation(client, params, system, priority, tools, images, model)
    if sys.stdin.isatty():
        _talk(conversation, served.name)
    else:
        for line in sys.stdin:
            if line.strip():
                conversation.say(line.strip())


def _talk(conversation: Conversation, model: str) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing
    print(f"chat with {model}; Ctrl-C stops an answer, Ctrl-D ends")
    if model == DEFAULT_MODEL:
        print(INTRODUCTION)
    while True:
        pending = conversation.pending
        try:
            line = input(f"result of {pending[0].name}> " if pending else "> ").strip()
            if line:
                conversation.say(line)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except BatonError as error:
            print(f"baton: {error}", file=sys.stderr)
