"""Scripted workers that write a text, and a model card with tools and reasoning."""

import shutil
from pathlib import Path
from typing import Any

from baton.models import locate
from baton.v1 import decode_pb2, prefill_pb2
from baton.v1 import inference_pb2 as pb
from baton_router.text.model_card import ModelCard, read_model_card
from tests.support.router.scripted import READY, RELEASED, Worker, card, decode, finished, prefill

TEMPLATE = """
{%- if tools %}## system
You may call: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}## {{ message.role }}
{%- if message.reasoning_content %} <think>{{ message.reasoning_content }}</think>{% endif %}
{%- for call in message.tool_calls or [] %} calls {{ call.function.name }}
{%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}
{%- endfor %}
{{ message.content or '' }}<|im_end|>
{% endfor %}
{%- if reasoning_effort %}effort: {{ reasoning_effort }}
{% endif %}
{%- if add_generation_prompt %}## assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""


THOUGHT = "<think>\nThe user asks for Oslo: é 漢.\n</think>\n\n"
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo 漢"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'

_RENAMED = {"<|im_start|>": "<think>", "<|pad|>": "</think>"}


def save_calling_model(folder: Path) -> None:
    """Writes the shipped model with a template of tools and reasoning, whose marks are tokens."""
    shutil.copytree(locate("tiny"), folder, ignore=shutil.ignore_patterns("*.py", "*.md"))
    tokenizer = (folder / "tokenizer.json").read_text()
    for name, mark in _RENAMED.items():
        tokenizer = tokenizer.replace(name, mark)
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def calling_card(folder: Path, tool_format: str | None = "hermes") -> ModelCard:
    """The card of that model."""
    return read_model_card(str(folder), tool_format=tool_format, reasoning_format="think")


def ids_of(text: str, model: ModelCard | None = None) -> list[int]:
    tokenizer = (model or card()).tokenizer
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def writing(
    text: str,
    size: int = 3,
    reason: int = pb.FINISH_REASON_END_OF_SEQUENCE,
    model: ModelCard | None = None,
) -> tuple[Worker, Worker]:
    """Workers that write a text, `size` tokens in a message, and end for this reason. `model` None:
    the shipped one."""
    ids = ids_of(text, model)
    token = prefill_pb2.FirstToken(token_id=ids[0], logprob=-0.5)
    result = prefill_pb2.PrefillResponse(result=prefill_pb2.PrefillResult(first_tokens=[token]))
    pieces: list[Any] = [
        decode_pb2.DecodeGenerateResponse(
            tokens=decode_pb2.DecodeTokens(
                position=at,
                token_ids=ids[at : at + size],
                logprobs=[-0.5] * len(ids[at : at + size]),
            )
        )
        for at in range(1, len(ids), size)
    ]
    return prefill(result, RELEASED), decode(READY, *pieces, finished(reason))
