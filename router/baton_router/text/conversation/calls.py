"""Calls of tools and their results, as the template takes them."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, repeat

from baton_router.call.generate_call import Turn
from baton_router.text.template.template_probe import TemplateAbilities

# The form of ids that templates demand that do not take any.
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def with_taken_calls(turns: Sequence[Turn], abilities: TemplateAbilities) -> Sequence[Turn]:
    """Returns the turns with one call each, text before it in a turn of its own and ids of nine
    letters and digits, each where the template demands it."""
    if not abilities.takes_several_calls:
        turns = list(_one_by_one(turns))
    if abilities.needs_text_apart:
        turns = list(_apart(turns))
    return turns if abilities.takes_any_call_id else list(map(_with_short_ids, turns))


def with_texts_in_results(turns: Iterable[Turn]) -> Sequence[Turn]:
    """Returns the turns with what the user says between a call and its result at the beginning of
    that result."""
    made: list[Turn] = []
    for turn in turns:
        before = [last.role for last in made[-2:]]
        if turn.role == "tool" and before in (["assistant", "user"], ["tool", "user"]):
            turn = replace(turn, parts=(*made.pop().parts, *turn.parts))
        made.append(turn)
    return made


def _one_by_one(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Yields each call of a turn with several in a turn of its own, and its results after it."""
    at = 0
    while at < len(turns):
        turn, at = turns[at], at + 1
        if len(turn.tool_calls) < 2:
            yield turn
            continue
        results: dict[str, list[Turn]] = {}
        while at < len(turns) and turns[at].role == "tool":
            results.setdefault(turns[at].tool_call_id, []).append(turns[at])
            at += 1
        others = Turn(turn.role, role_field=turn.role_field)
        for of, call in zip(chain((turn,), repeat(others)), turn.tool_calls, strict=False):
            yield replace(of, tool_calls=(call,))
            yield from results.pop(call.id, ())
        yield from chain.from_iterable(results.values())


def _apart(turns: Sequence[Turn]) -> Iterator[Turn]:
    for turn in turns:
        if turn.tool_calls and any(turn.parts):
            yield replace(turn, tool_calls=())
            turn = Turn(turn.role, tool_calls=turn.tool_calls, role_field=turn.role_field)
        yield turn


def _with_short_ids(turn: Turn) -> Turn:
    if not (turn.tool_call_id or turn.tool_calls):
        return turn
    return replace(
        turn,
        tool_call_id=_short(turn.tool_call_id),
        tool_calls=tuple(replace(call, id=_short(call.id)) for call in turn.tool_calls),
    )


def _short(call_id: str) -> str:
    """Returns the id, or one that is a function of it: calls and results stay together, and the
    prompt of a later turn begins as the earlier one."""
    if not call_id or _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
