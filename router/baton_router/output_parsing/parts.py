"""Parts of a parsed output: text, reasoning and tool calls."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user, which continues the text before it."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning, which continues the reasoning before it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Beginning of a tool call.

    Attributes:
        index: of the call in the output of its sequence, from 0.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Piece of the arguments of call `index`: JSON text, which continues what came before."""

    index: int
    json: str


Part: TypeAlias = Text | Reasoning | ToolCallStart | ToolCallArguments
