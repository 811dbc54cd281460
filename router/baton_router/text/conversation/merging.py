"""Merging of turns, which keeps the order of what is in them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from baton_router.call.generate_call import Turn


def joined(turns: Sequence[Turn]) -> Turn:
    """Returns turns of one role as one."""
    return replace(
        turns[0],
        parts=tuple(chain.from_iterable(turn.parts for turn in turns)),
        reasoning="".join(turn.reasoning for turn in turns),
        tool_calls=tuple(chain.from_iterable(turn.tool_calls for turn in turns)),
    )


def merged(turns: Iterable[Turn], follows: Callable[[Turn, Turn], bool]) -> list[Turn]:
    """Returns the turns, each that `follows` the one before as a part of that one."""
    kept: list[Turn] = []
    for turn in turns:
        if kept and follows(kept[-1], turn):
            kept[-1] = joined((kept[-1], turn))
        else:
            kept.append(turn)
    return kept
