"""Output format that is made of a syntax for reasoning and one for tool calls."""

import json
from collections.abc import Mapping
from typing import Any

from baton.errors import InvalidArgumentError
from baton_router.call.output_format import Choice, ParsingOptions
from baton_router.text.output_parsing.lark import Lark
from baton_router.text.output_parsing.last_calls import marks_in_thoughts, read_last_calls
from baton_router.text.output_parsing.parser import (
    CallSyntax,
    PartCollector,
    ReasoningSyntax,
    SequenceParser,
    needs_grammar,
    read_calls,
    read_text,
    tools_to_call,
)
from baton_router.text.output_parsing.reader import Reader, Steps


class ComposedFormat:
    """Output format of a syntax for reasoning and one for tool calls.

    Args:
        token_ids: special tokens of the model's tokenizer, by their content.
        hidden_tokens: those that are not in the text of an output unless they are asked for.
    """

    def __init__(
        self,
        reasoning: ReasoningSyntax | None,
        calls: CallSyntax | None,
        token_ids: Mapping[str, int],
        hidden_tokens: frozenset[str],
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._token_ids = token_ids
        syntaxes = [syntax for syntax in (reasoning, calls) if syntax is not None]
        tokens = frozenset(token for syntax in syntaxes for token in syntax.tokens)
        self.kept_tokens = tokens & hidden_tokens

    def parser(self, options: ParsingOptions) -> SequenceParser:
        """Returns a parser of one sequence."""
        return SequenceParser(options, self._read)

    def grammar(self, options: ParsingOptions, inner: str | None = None) -> str | None:
        """Returns a grammar (llguidance's dialect of Lark) that outputs must match; None: any.

        Args:
            inner: JSON schema that the text for the user must match; None: any text.

        Raises `InvalidArgumentError`, also where the format has no calls that could be forced.
        """
        if not needs_grammar(options, inner):
            return None
        lark = Lark(self._token_ids)
        body = self._body(lark, options, None if inner is None else json.loads(inner))
        if self._reasoning is not None and not options.is_reasoning_over:
            body = f"{self._reasoning.lark(lark, options)} ({body})"
        return lark.grammar(body)

    def opens_reasoning(self, prompt: str) -> bool:
        """Returns whether a rendered prompt ends within reasoning."""
        return self._reasoning is not None and self._reasoning.opens(prompt)

    def closes_reasoning(self, prompt: str) -> bool:
        """Returns whether a rendered prompt ends with reasoning that is closed."""
        return self._reasoning is not None and self._reasoning.closes(prompt)

    def _read(self, reader: Reader, parts: PartCollector, options: ParsingOptions) -> Steps[None]:
        calls = self._calls if parts.tools else None
        if self._reasoning is not None:
            marks = () if calls is None else marks_in_thoughts(calls)
            unclosed = yield from self._reasoning.read(reader, parts, options, marks)
            if calls is not None and unclosed:
                read_last_calls(calls, unclosed, parts)
        if calls is not None:
            yield from read_calls(calls, reader, parts)
        else:
            yield from read_text(reader, parts)

    def _body(self, lark: Lark, options: ParsingOptions, inner: Mapping[str, Any] | None) -> str:
        """Returns an expression for what comes after the reasoning."""
        text = lark.text() if inner is None else lark.schema(inner)
        tools = tools_to_call(options)
        if not tools:
            return text
        if self._calls is None:
            raise InvalidArgumentError(
                "parsing.tools",
                "the model's format of tool calls is unknown, so none can be forced",
            )
        is_one = options.one_tool_call or options.choice is Choice.NAMED
        if options.choice is Choice.AUTO and inner is None:
            return self._calls.among_text(lark, tools, is_one=is_one)
        calls = self._calls.alone(lark, tools, is_one=is_one)
        return calls if options.choice is not Choice.AUTO else f"{calls} | {text}"
