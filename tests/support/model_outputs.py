"""Outputs of models with tool calls, as their chat templates write them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

import baton.models
from baton_router.call.output_format import OutputParser
from baton_router.call.parts import (
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)

SPECIAL_TOKENS = (
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|constrain|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Written:
    """Way to write calls.

    Attributes:
        write: writes calls, with a text before them.
        takes_text: whether there may be text before the calls.
        keeps_strings: whether strings may have any characters.
    """

    format_name: str
    write: Callable[[Sequence[Call], str], str]
    takes_text: bool = True
    keeps_strings: bool = True


def _hermes(calls: Sequence[Call], text: str) -> str:
    blocks = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    ]
    return text + "\n".join(blocks)


def _qwen3_coder(calls: Sequence[Call], text: str) -> str:
    blocks = []
    for name, arguments in calls:
        parameters = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
            "</parameter>\n"
            for key, value in arguments.items()
        )
        blocks.append(f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
    return text + "\n".join(blocks)


def _glm(calls: Sequence[Call], text: str) -> str:
    blocks = []
    for name, arguments in calls:
        parameters = "".join(
            f"<arg_key>{key}</arg_key>\n"
            f"<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        blocks.append(f"<tool_call>{name}\n{parameters}</tool_call>")
    return text + "\n".join(blocks)


def _llama(calls: Sequence[Call], text: str) -> str:
    return "; ".join(
        json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)
        for name, arguments in calls
    )


def _llama_tag(calls: Sequence[Call], text: str) -> str:
    return f"{text}<|python_tag|>{_llama(calls, '')}"


def _json(calls: Sequence[Call], text: str) -> str:
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return json.dumps(objects[0] if len(objects) == 1 else objects)


def _mistral(calls: Sequence[Call], text: str) -> str:
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"{text}[TOOL_CALLS] {json.dumps(objects)}"


def _mistral_arguments(calls: Sequence[Call], text: str) -> str:
    return text + "".join(
        f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls
    )


def _mistral_ids(calls: Sequence[Call], text: str) -> str:
    return text + "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]a1b2c3d4e[ARGS]{json.dumps(arguments)}"
        for name, arguments in calls
    )


def _deepseek(calls: Sequence[Call], text: str) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
        f"{json.dumps(arguments, ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"{text}<｜tool▁calls▁begin｜>{chr(10).join(blocks)}<｜tool▁calls▁end｜>"


def _deepseek_plain(calls: Sequence[Call], text: str) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"{text}<｜tool▁calls▁begin｜>{''.join(blocks)}<｜tool▁calls▁end｜>"


def _pythonic(calls: Sequence[Call], text: str) -> str:
    written = []
    for name, arguments in calls:
        values = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        written.append(f"{name}({values})")
    return f"[{', '.join(written)}]"


def _pythonic_marks(calls: Sequence[Call], text: str) -> str:
    return f"{text}<|python_start|>{_pythonic(calls, '')}<|python_end|>"


def _harmony(calls: Sequence[Call], text: str) -> str:
    messages = [f"<|channel|>commentary<|message|>{text}<|end|>"] if text else []
    messages += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    ]
    return "<|start|>assistant".join(messages)


def _harmony_role(calls: Sequence[Call], text: str) -> str:
    messages = [f"<|channel|>commentary<|message|>{text}<|end|>"] if text else []
    messages += [
        f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    ]
    return "<|start|>assistant" + "<|start|>assistant".join(messages)


WRITTEN = {
    "hermes": Written("hermes", _hermes),
    "qwen3-coder": Written("qwen3-coder", _qwen3_coder, keeps_strings=False),
    "glm": Written("glm", _glm, keeps_strings=False),
    "llama3-json": Written("llama3-json", _llama, takes_text=False),
    "llama3-json-tag": Written("llama3-json", _llama_tag),
    "json": Written("json", _json, takes_text=False),
    "mistral": Written("mistral", _mistral),
    "mistral-arguments": Written("mistral", _mistral_arguments),
    "mistral-ids": Written("mistral", _mistral_ids),
    "deepseek": Written("deepseek", _deepseek),
    "deepseek-plain": Written("deepseek", _deepseek_plain),
    "pythonic": Written("pythonic", _pythonic, takes_text=False),
    "pythonic-marks": Written("pythonic", _pythonic_marks),
    "harmony": Written("harmony", _harmony),
    "harmony-role": Written("harmony", _harmony_role),
}


def plain_tokenizer() -> Tokenizer:
    """Returns the shipped model's tokenizer, which has no special tokens of formats."""
    return Tokenizer.from_file(f"{baton.models.locate('tiny')}/tokenizer.json")


def special_tokenizer() -> Tokenizer:
    """Returns the shipped model's tokenizer with the special tokens of all formats."""
    tokenizer = plain_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def parse(parser: OutputParser, pieces: Sequence[str]) -> list[Part]:
    """Returns the parts of an output that arrives in pieces."""
    parts = [part for piece in pieces for part in parser.push(piece)]
    return parts + parser.finish()


def calls_of(parts: Sequence[Part]) -> list[Call]:
    """Returns the calls, put together of their parts in the order of the API."""
    names: list[str] = []
    arguments: list[str] = []
    for part in parts:
        if isinstance(part, ToolCallStart):
            assert part.index == len(names)
            names.append(part.name)
            arguments.append("")
        elif isinstance(part, ToolCallArguments):
            assert part.index == len(names) - 1
            arguments[-1] += part.json
    return list(zip(names, map(json.loads, arguments), strict=True))


def text_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def reasoning_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Reasoning))
