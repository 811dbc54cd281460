"""Chat template of a model: its rendering and its abilities.

Templates are code of checkpoints. Some refuse a conversation that others take, and some leave out
turns without a word; so short conversations are rendered once to learn what a template takes. Loads
the renderer, which takes 0.5 s, with the first rendering.
"""

import ast
import contextlib
import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from baton.errors import InvalidArgumentError
from baton_router.text.template.template_probe import Messages, TemplateAbilities, TemplateProbe

_MAX_ROLES = 64
# Arguments of methods that search in a text, and what is on the left of the operator `in`.
_SEARCH = re.compile(
    r"\b(?:r?split|r?partition|replace|[lr]?strip|remove(?:pre|suf)fix|r?find|r?index|count|"
    r"startswith|endswith)\s*\(\s*([^)\s][^)]*)\)"
)
_LITERAL = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_MEMBER = re.compile(rf"({_LITERAL.pattern})\s+(?:not\s+)?in\b", re.DOTALL)


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
        messages: Messages,
        tools: Messages = (),
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
        return self._probe.why_no_message()

    @functools.cached_property
    def abilities(self) -> TemplateAbilities:
        """Abilities that its renderings of short conversations show."""
        return self._probe.abilities()

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
        return _renders_role(self, role)

    @functools.cached_property
    def _probe(self) -> TemplateProbe:
        return TemplateProbe(self.render, needs_parts=self.needs_parts)


def _literals(code: str) -> list[str]:
    """Returns the texts that are written in code of a template, but for empty ones."""
    texts = []
    for match in _LITERAL.finditer(code):
        with contextlib.suppress(ValueError, SyntaxError):
            texts.append(str(ast.literal_eval(match[0])))
    return [text for text in texts if text]


@functools.lru_cache(maxsize=_MAX_ROLES)
def _renders_role(template: ChatTemplate, role: str) -> bool:
    return template._probe.renders_role(role)


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
