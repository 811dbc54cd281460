"""Probe of a chat template: short conversations that it renders, and what that tells of it."""

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

from baton.errors import InvalidArgumentError

Messages = Sequence[Mapping[str, Any]]

# A role that no template knows.
_UNKNOWN_ROLE = "somerole"
# Texts of the turns of a probe, which no template has by itself.
_TEXTS = tuple(f"text{number}of{number}" for number in range(8))
# Ids of calls, in the form that Mistral's templates demand, and one that they refuse.
_CALL_IDS = ("call00001", "call00002")
_LONG_CALL_ID = "call_of_a_probe"
# Values of arguments of the calls.
_VALUES = ("value1of2", "value2of2")


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """Abilities of a chat template: turns that it takes. By default all, and none of developers.

    Attributes:
        knows_developer: turns of the role `developer` are not those of an unknown role.
        takes_system: the conversation may begin with a turn of the system,
        takes_repeated_system: or with several,
        takes_later_system: and others may come later, each at its place.
        takes_repeated_users: the user may have several turns one after the other,
        takes_repeated_answers: and so may the model.
        takes_user_before_result: a turn of the user may come between a call and its result,
        takes_user_after_result: and it may follow the result.
        takes_several_calls: a turn of the model may have several calls.
        takes_any_call_id: ids of calls need not have nine letters and digits.
        needs_text_apart: a text before a call is lost unless it is a turn of its own, or the call.
        needs_text_arguments: arguments of calls are JSON as text, not objects.
        needs_null_content: a turn of calls alone has null as its content, not an empty text.
    """

    knows_developer: bool = False
    takes_system: bool = True
    takes_repeated_system: bool = True
    takes_later_system: bool = True
    takes_repeated_users: bool = True
    takes_repeated_answers: bool = True
    takes_user_before_result: bool = True
    takes_user_after_result: bool = True
    takes_several_calls: bool = True
    takes_any_call_id: bool = True
    needs_text_apart: bool = False
    needs_text_arguments: bool = False
    needs_null_content: bool = False


@dataclass(frozen=True, slots=True)
class _CallForm:
    """Form of turns with calls alone, and of their arguments."""

    has_null_content: bool = False
    has_text_arguments: bool = False

    def written(self, arguments: dict[str, str]) -> object:
        """Returns arguments as the template gets them."""
        return json.dumps(arguments) if self.has_text_arguments else arguments


