"""Output format of gpt-oss (harmony): messages in channels, of which one is for reasoning."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Final

from baton_router.call.output_format import Choice, ParsingOptions
from baton_router.text.output_parsing.calls import arguments_rule, read_arguments
from baton_router.text.output_parsing.lark import Lark
from baton_router.text.output_parsing.parser import (
    PartCollector,
    SequenceParser,
    needs_grammar,
    tools_to_call,
)
from baton_router.text.output_parsing.reader import (
    CutOff,
    NotACall,
    Reader,
    Steps,
    first_of,
    held_back,
)

_CHANNEL: Final = "<|channel|>"
_START: Final = "<|start|>"
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_BEGINNINGS: Final = (_CHANNEL, _START)
_TOKENS: Final = frozenset({_CHANNEL, _START, _MESSAGE, "<|constrain|>", *_ENDS})
_REASONING: Final = f"{_CHANNEL}analysis{_MESSAGE}"
_MAX_HEADER_LENGTH: Final = 512
_RECIPIENT: Final = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class HarmonyFormat:
    """Output format of gpt-oss.

    Args:
        token_ids: special tokens of the model's tokenizer, by their content.
        hidden_tokens: those that are not in the text of an output unless they are asked for.
    """

    def __init__(self, token_ids: Mapping[str, int], hidden_tokens: frozenset[str]) -> None:
        self._token_ids = token_ids
        self.kept_tokens = _TOKENS & hidden_tokens

    def parser(self, options: ParsingOptions) -> SequenceParser:
        """Returns a parser of one sequence."""
        return SequenceParser(options, _read)

    def grammar(self, options: ParsingOptions, inner: str | None = None) -> str | None:
        """Returns a grammar (llguidance's dialect of Lark) that outputs must match; None: any.

        Args:
            inner: JSON schema that the text for the user must match; None: any text.

        Raises `InvalidArgumentError`. A grammar allows one call, after which the model ends.
        """
        if not needs_grammar(options, inner):
            return None
        lark = Lark(self._token_ids)
        next_message = lark.literal(f"{_START}assistant")
        reasoning = f"{lark.until('<|end|>', most_tokens=options.max_reasoning_tokens)} "
        reasoning += next_message
        if not options.is_reasoning_open:
            reasoning = f"({lark.literal(_REASONING)} {reasoning})?"
        text = lark.text(_BEGINNINGS) if inner is None else lark.schema(json.loads(inner))
        answers = []
        if options.choice in (Choice.AUTO, Choice.NONE) or not options.tools:
            answers.append(f"{lark.literal(f'{_CHANNEL}final{_MESSAGE}')} {text}")
        # The token ends an output, so that no grammar may ask for it.
        end = "" if lark.is_token("<|call|>") else f"{lark.literal('<|call|>')}?"
        for index, tool in enumerate(tools_to_call(options)):
            header = f"{_CHANNEL}commentary to=functions.{tool.name} <|constrain|>json{_MESSAGE}"
            answers.append(f"{lark.literal(header)} {arguments_rule(lark, tool, index)} {end}")
        preamble = (
            f"({lark.literal(f'{_CHANNEL}commentary{_MESSAGE}')} "
            f"{lark.until('<|end|>')} {next_message})?"
        )
        if inner is not None:
            preamble = ""
        return lark.grammar(f"{reasoning} {preamble} ({' | '.join(answers)})")

    def opens_reasoning(self, prompt: str) -> bool:
        """Returns whether a rendered prompt ends within reasoning."""
        return prompt.endswith(_REASONING)

    def closes_reasoning(self, _prompt: str, /) -> bool:
        """Returns False: no template ends its prompt so."""
        return False


def _read(reader: Reader, parts: PartCollector, options: ParsingOptions) -> Steps[None]:
    """Reads a whole output."""
    if options.is_reasoning_open:
        yield from _read_reasoning(reader, parts, options)
    while reader.rest or not reader.has_ended:
        if not (yield from reader.begins_with(_BEGINNINGS)):
            yield from _read_body(reader, parts.text)
            continue
        reader.keep()
        try:
            yield from _read_message(reader, parts, options)
        except CutOff:
            reader.take(len(reader.rest))
            reader.release()
        except NotACall:
            # The marks of a message that is none are text.
            parts.text(reader.release() or reader.take(1))
            yield from _read_body(reader, parts.text, is_raw=True)


def _read_message(reader: Reader, parts: PartCollector, options: ParsingOptions) -> Steps[None]:
    """Reads a message. Raises `NotACall` if it is none, or a call where no tool may be called, and
    `CutOff`."""
    while (end := reader.rest.find(_MESSAGE)) < 0:
        if len(reader.rest) > _MAX_HEADER_LENGTH:
            raise NotACall
        yield from reader.more()
    header = reader.take(end + len(_MESSAGE))
    recipient = _RECIPIENT.search(header)
    if recipient is not None:
        if not parts.tools:
            raise NotACall
        yield from _read_call(reader, parts, recipient[1])
    elif "analysis" in header:
        kept = reader.release()
        if not options.splits_reasoning:
            parts.text(kept)
        yield from _read_reasoning(reader, parts, options)
    else:
        reader.release()
        yield from _read_body(reader, parts.text)


def _read_call(reader: Reader, parts: PartCollector, name: str) -> Steps[None]:
    """Reads the arguments of a call and its end. What is no object is sent as it is written."""
    show: Callable[[str], None] = _leave_out
    yield from reader.spaces()
    try:
        yield from read_arguments(reader, parts, name, _ENDS)
    except CutOff:
        raise
    except NotACall:
        parts.start_call(name)
        show = parts.arguments
    reader.release()
    yield from _read_body(reader, show)


def _leave_out(_text: str) -> None:
    """Shows nothing."""


def _read_reasoning(reader: Reader, parts: PartCollector, options: ParsingOptions) -> Steps[None]:
    """Reads the text of a message of reasoning and its end."""
    parts.is_reasoning = options.splits_reasoning
    show = parts.reasoning if options.splits_reasoning else parts.text
    yield from _read_body(reader, show, is_raw=not options.splits_reasoning)
    parts.is_reasoning = False


def _read_body(reader: Reader, show: Callable[[str], None], *, is_raw: bool = False) -> Steps[None]:
    """Reads the text of a message and its end, which is shown, too, if `is_raw`."""
    marks = (*_ENDS, *_BEGINNINGS)
    while (found := first_of(reader.rest, marks)) is None:
        length = len(reader.rest)
        if not reader.has_ended:
            length -= held_back(reader.rest, marks)
        show(reader.take(length))
        if reader.has_ended:
            return
        yield
    at, mark = found
    show(reader.take(at))
    if mark in _ENDS:
        end = reader.take(len(mark))
        if is_raw:
            show(end)
