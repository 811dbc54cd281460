"""Normalising of conversations: the one step between a conversation as its client gave it and its
rendering."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from baton.errors import InvalidArgumentError
from baton_router.call.generate_call import Conversation, Turn
from baton_router.text.conversation.calls import with_taken_calls, with_texts_in_results
from baton_router.text.conversation.instructions import in_place, with_known_roles, with_one_leading
from baton_router.text.conversation.items import turns_of_items
from baton_router.text.conversation.merging import merged
from baton_router.text.template.chat_template import ChatTemplate
from baton_router.text.template.template_probe import TemplateAbilities

# Names of the renderer's own arguments.
_RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversations",
    "documents",
    "messages",
    "return_assistant_tokens_mask",
    "tools",
}
_SHOWN_CHARS = 40
# Roles that every template knows, or whose turns are placed elsewhere where it does not.
_PLACED = frozenset(("system", "developer", "user", "assistant"))
# Those of results, of which some templates render nothing.
_RESULTS = frozenset(("tool", "function"))


def normalised(conversation: Conversation, template: ChatTemplate | None = None) -> Conversation:
    """Returns a conversation as its client gave it with the turns and the variables that a chat
    template expects; None: one that takes all turns.

    Raises `InvalidArgumentError` for a variable that is not for clients to set, and for a turn of
    which the template renders nothing.
    """
    for name in sorted(_RESERVED & conversation.variables.keys()):
        raise InvalidArgumentError(
            f"parsing.template_variables.{name}", "is not for clients to set"
        )
    variables = {**_of_effort(conversation.effort), **conversation.variables}
    abilities = TemplateAbilities()
    if template is not None:
        _check_roles(conversation.turns, template)
        abilities = template.abilities
    turns = with_known_roles(conversation.turns, abilities)
    if conversation.is_of_items or not abilities.takes_repeated_system:
        turns = with_one_leading(turns)
    if conversation.is_of_items:
        turns = turns_of_items(turns)
    turns = in_place(turns, abilities)
    turns = _merged(turns, abilities, merges=conversation.merges_turns)
    turns = with_taken_calls(turns, abilities)
    if conversation.continues_answer:
        turns = _ready_to_continue(turns)
    return Conversation(
        turns,
        conversation.tools,
        variables,
        continues_answer=conversation.continues_answer,
        begins_answer=conversation.begins_answer,
    )


def _of_effort(effort: str | None) -> dict[str, Any]:
    if effort is None:
        return {}
    if effort == "none":  # the names by which templates turn thinking off
        return {"enable_thinking": False, "thinking": False}
    return {"reasoning_effort": effort}


def _check_roles(turns: Sequence[Turn], template: ChatTemplate) -> None:
    """Raises `InvalidArgumentError` for a role that neither the APIs nor the template name, and for
    one whose turns would be lost without notice."""
    known = set(_PLACED)
    for turn in turns:
        if turn.role in known:
            continue
        if turn.role not in _RESULTS and not template.names_role(turn.role):
            raise InvalidArgumentError(
                turn.role_field,
                f"is {turn.role[:_SHOWN_CHARS]!r}, which the model's chat template does not name; "
                f"expected {', '.join(sorted(_PLACED))} or tool",
            )
        if not template.renders_role(turn.role):
            raise InvalidArgumentError(
                turn.role_field,
                f"makes a turn of the role {turn.role[:_SHOWN_CHARS]!r}, of which the model's chat "
                "template renders nothing; expected system, user or assistant",
            )
        known.add(turn.role)


def _ready_to_continue(turns: Sequence[Turn]) -> Sequence[Turn]:
    """Returns the turns, the last without space at its end: models do not write words after one.
    Raises `InvalidArgumentError` unless it is text of the model."""
    last = turns[-1] if turns else Turn("")
    texts = [part for part in last.parts if isinstance(part, str)]
    text = "\n".join(texts).rstrip()
    if last.role != "assistant" or last.tool_calls or not text or len(texts) < len(last.parts):
        raise InvalidArgumentError(
            "input.chat.messages",
            "do not end with text of the model, which its answer is to continue; expected such a "
            "message, without tool calls",
        )
    return [*turns[:-1], replace(last, parts=(text,))]


def _merged(turns: Sequence[Turn], abilities: TemplateAbilities, *, merges: bool) -> Sequence[Turn]:
    """Returns the turns with those as one that follow each other, where the template does not take
    them. `merges`: all of the user and of the model."""
    roles = set[str]()
    if merges or not abilities.takes_repeated_users:
        roles.add("user")
    if merges or not abilities.takes_repeated_answers:
        roles.add("assistant")
    turns = merged(turns, lambda last, turn: last.role == turn.role in roles) if roles else turns
    if not abilities.takes_user_after_result:
        turns = merged(turns, lambda last, turn: (last.role, turn.role) == ("tool", "user"))
    return turns if abilities.takes_user_before_result else with_texts_in_results(turns)
