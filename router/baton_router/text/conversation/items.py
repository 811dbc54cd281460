"""Items of the Responses API as turns: what the model thought, said and called in one turn is
several items."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from baton_router.call.generate_call import Turn
from baton_router.text.conversation.merging import joined


def turns_of_items(items: Iterable[Turn]) -> list[Turn]:
    """Returns the turns with adjacent items of the model as one turn."""
    turns: list[Turn] = []
    for is_model, group in groupby(items, lambda turn: turn.role == "assistant"):
        adjacent = list(group)
        turns += _turns_of_model(adjacent) if is_model else adjacent
    return turns


def _turns_of_model(items: Iterable[Turn]) -> Iterator[Turn]:
    """Yields turns that have reasoning first, one text at most, and no reasoning alone."""
    last: list[Turn] = []
    has_text = is_answer = False
    for item in items:
        is_reasoning = not (item.parts or item.tool_calls)
        if (is_reasoning and is_answer) or (item.parts and has_text):
            yield joined(last)
            last, has_text, is_answer = [], False, False
        last.append(item)
        has_text = has_text or bool(item.parts)
        is_answer = is_answer or not is_reasoning
    if is_answer:
        yield joined(last)