class TemplateProbe:
    """Probe of a chat template.

    Args:
        render: renders messages. Raises `InvalidArgumentError`.
        needs_parts: the template reads content as a list of parts.
    """

    def __init__(self, render: Callable[[Messages], str], *, needs_parts: bool) -> None:
        self._render = render
        self._needs_parts = needs_parts

    def why_no_message(self) -> str | None:
        """Returns why the template does not render a message of a user; None if it does."""
        try:
            rendered = self._render([self._message("user", _TEXTS[0])])
        except InvalidArgumentError as error:
            return f"fails: {' '.join(str(error.__cause__).split())}"
        return None if _TEXTS[0] in rendered else "leaves out the message's text"

    def abilities(self) -> TemplateAbilities:
        """Returns the abilities that renderings of short conversations show."""
        if not self._takes("user") or not self._takes("user", "assistant", "user"):
            return TemplateAbilities()  # it expects something that probes do not have
        knows_developer = self._knows("developer")
        rules = ("system", "developer") if knows_developer else ("system",)
        takes_system = self._takes("system", "user")
        takes_results = self._takes("user", "call", "tool")
        writes_calls = takes_results and self._takes_calls(self._call())
        later = [
            ("user", "system"),
            ("user", "system", "assistant", "user"),
            ("system", "user", "assistant", "system", "user"),
            *([("user", "call", "tool", "system")] if takes_results else ()),
        ]
        return TemplateAbilities(
            knows_developer=knows_developer,
            takes_system=takes_system,
            takes_repeated_system=all(self._takes("system", rule, "user") for rule in rules),
            takes_later_system=takes_system
            and all(
                self._takes(*(rule if role == "system" else role for role in roles))
                for roles in later
                for rule in rules
            ),
            takes_repeated_users=self._takes("user", "user"),
            takes_repeated_answers=self._takes("user", "assistant", "assistant", "user"),
            takes_user_before_result=not takes_results
            or self._takes("user", "call", "user", "tool"),
            takes_user_after_result=not takes_results
            or self._takes("user", "call", "tool", "user"),
            takes_several_calls=not writes_calls
            or self._takes_calls(*map(self._call, _CALL_IDS, _VALUES)),
            takes_any_call_id=not writes_calls or self._takes_calls(self._call(_LONG_CALL_ID)),
            needs_text_apart=takes_results
            and not self._takes_text_beside_call()
            and self._takes("user", "assistant", "call", "tool"),
            needs_text_arguments=takes_results and self._form.has_text_arguments,
            needs_null_content=takes_results and self._form.has_null_content,
        )

    def renders_role(self, role: str) -> bool:
        """Returns whether a turn of this role is rendered, or refused by the template itself."""
        return self._renders(_UNKNOWN_ROLE) or self._renders(role)

    def _renders(self, role: str) -> bool:
        before = ("user", "call") if role == "tool" else ("user",)
        rendered = self._rendered((*before, role))
        return rendered is None or _TEXTS[len(before)] in rendered

    def _takes(self, *roles: str) -> bool:
        """Returns whether turns of these roles are rendered, in order."""
        rendered = self._rendered(roles)
        if rendered is None:
            return False
        texts = [text for role, text in zip(roles, _TEXTS, strict=False) if role != "call"]
        places = [rendered.find(text) for text in texts]
        return -1 not in places and places == sorted(places)

    def _takes_text_beside_call(self) -> bool:
        """Returns whether a turn with a text and a call is rendered with both of them, as far as
        the template writes calls at all."""
        roles = ("user", "text and call", "tool")
        rendered = self._rendered(roles) or ""
        has_call = _VALUES[0] in rendered or not self._takes_calls(self._call())
        return has_call and self._takes(*roles)

    def _takes_calls(self, *calls: dict[str, Any]) -> bool:
        """Returns whether a turn of these calls is rendered, and their results after it."""
        rendered = self._rendered(("user", "call", *["tool"] * len(calls)), calls)
        return rendered is not None and all(value in rendered for value in _VALUES[: len(calls)])

    @functools.cached_property
    def _form(self) -> _CallForm:
        """Form in which the template writes a call. One that never does may refuse objects."""
        forms = [_CallForm(*form) for form in product((False, True), repeat=2)]
        for form in forms:
            if (rendered := self._in_form(form)) is not None and _VALUES[0] in rendered:
                return form
        takes_objects, takes_texts = (self._in_form(form) is not None for form in forms[:2])
        return forms[not takes_objects and takes_texts]

    def _in_form(self, form: _CallForm) -> str | None:
        """Returns a rendering of a call in this form; None if the template refuses it, or writes
        its arguments as Python does."""
        arguments = {"x": _VALUES[0]}
        calls = [_call_of(_CALL_IDS[0], form.written(arguments))]
        rendered = self._rendered(("user", "call", "tool"), calls, form)
        if rendered is None or (not form.has_text_arguments and str(arguments) in rendered):
            return None
        return rendered

    def _call(self, call_id: str = _CALL_IDS[0], value: str = _VALUES[0]) -> dict[str, Any]:
        arguments = {"x": value}
        return _call_of(call_id, self._form.written(arguments))

    def _knows(self, role: str) -> bool:
        """Returns whether a turn of this role is rendered otherwise than one of an unknown role."""
        rendered, unknown = self._rendered((role, "user")), self._rendered((_UNKNOWN_ROLE, "user"))
        if rendered is None or _TEXTS[0] not in rendered:
            return False
        return unknown is None or unknown.replace(_UNKNOWN_ROLE, role) != rendered

    def _rendered(
        self,
        roles: Sequence[str],
        calls: Sequence[dict[str, Any]] | None = None,
        form: _CallForm | None = None,
    ) -> str | None:
        """Returns a conversation of turns of these roles, each with a text of its own; None if the
        template refuses it. The role "call" is a turn of calls of the model, without text."""
        calls = [self._call()] if calls is None and "tool" in roles else calls or []
        ids = cycle([call["id"] for call in calls])
        turns = zip(roles, _TEXTS, strict=False)
        made = [self._message(role, text, calls, ids, form) for role, text in turns]
        try:
            return self._render(made)
        except InvalidArgumentError:
            return None

    def _message(
        self,
        role: str,
        text: str,
        calls: Sequence[dict[str, Any]] = (),
        ids: Iterable[str] = (),
        form: _CallForm | None = None,
    ) -> dict[str, Any]:
        if role == "call":
            content = None if (form or self._form).has_null_content else ""
            return {"role": "assistant", "content": content, "tool_calls": list(calls)}
        said = [{"type": "text", "text": text}] if self._needs_parts else text
        if role == "text and call":
            return {"role": "assistant", "content": said, "tool_calls": list(calls)}
        if role == "tool":
            return {"role": role, "content": said, "tool_call_id": next(iter(ids)), "name": "probe"}
        return {"role": role, "content": said}


def _call_of(call_id: str, arguments: object) -> dict[str, Any]:
    function = {"name": "probe", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
