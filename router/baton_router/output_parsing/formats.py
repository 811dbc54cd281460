"""Output formats by name, and by what a model's chat template shows."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from tokenizers import Tokenizer

from baton.errors import InvalidArgumentError
from baton_router.output_parsing.composed_format import ComposedFormat
from baton_router.output_parsing.output_format import OutputFormat
from baton_router.output_parsing.reasoning import REASONING_SYNTAXES
from baton_router.output_parsing.tool_formats import CALL_SYNTAXES

Syntax = TypeVar("Syntax")


@dataclass(frozen=True, slots=True)
class FormatNames:
    """Names of a model's formats; None where it has none that is known."""

    tool_format: str | None = None
    reasoning_format: str | None = None


def tool_format_names() -> tuple[str, ...]:
    """Returns the names of all formats of tool calls."""
    return tuple(CALL_SYNTAXES)


def reasoning_format_names() -> tuple[str, ...]:
    """Returns the names of all formats of reasoning."""
    return tuple(REASONING_SYNTAXES)


def output_format(
    tool_format: str | None, reasoning_format: str | None, tokenizer: Tokenizer
) -> OutputFormat:
    """Returns the format of a model that writes tool calls and reasoning in the named formats.

    Args:
        tool_format: None: the model makes no calls.
        reasoning_format: None: the model does not reason.

    Raises `InvalidArgumentError` for an unknown name.
    """
    added = tokenizer.get_added_tokens_decoder()
    token_ids = {
        token.content: token_id
        for token_id, token in added.items()
        if token.special or _is_special_to_grammars(token.content)
    }
    return ComposedFormat(
        _named(REASONING_SYNTAXES, reasoning_format, "reasoning-parser"),
        _named(CALL_SYNTAXES, tool_format, "tool-call-parser"),
        token_ids,
        frozenset(token.content for token in added.values() if token.special),
    )


def detect(
    chat_template: str | None,
    model_type: str,
    tokenizer: Tokenizer,  # noqa: ARG001
) -> FormatNames:
    """Returns the formats that a model's chat template shows.

    Args:
        model_type: of the model's configuration, such as "qwen3".
    """
    template = chat_template or ""
    tool_format = "hermes" if "<tool_call>" in template and '"arguments"' in template else None
    reasoning_format = None
    if "</think>" in template:
        reasoning_format = "think" if "<think>" in template else "deepseek-r1"
    return FormatNames(tool_format, reasoning_format)


def takes_tools(chat_template: str | None) -> bool:
    """Returns whether a chat template reads the variable `tools`."""
    if chat_template is None:
        return False
    try:
        return "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(chat_template))
    except jinja2.TemplateError:
        return False


class _GenerationBlock(Extension):  # type: ignore[misc]
    """Block around what the model wrote, in templates that are used in training too."""

    tags: Final = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


@functools.cache
def _environment() -> jinja2.Environment:
    # It renders nothing, so that there is nothing to escape.
    return jinja2.Environment(  # noqa: S701
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )


def _is_special_to_grammars(token: str) -> bool:
    """Returns whether llguidance takes an added token for a special one, also if its tokenizer
    does not."""
    return token.startswith("<") and token.endswith(">")


def _named(syntaxes: Mapping[str, Syntax], name: str | None, setting: str) -> Syntax | None:
    if name is None:
        return None
    if name not in syntaxes:
        raise InvalidArgumentError(
            setting, f"is {name!r}; expected one of {', '.join(sorted(syntaxes))}"
        )
    return syntaxes[name]
