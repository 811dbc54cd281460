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
    """Returns the turns, each that `follows` the first of those before it as a part of that one."""
    groups: list[list[Turn]] = []
    for turn in turns:
        if groups and follows(groups[-1][0], turn):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    return [joined(group) if len(group) > 1 else group[0] for group in groups]
