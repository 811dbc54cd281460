"""Parsing of outputs: checks of what a request wants, and the grammar that outputs keep to.

Every rejection is an `InvalidArgumentError` that names the field and the bound.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from baton.errors import InvalidArgumentError
from baton.sampling import (
    MAX_GRAMMAR_BYTES,
    MAX_STOP_TOKEN_IDS,
    Grammar,
    GrammarKind,
    SamplingParams,
)
from baton_router.call.output_format import Choice, ParsingOptions, Tool
from baton_router.call.request_parsing import RequestParsing
from baton_router.text.model_card import ModelCard

_MAX_NAME_CHARS = 128
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{_MAX_NAME_CHARS}}}")
# Tokens with which models end a call. Some checkpoints do not list them as ends of an answer.
_CALL_ENDS = ("<|call|>", "<|eom_id|>")


def check_template_takes_tools(card: ModelCard) -> None:
    """Refuses tools of which the model would not be told."""
    if card.chat_template is not None and not card.template_takes_tools:
        raise InvalidArgumentError(
            "parsing.tools",
            f"cannot be described to model {card.name!r}: its chat template takes no tools. Leave "
            "them out, or serve a model whose template does",
        )


def checked_parsing(options: ParsingOptions, card: ModelCard, max_tools: int) -> ParsingOptions:
    """Returns the options without tools that are not to be called. Raises `InvalidArgumentError`
    for what this model cannot hold to, and for more than `max_tools` tools."""
    tools, choice, limit = options.tools, options.choice, options.max_reasoning_tokens
    _check_tools(tools, max_tools)
    if choice in (Choice.REQUIRED, Choice.NAMED) and not tools:
        raise InvalidArgumentError(
            "parsing.tool_choice", "is a call, but there are no tools; expected at least 1 tool"
        )
    if choice is Choice.NAMED and options.tool_name not in {tool.name for tool in tools}:
        raise InvalidArgumentError(
            "parsing.tool_name", f"is {options.tool_name!r}; must be the name of one of the tools"
        )
    if options.tool_name and choice is not Choice.NAMED:
        raise InvalidArgumentError(
            "parsing.tool_name", "is set; expected only with TOOL_CHOICE_NAMED"
        )
    if tools and choice is not Choice.NONE and not card.tool_format:
        raise InvalidArgumentError(
            "parsing.tools",
            f"cannot be called by model {card.name!r}: the router does not know how it "
            "writes calls. Start the router with --tool-call-parser",
        )
    if limit is not None and not card.reasoning_format:
        raise InvalidArgumentError(
            "parsing.max_reasoning_tokens",
            f"cannot be held to by model {card.name!r}: the router does not know how it "
            "reasons. Start the router with --reasoning-parser",
        )
    return replace(options, tools=()) if choice is Choice.NONE else options


def _check_tools(tools: Sequence[Tool], max_tools: int) -> None:
    if len(tools) > max_tools:
        raise InvalidArgumentError(
            "parsing.tools", f"has {len(tools)} tools; at most {max_tools} are taken"
        )
    names = set[str]()
    for at, tool in enumerate(tools):
        field = f"parsing.tools[{at}].name"
        if not _NAME.fullmatch(tool.name):
            raise InvalidArgumentError(
                field,
                f"is {tool.name[:_MAX_NAME_CHARS]!r}; must be 1 to {_MAX_NAME_CHARS} letters, "
                "digits, underscores, dots and hyphens",
            )
        if tool.name in names:
            raise InvalidArgumentError(field, f"is {tool.name!r}, as that of another one")
        names.add(tool.name)


def request_parsing(
    card: ModelCard, options: ParsingOptions, prompt: str, *, continues_answer: bool = False
) -> RequestParsing:
    """Returns the parsing of the outputs of a request with this rendered prompt, of which the last
    characters are enough. `continues_answer`: it ends with the beginning of the answer."""
    output_format = card.output_format
    is_open = output_format.opens_reasoning(prompt)
    is_over = output_format.closes_reasoning(prompt) or (continues_answer and not is_open)
    kept = {card.tokenizer.token_to_id(token): token for token in output_format.kept_tokens}
    return RequestParsing(
        output_format,
        replace(
            options,
            is_reasoning_open=is_open,
            is_reasoning_over=is_over,
        ),
        {token_id: token for token_id, token in kept.items() if token_id is not None},
        has_short_ids=card.tool_format == "mistral",
    )


def constrained(params: SamplingParams, card: ModelCard, parsing: RequestParsing) -> SamplingParams:
    """Returns the parameters with what makes outputs keep to the format."""
    options = parsing.options
    if options.tools and not params.ignore_eos:
        params = _with_call_ends(params, card)
    own = params.grammar
    if own is None:
        text = parsing.format.grammar(options)
    elif not options.tools and not (options.splits_reasoning and card.reasoning_format):
        return params
    elif own.kind is GrammarKind.JSON_SCHEMA:
        text = parsing.format.grammar(options, own.text)
    else:
        what = "parsing.tools" if options.tools else "parsing.reasoning"
        raise InvalidArgumentError(
            f"sampling.grammar.{own.kind.value}",
            f"cannot be combined with {what}; expected a JSON schema. Leave out one of both",
        )
    if text is None:
        return params
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidArgumentError(
            "parsing.tools",
            f"make a grammar of {len(text.encode())} bytes; at most {MAX_GRAMMAR_BYTES} are taken. "
            "Give fewer tools, or smaller schemas",
        )
    return replace(params, grammar=Grammar(GrammarKind.EBNF, text))


def _with_call_ends(params: SamplingParams, card: ModelCard) -> SamplingParams:
    """Returns the parameters with the tokens that end a call as stop tokens, if they do not end an
    answer of this model anyway."""
    ids = params.stop_token_ids
    for token in _CALL_ENDS:
        token_id = card.tokenizer.token_to_id(token)
        if token_id is not None and token_id not in (*card.eos_token_ids, *ids):
            ids = (*ids, token_id)
    return params if len(ids) > MAX_STOP_TOKEN_IDS else replace(params, stop_token_ids=ids)
