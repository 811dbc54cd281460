"""Output formats by name, and by what a model's chat template shows."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from tokenizers import Tokenizer

from baton.errors import InvalidArgumentError
from baton_router.call.output_format import OutputFormat
from baton_router.text.output_parsing.formats.composed_format import ComposedFormat
from baton_router.text.output_parsing.formats.element_calls import GLM, GLM_TOKENS, ElementCalls
from baton_router.text.output_parsing.formats.harmony import HarmonyFormat
from baton_router.text.output_parsing.formats.pythonic import PythonicCalls
from baton_router.text.output_parsing.formats.reasoning import MarkedReasoning
from baton_router.text.output_parsing.formats.tool_formats import (
    DeepSeekCalls,
    HermesCalls,
    JsonCalls,
    LlamaCalls,
    MistralCalls,
)
from baton_router.text.output_parsing.parser import CallSyntax, ReasoningSyntax

_HARMONY: Final = "harmony"
_CALLS: Final[Mapping[str, CallSyntax]] = {
    "deepseek": DeepSeekCalls(),
    "glm": ElementCalls(tokens=GLM_TOKENS, elements=GLM),
    "hermes": HermesCalls(),
    "json": JsonCalls(),
    "llama3-json": LlamaCalls(),
    "mistral": MistralCalls(),
    "pythonic": PythonicCalls(),
    "qwen3-coder": ElementCalls(),
}
_REASONING: Final[Mapping[str, ReasoningSyntax]] = {
    "deepseek-r1": MarkedReasoning("<think>", "</think>", is_always_open=True),
    "granite": MarkedReasoning("Here is my thought process:", "Here is my response:"),
    "mistral": MarkedReasoning("[THINK]", "[/THINK]"),
    "think": MarkedReasoning("<think>", "</think>"),
}

# Marks of templates, and the formats that they show.
_TOOL_MARKS: Final = (
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("[func_name1(", "pythonic"),
    ('{"name": function name, "parameters":', "llama3-json"),
    ("<|python_tag|>", "llama3-json"),
)


@dataclass(frozen=True, slots=True)
class FormatNames:
    """Names of a model's formats; None where it has none that is known."""

    tool_format: str | None = None
    reasoning_format: str | None = None


def tool_format_names() -> tuple[str, ...]:
    """Returns the names of all formats of tool calls."""
    return tuple(sorted([*_CALLS, _HARMONY]))


def reasoning_format_names() -> tuple[str, ...]:
    """Returns the names of all formats of reasoning."""
    return tuple(sorted([*_REASONING, _HARMONY]))


def output_format(
    tool_format: str | None, reasoning_format: str | None, tokenizer: Tokenizer
) -> OutputFormat:
    """Returns the format of a model that writes tool calls and reasoning in the named formats.

    Args:
        tool_format: None: the model makes no calls.
        reasoning_format: None: the model does not reason.

    Raises `InvalidArgumentError` for an unknown name, and for harmony with another format.
    """
    _check("tool-call-parser", tool_format, tool_format_names())
    _check("reasoning-parser", reasoning_format, reasoning_format_names())
    added = tokenizer.get_added_tokens_decoder()
    token_ids = {
        token.content: token_id
        for token_id, token in added.items()
        if token.special or _is_special_to_grammars(token.content)
    }
    hidden = frozenset(token.content for token in added.values() if token.special)
    names = {name for name in (tool_format, reasoning_format) if name is not None}
    if _HARMONY not in names:
        calls = None if tool_format is None else _CALLS[tool_format]
        reasoning = None if reasoning_format is None else _REASONING[reasoning_format]
        return ComposedFormat(reasoning, calls, token_ids, hidden)
    if len(names) > 1:
        raise InvalidArgumentError(
            "reasoning-parser",
            f"is {reasoning_format!r} where tool-call-parser is {tool_format!r}; expected "
            f"{_HARMONY!r} for both or for none",
        )
    return HarmonyFormat(token_ids, hidden)


def detect(chat_template: str | None, model_type: str, tokenizer: Tokenizer) -> FormatNames:
    """Returns the formats that a model's chat template shows.

    Args:
        model_type: of the model's configuration, such as "qwen3".
    """
    template = chat_template or ""
    has_channels = "<|channel|>" in template and tokenizer.token_to_id("<|channel|>") is not None
    if model_type == "gpt_oss" or has_channels:
        return FormatNames(_HARMONY, _HARMONY)
    return FormatNames(_tool_format(template), _reasoning_format(template))


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


def _check(setting: str, name: str | None, names: tuple[str, ...]) -> None:
    if name is not None and name not in names:
        raise InvalidArgumentError(setting, f"is {name!r}; expected one of {', '.join(names)}")


def _tool_format(template: str) -> str | None:
    if "<tool_call>" in template:
        if "<function=" in template:
            return "qwen3-coder"
        if "<arg_key>" in template:
            return "glm"
        # Others write names and arguments between further marks.
        return "hermes" if "arguments" in template else None
    found = (name for mark, name in _TOOL_MARKS if mark in template)
    return next(found, None)


def _reasoning_format(template: str) -> str | None:
    if "</think>" in template:
        return "think" if "<think>" in template else "deepseek-r1"
    if "[THINK]" in template:
        return "mistral"
    return "granite" if "Here is my thought process:" in template else None
