"""Instructions: turns of the system and of developers, where the template takes them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, groupby, takewhile

from baton_router.call.generate_call import GivenImage, Turn
from baton_router.text.template.template_probe import TemplateAbilities

_ROLES = ("system", "developer")
# Marks around instructions within a turn of the user.
_BEGIN, _END = "<system>", "</system>"


def with_known_roles(turns: Iterable[Turn], abilities: TemplateAbilities) -> Sequence[Turn]:
    """Returns the turns, a developer's as the system's unless the template knows developers."""
    if abilities.knows_developer:
        return list(turns)
    return [replace(turn, role="system") if turn.role == "developer" else turn for turn in turns]


def with_one_leading(turns: Sequence[Turn]) -> Sequence[Turn]:
    """Returns the turns with the instructions that the conversation begins with as one, as far as
    they are texts."""
    leading = list(takewhile(_is_text_of_rules, turns))
    if not leading:
        return turns
    roles = {turn.role for turn in leading}
    texts = ("\n".join(map(str, turn.parts)) for turn in leading)
    first = replace(
        leading[0],
        role=roles.pop() if len(roles) == 1 else "system",
        parts=("\n\n".join(texts),),
    )
    return [first, *turns[len(leading) :]]


def in_place(turns: Sequence[Turn], abilities: TemplateAbilities) -> Sequence[Turn]:
    """Returns the turns with instructions that the template does not take as text of the user, at
    their place: in the turn of the user before them, or else after them, or in one of its own.
    Those that come later are between marks."""
    num_leading = sum(1 for _ in takewhile(_is_rule, turns))
    made = list(turns[:num_leading])
    held: list[str | GivenImage] = []
    if not abilities.takes_system:
        made, held = [], list(chain.from_iterable(map(_texts_before, made)))
    for are_rules, run in groupby(turns[num_leading:], _is_rule):
        if are_rules and not abilities.takes_later_system:
            marked = chain.from_iterable(map(_marked, run))
            if made and made[-1].role == "user" and not held:
                made[-1] = replace(made[-1], parts=(*made[-1].parts, *marked))
            else:
                held += marked
            continue
        for turn in run:
            if held and turn.role == "user":
                made.append(replace(turn, parts=(*held, *turn.parts)))
            else:
                made += [Turn("user", tuple(held))] if held else []
                made.append(turn)
            held = []
    return [*made, Turn("user", tuple(held))] if held else made


def _is_rule(turn: Turn) -> bool:
    return turn.role in _ROLES


def _is_text_of_rules(turn: Turn) -> bool:
    return _is_rule(turn) and all(isinstance(part, str) for part in turn.parts)


def _texts_before(turn: Turn) -> Iterable[str | GivenImage]:
    """Returns the parts of instructions that a user's text follows after an empty line."""
    if not any(turn.parts):
        return ()
    if not _is_text_of_rules(turn):
        return turn.parts
    return ("\n".join(map(str, turn.parts)) + "\n",)


def _marked(turn: Turn) -> Iterable[str | GivenImage]:
    """Returns the parts of instructions between marks."""
    if _is_text_of_rules(turn):
        return (f"{_BEGIN}\n" + "\n".join(map(str, turn.parts)) + f"\n{_END}",)
    return (_BEGIN, *turn.parts, _END)
