"""Tools go into the prompt as the model's own chat template has them, and nowhere else."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from baton.cli.local_cluster import LocalCluster
from baton.models import locate

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

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
def ai(folder: Path) -> Iterator[openai.OpenAI]:
    with (
        LocalCluster(str(folder), http_port=0) as cluster,
        openai.OpenAI(
            base_url=f"{cluster.http_address}/v1", api_key="any", max_retries=0
        ) as client,
    ):
        yield client


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_the_prompt_is_what_transformers_makes_of_it(ai, folder, choice):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        MESSAGES,
        tools=TOOLS if choice == "auto" else None,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert ("Of a city." in text) == (choice == "auto")
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    model = ai.models.list().data[0].id
    expected = ai.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0)
    answer = ai.chat.completions.create(
        model=model,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice=choice,
        max_completion_tokens=12,
        temperature=0,
    )
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].message.content == expected.choices[0].text != ""


def test_a_tool_that_must_be_called_is_refused_by_name(ai):
    model = ai.models.list().data[0].id
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        ai.chat.completions.create(
            model=model, messages=MESSAGES[:1], tools=TOOLS, tool_choice="required"
        )
