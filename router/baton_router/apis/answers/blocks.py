"""Blocks of an answer: its text, its reasoning and its tool calls, in the order in which the model
wrote them. Knows nothing of the formats of the APIs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from baton_router.apis.answers.sequence_reader import SequenceDelta
from baton_router.call.parts import (
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)

Kind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    """Block of an answer, which grows until it has ended.

    Attributes:
        index: of the block in the answer, from 0.
        pieces: the text, the reasoning, or the arguments of the call.
        call_id, name: of a tool call.
    """

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockStart:
    block: Block


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """Piece that a block has grown by."""

    block: Block
    piece: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    block: Block


Change: TypeAlias = BlockStart | BlockDelta | BlockEnd


class Blocks:
    """Blocks of one sequence, of which one is open at a time.

    Attributes:
        blocks: those that have begun.
        is_cut: the answer stopped within the last block, at the bound of its tokens or by a
            failure.

    Args:
        is_parsed: the blocks are made of parts; else the text is one block.
    """

    def __init__(self, *, is_parsed: bool) -> None:
        self._is_parsed = is_parsed
        self._open: Block | None = None
        self.blocks: list[Block] = []
        self.is_cut = False

    def feed(self, update: SequenceDelta) -> Iterator[Change]:
        """Adds a piece of the sequence; yields what changes, in order. The last piece ends the last
        block."""
        if self._is_parsed:
            for part in update.parts:
                yield from self._on_part(part)
        elif update.text:
            yield from self._grow("text", update.text)
        if update.finish_reason is not None:
            self.is_cut = update.finish_reason == "length"
            yield from self._end()

    def cut(self) -> Iterator[Change]:
        """Ends the last block where it is, if it is open: the answer has failed."""
        self.is_cut = self.is_cut or self._open is not None
        yield from self._end()

    def _on_part(self, part: Part) -> Iterator[Change]:
        match part:
            case Text(text):
                yield from self._grow("text", text)
            case Reasoning(text):
                yield from self._grow("reasoning", text)
            case ToolCallStart(_, name, call_id):
                yield from self._start(Block("call", len(self.blocks), call_id, name))
            case ToolCallArguments(_, json) if self._open is not None:
                yield self._append(self._open, json)

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._start(Block(kind, len(self.blocks)))
        if self._open is not None:
            yield self._append(self._open, text)

    def _append(self, block: Block, piece: str) -> BlockDelta:
        block.pieces.append(piece)
        return BlockDelta(block, piece)

    def _start(self, block: Block) -> Iterator[Change]:
        yield from self._end()
        self.blocks.append(block)
        self._open = block
        yield BlockStart(block)

    def _end(self) -> Iterator[Change]:
        if self._open is not None:
            ended, self._open = self._open, None
            yield BlockEnd(ended)
