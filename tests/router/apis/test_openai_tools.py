"""Tools go into the prompt as the model's own chat template has them, and nowhere else."""

import shutil
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from baton.models import locate
from baton_router.text.model_card import ModelCard, read_model_card
from tests.support.router.front import front_of
from tests.support.router.scripted import READY, RELEASED, decode, finished, first, prefill

# As the templates of models that call tools have it, in short.
TEMPLATE = """
{%- if tools %}<|im_start|>system
You may call: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- for call in message.tool_calls or [] %} calls {{ call.function.name }}{% endfor %}
{{ message.content or '' }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL: Any = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
}
MESSAGES: list[Any] = [
    {"role": "user", "content": "How is the weather in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "Rain."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with that template."""
    folder = tmp_path_factory.mktemp("model") / "caller"
    shutil.copytree(locate("tiny"), folder, ignore=shutil.ignore_patterns("*.py", "*.md"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelCard:
    return read_model_card(str(folder), tool_format="hermes")


def client_of(front: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://router/v1", api_key="any", max_retries=0, http_client=front
    )


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_prompt_with_tools_is_that_of_transformers(folder, model, choice):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        MESSAGES,
        tools=TOOLS if choice == "auto" else None,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert ("Of a city." in text) == (choice == "auto")
    computing = prefill(first(), RELEASED)
    async with front_of(computing, decode(READY, finished()), model=model) as front:
        await client_of(front).chat.completions.create(
            model=model.name,
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice=choice,
            max_completion_tokens=1,
            temperature=0,
        )
    (asked,) = computing.requests
    assert list(asked.token_ids) == tokenizer(text, add_special_tokens=False).input_ids
