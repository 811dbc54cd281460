"""Requests of coding agents, as they were recorded, served by models of the families they use."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baton.models import locate
from baton_picker.prompt import PromptReader
from baton_router.text.model_card import AUTO, ModelCard, read_model_card
from baton_router.text.output_parsing.formats.catalog import tool_format_names
from baton_router.text.request_bounds import PromptLimits
from tests.support.agents.recording import RECORDINGS
from tests.support.model_outputs import WRITTEN, special_tokenizer
from tests.support.router.event_stream import events_of
from tests.support.router.front import front_of
from tests.support.router.written import writing
from tests.support.templates import FAMILIES, template_of_family

# How models of each family write calls: names of `WRITTEN`. The template of the family shows the
# format of the first; others are those of models with another parser.
WRITES = {
    "deepseek_v3": ["deepseek"],
    "gemma3": [],
    "glm4": ["glm"],
    "gpt_oss": ["harmony"],
    "llama3": ["llama3-json", "pythonic"],
    "mistral": ["mistral"],
    "qwen3": ["hermes", "json"],
    "qwen3_5": ["qwen3-coder"],
    "qwen3_coder": ["qwen3-coder"],
}
WITHOUT_TOOLS = [family for family, ways in WRITES.items() if not ways]
WAYS = [(family, way) for family, ways in WRITES.items() for way in ways]
SHELLS = {
    "claude": "Bash",
    "codex": "exec_command",
    "opencode": "bash",
    "qwen": "run_shell_command",
}
MAX_MODEL_LEN = 2**18


@cache
def card_of(family: str, folder: Path, tool_format: str = AUTO) -> ModelCard:
    """Returns the shipped model with a family's template and the tokens of its marks."""
    shutil.copytree(locate("tiny"), folder, ignore=shutil.ignore_patterns("*.py", "*.md"))
    tokenizer = special_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template_of_family(family))
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = MAX_MODEL_LEN
    config["vocab_size"] = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_card(str(folder), "tool_model", tool_format)


@pytest.fixture
def basetemp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def test_agents_are_served_by_every_family_and_parser():
    assert {*WRITES} == {*FAMILIES}
    assert {WRITTEN[way].format_name for _, way in WAYS} == {*tool_format_names()}


@pytest.mark.parametrize("family", WITHOUT_TOOLS)
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
async def test_agent_is_refused_by_model_without_tools(family, recording, basetemp):
    asked, card = json.loads(recording.read_text()), card_of(family, basetemp / family)
    async with front_of(*writing("No."), model=card) as front:
        refused = await front.post(asked["path"], json=asked["body"])
    assert refused.status_code == 400
    assert "tools" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("family", "way"), WAYS)
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
async def test_agent_gets_a_call_of_its_shell(family, way, recording, basetemp):
    asked, written = json.loads(recording.read_text()), WRITTEN[way]
    tool_format = AUTO if way == WRITES[family][0] else written.format_name
    card = card_of(family, basetemp / f"{family}-{way}", tool_format)
    assert card.tool_format == written.format_name
    shell = SHELLS[recording.stem]
    arguments = {"cmd" if shell == "exec_command" else "command": "ls -l"}
    text = written.write([(shell, arguments)], "")
    workers = writing(text, size=1, model=card)
    async with front_of(*workers, model=card) as front:
        answer = await front.post(asked["path"], json=asked["body"])
    assert answer.status_code == 200, answer.text
    token_ids = list(workers[0].requests[0].token_ids)
    body = json.dumps(asked["body"]).encode()
    picked = await PromptReader(card, PromptLimits()).read(body, asked["path"] + "?beta=true")
    assert list(picked.token_ids) == token_ids
    prompt = card.tokenizer.decode(token_ids)
    for part in ("Copy the text of notes.txt to copy.txt.", "cat notes.txt", shell):
        assert part in prompt
    assert calls_in(asked["path"], events_of(answer.content)) == [(shell, arguments)]


def calls_in(path: str, events: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The calls of a stream."""
    names, texts = [], []
    for event in events:
        if path.endswith("/messages"):
            if event["type"] == "content_block_start":
                names += [event["content_block"].get("name")]
                texts.append("")
            elif event["type"] == "content_block_delta":
                texts[-1] += event["delta"].get("partial_json", "")
        elif path.endswith("/responses"):
            if event["type"] == "response.function_call_arguments.done":
                texts.append(event["arguments"])
            elif event["type"] == "response.output_item.added":
                names += [event["item"].get("name")]
        else:
            for choice in event["choices"]:
                for call in choice["delta"].get("tool_calls", ()):
                    if name := call["function"].get("name"):
                        names.append(name)
                        texts.append("")
                    texts[-1] += call["function"].get("arguments", "")
    called = [name for name in names if name]
    return list(zip(called, map(json.loads, filter(None, texts)), strict=True))
