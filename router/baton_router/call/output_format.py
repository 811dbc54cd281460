"""Output formats of models: where reasoning and tool calls are in what a model writes.

A format makes parsers of outputs, and grammars that force outputs to be in the format. Knows
nothing of requests, workers or messages.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton_router.call.parts import Part


class Choice(enum.Enum):
    """Calls that a model may or must make."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Tool:
    """Tool that the model may call.

    Attributes:
        parameters: JSON schema of its arguments, an object; None: any object.
        strict: the arguments of each call are valid under the schema.
        description: for the model; empty: there is none.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    description: str = ""


@dataclass(frozen=True, slots=True)
class ParsingOptions:
    """Parsing of one request's outputs.

    Attributes:
        tool_name: the tool that must be called, for `Choice.NAMED`.
        one_tool_call: at most one call.
        splits_reasoning: reasoning becomes parts of its own; else it is text.
        max_reasoning_tokens: None: no limit.
        is_reasoning_open: the prompt ends within reasoning, as some templates make it.
        is_reasoning_over: the prompt ends with reasoning that is closed, as some templates turn
            it off: a grammar allows no more of it.
    """

    tools: Sequence[Tool] = ()
    choice: Choice = Choice.AUTO
    tool_name: str = ""
    one_tool_call: bool = False
    splits_reasoning: bool = False
    max_reasoning_tokens: int | None = None
    is_reasoning_open: bool = False
    is_reasoning_over: bool = False


class OutputParser(Protocol):
    """Incremental parser of the output of one sequence.

    Attributes:
        is_reasoning: the output is within reasoning that becomes parts of its own.
    """

    is_reasoning: bool

    def push(self, text: str) -> list[Part]:
        """Returns the parts that are certain now."""

    def finish(self) -> list[Part]:
        """Returns the parts that were held back, once the output has ended."""


class OutputFormat(Protocol):
    """Output format of a model.

    Attributes:
        kept_tokens: special tokens of the format, which stay in the text that is parsed.
    """

    kept_tokens: frozenset[str]

    def parser(self, options: ParsingOptions) -> OutputParser:
        """Returns a parser of one sequence."""

    def grammar(self, options: ParsingOptions, inner: str | None = None) -> str | None:
        """Returns a grammar (llguidance's dialect of Lark) that outputs must match; None: any.

        Args:
            inner: JSON schema that the text for the user must match; None: any text.
        """

    def opens_reasoning(self, prompt: str) -> bool:
        """Returns whether a rendered prompt ends within reasoning."""

    def closes_reasoning(self, prompt: str, /) -> bool:
        """Returns whether a rendered prompt ends with reasoning that is closed."""
