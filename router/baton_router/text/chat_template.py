"""Chat template of a model: its rendering and its abilities.

Templates are code of checkpoints. Some refuse a conversation that others take, and some leave out
turns without a word; so short conversations are rendered once to learn what a template takes. Loads
the renderer, which takes 0.5 s, with the first rendering.
"""

import ast
import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from typing import Any

from baton.errors import InvalidArgumentError

_Messages = Sequence[Mapping[str, Any]]

_MAX_ROLES = 64
# A role that no template knows.
_UNKNOWN_ROLE = "somerole"
# Texts of the turns of a probe, which no template has by itself.
_TEXTS = tuple(f"text{number}of{number}" for number in range(8))
# Ids of calls, in the form that Mistral's templates demand, and one that they refuse.
_CALL_IDS = ("call00001", "call00002")
_LONG_CALL_ID = "call_of_a_probe"
# Values of arguments of the calls.
_VALUES = ("value1of2", "value2of2")

# Arguments of methods that search in a text, and what is on the left of the operator `in`.
_SEARCH = re.compile(
    r"\b(?:r?split|r?partition|replace|[lr]?strip|remove(?:pre|suf)fix|r?find|r?index|count|"
    r"startswith|endswith)\s*\(\s*([^)\s][^)]*)\)"
)
_LITERAL = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_MEMBER = re.compile(rf"({_LITERAL.pattern})\s+(?:not\s+)?in\b", re.DOTALL)


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
        needs_text_apart: a text before a call is lost unless it is a turn of its own.
        needs_text_arguments: arguments of calls are JSON as text, not objects.
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


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template of one checkpoint.

    Attributes:
        special_tokens: by the names that templates use, such as "bos_token".
        needs_parts: it reads content as a list of parts, even of text alone.
    """

    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()
    needs_parts: bool = False

    def render(
        self,
        messages: _Messages,
        tools: _Messages = (),
        variables: Mapping[str, Any] | None = None,
        *,
        adds_generation_prompt: bool = True,
    ) -> str:
        """Returns the conversation as text, as `ModelCard.render`. Raises
        `InvalidArgumentError`."""
        try:
            rendered, _ = _renderer()(
                [list(messages)],
                tools=list(tools) or None,
                chat_template=self.source,
                add_generation_prompt=adds_generation_prompt,
                **{**dict(self.special_tokens), **(variables or {})},
            )
        # A template is code of the checkpoint: odd values may make it raise anything.
        except Exception as error:
            raise InvalidArgumentError(
                "input.chat.messages", f"the model's chat template refuses them: {error}"
            ) from error
        return str(rendered[0])

    def why_no_message(self) -> str | None:
        """Returns why it does not render a message of a user; None if it does."""
        try:
            rendered = self.render([self._message("user", _TEXTS[0], (), iter(()))])
        except InvalidArgumentError as error:
            return f"fails: {' '.join(str(error.__cause__).split())}"
        return None if _TEXTS[0] in rendered else "leaves out the message's text"

    @functools.cached_property
    def abilities(self) -> TemplateAbilities:
        """Abilities that its renderings of short conversations show."""
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
            and not self._takes("user", "text and call", "tool")
            and self._takes("user", "assistant", "call", "tool"),
            needs_text_arguments=takes_results and self._needs_text_arguments,
        )

    @functools.cached_property
    def searched_texts(self) -> tuple[str, ...]:
        """Texts that it searches for in those of users, such as marks of reasoning that it deletes;
        all texts in it where it searches for values."""
        found = [_literals(match[1]) for match in _SEARCH.finditer(self.source)]
        if not all(found):
            found = [_literals(self.source)]
        found += [_literals(match[1]) for match in _MEMBER.finditer(self.source)]
        return tuple(dict.fromkeys(chain.from_iterable(found)))

    def names_role(self, role: str) -> bool:
        """Returns whether the template tells turns of this role from others: a text in it is the
        role's name."""
        return role in self._literals

    @functools.cached_property
    def _literals(self) -> frozenset[str]:
        return frozenset(_literals(self.source))

    def renders_role(self, role: str) -> bool:
        """Returns whether a turn of this role is rendered, or refused by the template itself."""
        return _renders_role(self, _UNKNOWN_ROLE) or _renders_role(self, role)

    def _takes(self, *roles: str) -> bool:
        """Returns whether turns of these roles are rendered, in order."""
        rendered = self._rendered(roles)
        if rendered is None:
            return False
        texts = [text for role, text in zip(roles, _TEXTS, strict=False) if role != "call"]
        places = [rendered.find(text) for text in texts]
        return -1 not in places and places == sorted(places)

    def _takes_calls(self, *calls: dict[str, Any]) -> bool:
        """Returns whether a turn of these calls is rendered, and their results after it."""
        rendered = self._rendered(("user", "call", *["tool"] * len(calls)), calls)
        return rendered is not None and all(value in rendered for value in _VALUES[: len(calls)])

    @functools.cached_property
    def _needs_text_arguments(self) -> bool:
        """Whether it refuses arguments that are an object, or writes them as Python does."""
        roles = ("user", "call", "tool")
        arguments = {"x": _VALUES[0]}
        rendered = self._rendered(roles, [_call_of(_CALL_IDS[0], arguments)])
        if rendered is not None and str(arguments) not in rendered:
            return False
        as_text = self._rendered(roles, [_call_of(_CALL_IDS[0], json.dumps(arguments))])
        return as_text is not None

    def _call(self, call_id: str = _CALL_IDS[0], value: str = _VALUES[0]) -> dict[str, Any]:
        arguments = {"x": value}
        return _call_of(call_id, json.dumps(arguments) if self._needs_text_arguments else arguments)

    def _knows(self, role: str) -> bool:
        """Returns whether a turn of this role is rendered otherwise than one of an unknown role."""
        rendered, unknown = self._rendered((role, "user")), self._rendered((_UNKNOWN_ROLE, "user"))
        if rendered is None or _TEXTS[0] not in rendered:
            return False
        return unknown is None or unknown.replace(_UNKNOWN_ROLE, role) != rendered

    def _rendered(
        self, roles: Sequence[str], calls: Sequence[dict[str, Any]] | None = None
    ) -> str | None:
        """Returns a conversation of turns of these roles, each with a text of its own; None if the
        template refuses it. The role "call" is a turn of calls of the model, without text."""
        calls = [self._call()] if calls is None and "tool" in roles else calls or []
        ids = cycle([call["id"] for call in calls])
        turns = zip(roles, _TEXTS, strict=False)
        made = [self._message(role, text, calls, ids) for role, text in turns]
        try:
            return self.render(made)
        except InvalidArgumentError:
            return None

    def _message(
        self, role: str, text: str, calls: Sequence[dict[str, Any]], ids: Iterator[str]
    ) -> dict[str, Any]:
        if role == "call":
            return {"role": "assistant", "content": "", "tool_calls": list(calls)}
        content = [{"type": "text", "text": text}] if self.needs_parts else text
        if role == "text and call":
            return {"role": "assistant", "content": content, "tool_calls": list(calls)}
        if role == "tool":
            return {"role": role, "content": content, "tool_call_id": next(ids), "name": "probe"}
        return {"role": role, "content": content}


def _call_of(call_id: str, arguments: object) -> dict[str, Any]:
    function = {"name": "probe", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _literals(code: str) -> list[str]:
    """Returns the texts that are written in code of a template, but for empty ones."""
    texts = []
    for match in _LITERAL.finditer(code):
        with contextlib.suppress(ValueError, SyntaxError):
            texts.append(str(ast.literal_eval(match[0])))
    return [text for text in texts if text]


@functools.lru_cache(maxsize=_MAX_ROLES)
def _renders_role(template: ChatTemplate, role: str) -> bool:
    before = ("user", "call") if role == "tool" else ("user",)
    rendered = template._rendered((*before, role))
    return rendered is None or _TEXTS[len(before)] in rendered


@functools.cache
def _renderer() -> Callable[..., tuple[list[str], Any]]:
    """Returns transformers' renderer. Its log lines, of which it prints one without torch, are
    formatted as all others."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers.utils import logging
    from transformers.utils.chat_template_utils import render_jinja_template

    logging.disable_default_handler()
    logging.enable_propagation()
    renderer: Callable[..., tuple[list[str], Any]] = render_jinja_template
    return renderer
