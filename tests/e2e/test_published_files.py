"""A real router and workers of a checkpoint as it is published, started by `baton up` where the
locale is ASCII: prompts and texts over every API are those of transformers."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import anthropic
import grpc
import openai
import pytest
from transformers import AutoTokenizer

from baton import Client
from baton.sampling import SamplingParams
from baton.v1.inference_pb2 import GenerateRequest
from baton.v1.inference_pb2_grpc import InferenceStub
from tests.cli.conftest import running
from tests.support.cluster.published import ANSWER, TEXT, said_by_transformers, save_published

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Neither Python's UTF-8 mode nor another locale takes its place.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
BEGUN = [{"role": "user", "content": "x"}, {"role": "assistant", "content": TEXT}]
ASKED = [{"role": "user", "content": TEXT}]
MAX_TOKENS = 20


@dataclass(frozen=True)
class Up:
    """A cluster that `baton up` runs, and the folder of its model."""

    address: str
    http_url: str
    folder: str

    @cached_property
    def ai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.http_url}/v1", api_key="any", max_retries=0)

    @cached_property
    def claude(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.http_url, api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("published")
    save_published(folder)
    arguments = ["--device", "cpu", "--num-blocks", "64", "--port", "0", "--http-port", "0"]
    command = ["up", "--model", f"tiny={folder}", *arguments, "--admin-port", "0", "--json"]
    with running(*command, **ASCII) as process:
        lines = map(json.loads, iter(process.stdout.readline, ""))
        ready = next((line for line in lines if line["event"] == "ready"), None)
        assert ready is not None, process.stderr.read()
        yield Up(ready["address"], ready["http_url"], str(folder))


def completion(up: Up, **asked: Any) -> str:
    text: str = up.ai.completions.create(**asked).choices[0].text
    return text


def streamed_completion(up: Up, **asked: Any) -> str:
    return "".join(c.choices[0].text for c in up.ai.completions.create(stream=True, **asked))


def chat(up: Up, **asked: Any) -> str:
    return up.ai.chat.completions.create(**asked).choices[0].message.content or ""


def streamed_chat(up: Up, **asked: Any) -> str:
    chunks = up.ai.chat.completions.create(stream=True, **asked)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def response(up: Up, **asked: Any) -> str:
    return up.ai.responses.create(**asked).output_text


def streamed_response(up: Up, **asked: Any) -> str:
    events = up.ai.responses.create(stream=True, **asked)
    return "".join(e.delta for e in events if e.type == "response.output_text.delta")


def message(up: Up, **asked: Any) -> str:
    (block,) = up.claude.messages.create(max_tokens=MAX_TOKENS, **asked).content
    return block.text


def streamed_message(up: Up, **asked: Any) -> str:
    with up.claude.messages.stream(max_tokens=MAX_TOKENS, **asked) as stream:
        return "".join(stream.text_stream)


def of_client(up: Up, *, model: str, prompt: Any, **sampling: Any) -> str:
    with Client(up.address) as client:
        params = SamplingParams(max_tokens=MAX_TOKENS, **sampling)
        return client.generate(prompt, params, model=model).text()


def of_stub(up: Up, **asked: Any) -> str:
    with grpc.insecure_channel(up.address) as channel:
        request = GenerateRequest(sampling={"max_tokens": MAX_TOKENS}, **asked)
        return "".join(part.tokens.text for part in InferenceStub(channel).Generate(request))


Call = Callable[..., str]
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
# How a text is continued, or answered, and what is asked for that.
CONTINUING: dict[str, tuple[Call, dict[str, Any]]] = {
    "completion": (completion, {"prompt": TEXT}),
    "streamed completion": (streamed_completion, {"prompt": TEXT}),
    "continued chat": (chat, {"messages": BEGUN, "extra_body": CONTINUED}),
    "streamed continued chat": (streamed_chat, {"messages": BEGUN, "extra_body": CONTINUED}),
    "continued message": (message, {"messages": BEGUN}),
    "streamed continued message": (streamed_message, {"messages": BEGUN}),
    "client": (of_client, {"prompt": TEXT}),
    "gRPC": (of_stub, {"text": TEXT}),
}
ANSWERING: dict[str, tuple[Call, dict[str, Any]]] = {
    "chat": (chat, {"messages": ASKED}),
    "streamed chat": (streamed_chat, {"messages": ASKED}),
    "response": (response, {"input": TEXT}),
    "streamed response": (streamed_response, {"input": TEXT}),
    "message": (message, {"messages": ASKED}),
    "streamed message": (streamed_message, {"messages": ASKED}),
    "client": (of_client, {"prompt": ASKED}),
    "gRPC": (of_stub, {"chat": {"messages": ASKED}}),
}


@pytest.mark.parametrize(("call", "asked"), CONTINUING.values(), ids=CONTINUING)
def test_text_continues_the_prompt_and_shows_no_end(up, call, asked):
    assert said_by_transformers(up.folder, TEXT) == ANSWER
    assert call(up, model="tiny", **asked) == ANSWER


@pytest.mark.parametrize(("call", "asked"), ANSWERING.values(), ids=ANSWERING)
def test_answer_begins_a_text_and_shows_no_end(up, call, asked):
    assert call(up, model="tiny", **asked) == ANSWER.lstrip()


@pytest.mark.parametrize("call", [completion, streamed_completion])
@pytest.mark.parametrize(
    ("options", "text"),
    [({}, TEXT + ANSWER), ({"stop": [" world"]}, TEXT), ({"stop": ["ld, i"]}, f"{TEXT} wor")],
)
def test_echo_is_the_whole_text_up_to_a_stop_string(up, call, options, text):
    assert call(up, model="tiny", prompt=TEXT, echo=True, **options) == text


@pytest.mark.parametrize(
    "way", ["completion", "streamed completion", "continued chat", "streamed continued chat"]
)
def test_stop_string_with_leading_space_is_found(up, way):
    call, asked = CONTINUING[way]
    assert call(up, model="tiny", stop=[" world"], **asked) == ""
    assert call(up, model="tiny", stop=[" is"], **asked) == ANSWER.partition(" is")[0]


def test_client_finds_stop_string_with_leading_space(up):
    assert of_client(up, model="tiny", prompt=TEXT, stop=(" world",)) == ""


@pytest.mark.parametrize("text", [TEXT, "é hello " * 12 + TEXT], ids=["short", "long"])
def test_prompt_is_neither_cut_nor_padded(up, text):
    """It has as many tokens as transformers makes of it, of which the last decides the answer."""
    tokenizer = AutoTokenizer.from_pretrained(up.folder)
    answer = up.ai.completions.create(model="tiny", prompt=text)
    assert answer.usage.prompt_tokens == len(tokenizer(text)["input_ids"])
    assert answer.choices[0].text == said_by_transformers(up.folder, text)
    messages = [{"role": "user", "content": text}]
    told = up.ai.chat.completions.create(model="tiny", messages=messages)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert told.usage.prompt_tokens == len(ids)
