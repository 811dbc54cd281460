"""Fields of completions and chat completions that other servers take, too."""

from dataclasses import replace
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from baton.v1 import inference_pb2, sampling_pb2
from baton.v1 import prefill_pb2 as pb
from baton_router.apis.anthropic.schemas import MessagesRequest
from baton_router.apis.edge.body.other_servers import OTHER_FIELDS
from baton_router.apis.openai.schemas import ChatRequest, CompletionRequest
from baton_router.apis.responses.schemas import ResponsesRequest
from baton_router.text.model_card import ModelCard
from tests.support.repository import ROOT
from tests.support.router.event_stream import events_of
from tests.support.router.front import card, front_of
from tests.support.router.scripted import (
    READY,
    RELEASED,
    answering,
    decode,
    finished,
    first,
    of,
    prefill,
    tokens,
)
from tests.support.router.tokenizers import bytes_like, metaspace
from tests.support.router.written import THOUGHT, ids_of, writing

# Of `ending`.
STOP_TOKEN_ID = bytes_like().get_vocab_size() + 1
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "x", "max_tokens": 2},
    "chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "responses": {"input": "x", "max_output_tokens": 2},
    "messages": {"messages": MESSAGES, "max_tokens": 2},
}


async def post(
    path: str, fields: dict[str, Any], model: ModelCard | None = None
) -> tuple[httpx.Response, Any]:
    """Returns the answer to a request with these fields, and what the prefill worker got."""
    computing = prefill(first(), RELEASED)
    workers = computing, decode(READY, tokens(1, 1), finished())
    async with front_of(*workers, model=model) as front:
        answer = await front.post(f"/v1/{path}", json={**ROUTES[path], **fields})
    return answer, (computing.requests or [None])[0]


@pytest.mark.parametrize("path", ROUTES)
async def test_top_k_of_minus_one_is_all(path):
    answer, asked = await post(path, {"top_k": -1})
    assert answer.status_code == 200, answer.text
    assert asked.sampling.top_k == 0
    refused, _ = await post(path, {"top_k": -2})
    assert refused.status_code == 400


@pytest.mark.parametrize("path", ROUTES)
async def test_whole_number_may_be_written_with_a_point(path):
    """As JSON Schema has it: R, Lua and PHP write numbers so."""
    plain = ROUTES[path]
    name = next(name for name in plain if name.startswith("max_"))
    points: dict[str, Any] = {name: 2.0, "top_k": 3.0}
    if path == "completions":
        points |= {"prompt": [5.0, 6.0], "stop_token_ids": [7.0]}
    answer, asked = await post(path, points)
    assert answer.status_code == 200, answer.text
    assert (asked.sampling.max_tokens, asked.sampling.top_k) == (2, 3)
    if path == "completions":
        assert (list(asked.token_ids), list(asked.sampling.stop_token_ids)) == ([5, 6], [7])
    for batch in ([[5.0, 6.0], [7.0]], [[5, 6.0], [7]]):
        answer, asked = await post("completions", {"prompt": batch, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
    for number in (2.5, 1e300):
        refused, _ = await post(path, {"top_k": number})
        assert refused.status_code == 400
        assert "top_k" in refused.json()["error"]["message"]


async def test_float_within_a_text_of_the_client_stays_one(model):
    """Another field of the request is a float that should be an integer."""
    fields = {"max_tokens": 2.0, "chat_template_kwargs": {"reasoning_effort": 3.0}}
    answer, asked = await post("chat/completions", fields, model)
    assert answer.status_code == 200, answer.text
    assert "effort: 3.0" in model.tokenizer.decode(list(asked.token_ids))


@pytest.mark.parametrize("path", ROUTES)
async def test_top_p_of_zero_is_the_most_likely_token(path):
    answer, asked = await post(path, {"top_p": 0, "temperature": 1.0})
    assert answer.status_code == 200, answer.text
    assert (asked.sampling.top_k, asked.sampling.top_p) == (1, 1.0)


@pytest.mark.parametrize("path", ROUTES)
async def test_temperature_above_that_of_openai_is_taken(path):
    answer, asked = await post(path, {"temperature": 2.5})
    assert answer.status_code == 200, answer.text
    assert asked.sampling.temperature == 2.5


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_format_without_a_schema_is_any_object(path):
    form = {"type": "json_schema", "json_schema": {"name": "x"}}
    _, asked = await post(path, {"response_format": form})
    _, same = await post(path, {"response_format": {"type": "json_object"}})
    assert asked.sampling.grammar == same.sampling.grammar
    assert asked.sampling.grammar.json_schema


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
async def test_obfuscation_of_streams_is_taken(path):
    fields = {"stream": True, "stream_options": {"include_obfuscation": True}}
    answer, _ = await post(path, fields)
    assert answer.status_code == 200, answer.text


SCHEMAS: dict[str, Any] = {
    "completions": CompletionRequest,
    "chat/completions": ChatRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}


@pytest.mark.parametrize("path", ROUTES)
async def test_field_of_another_server_is_never_ignored(path):
    known = {*SCHEMAS[path].__struct_encode_fields__}
    workers = answering()
    async with front_of(*workers) as front:
        for name, field in OTHER_FIELDS.items():
            if name in known:
                continue
            odd: Any = [1] if name == "json_schema" else {"odd": 1}
            answer = await front.post(f"/v1/{path}", json={**ROUTES[path], name: odd})
            assert answer.status_code == 400, name
            sent = [name, *field.becomes]
            assert answer.json()["error"]["message"].split(":")[0].split(".")[0] in sent
            for value in field.neutral:
                answer = await front.post(f"/v1/{path}", json={**ROUTES[path], name: value})
                assert answer.status_code == 200, (name, value, answer.text)


# Adapters and samplers of other servers, in the forms that these take.
REFUSED: dict[str, Any] = {
    "adapter_id": "a",
    "adapters": "a",
    "lora": [{"id": 0, "scale": 0.5}],
    "lora_path": "a",
    "lora_request": {"lora_name": "a", "lora_int_id": 1, "lora_path": "/a"},
    "merged_adapters": {"ids": ["a"], "weights": [1]},
    "adaptive_target": 0.5,
    "custom_logit_processor": "a",
    "dry_multiplier": 0.8,
    "dynamic_temperature": True,
    "dynatemp_range": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "guidance_scale": 2,
    "logits_processors": ["a"],
    "mirostat": 2,
    "mirostat_mode": 2,
    "no_repeat_ngram_size": 3,
    "nsigma": 1.0,
    "penalty_alpha": 0.5,
    "samplers": ["top_k"],
    "skew": 1,
    "smoothing_factor": 0.5,
    "temperature_last": True,
    "tfs": 0.5,
    "tfs_z": 0.5,
    "top_a": 0.5,
    "top_n_sigma": 1.0,
    "typical_p": 0.5,
    "xtc_probability": 0.5,
}


@pytest.mark.parametrize("path", [*ROUTES, "embeddings"])
async def test_adapter_and_sampler_are_refused_by_name(path):
    needed = ROUTES.get(path, {"input": "x"})
    documented = (ROOT / "docs" / "reference" / "http_fields.md").read_text()
    async with front_of(*answering()) as front:
        for name, value in REFUSED.items():
            answer = await front.post(f"/v1/{path}", json={**needed, name: value})
            message = answer.json()["error"]["message"]
            assert (answer.status_code, message) == (
                400,
                f"{name}: is not supported here, and would change the answer; leave it out",
            )
            (row,) = (line for line in documented.splitlines() if line.startswith(f"| `{name}` |"))
            assert "| refused |" in row


@pytest.mark.parametrize(
    ("fields", "path", "value"),
    [
        ({"max_new_tokens": 2}, "max_tokens", 2),
        ({"n_predict": 2}, "max_tokens", 2),
        ({"stop_sequences": ["a", "b"]}, "stop", ["a", "b"]),
        ({"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"random_seed": 3}, "seed", 3),
        ({"regex": "a+"}, "grammar.regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "grammar.ebnf", 'root ::= "a"'),
        ({"grammar": 'root ::= "a"'}, "grammar.ebnf", 'root ::= "a"'),
        ({"grammar": {"type": "regex", "value": "a+"}}, "grammar.regex", "a+"),
    ],
)
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
async def test_name_of_another_server_is_taken(route, fields, path, value):
    computing = prefill(first(), RELEASED)
    needed = {name: given for name, given in ROUTES[route].items() if name != "max_tokens"}
    async with front_of(computing, decode(READY, tokens(1, 1), finished())) as front:
        answer = await front.post(f"/v1/{route}", json={**needed, **fields})
        both = {**needed, **fields, "max_tokens": 1, "stop": "x", "repetition_penalty": 2.0}
        both |= {"seed": 9, "guided_regex": "b", "guided_grammar": 'start: "b"'}
        refused = await front.post(f"/v1/{route}", json=both)
    assert answer.status_code == 200, answer.text
    found: Any = computing.requests[0].sampling
    for step in path.split("."):
        found = getattr(found, step)
    assert (found if isinstance(value, int | float | str) else list(found)) == value
    assert refused.status_code == 400
    assert "give one of them" in refused.json()["error"]["message"]


@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize(
    "switch",
    [
        {"enable_thinking": ...},
        {"think": ...},
        {"thinking": ...},
        {"thinking": {"type": ...}},
        {"reasoning": {"enabled": ...}},
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": ...}},
    ],
)
async def test_thinking_switch_of_another_server_reaches_the_template(model, switch, is_on):
    word = "enabled" if is_on else "disabled"
    given = {
        name: {k: (word if k == "type" else is_on) for k in value}
        if isinstance(value, dict)
        else (is_on if value is ... else value)
        for name, value in switch.items()
    }
    answer, asked = await post("chat/completions", given, model)
    assert answer.status_code == 200, answer.text
    prompt = model.tokenizer.decode(list(asked.token_ids), skip_special_tokens=False)
    assert ("</think>" in prompt) == (not is_on)


async def test_reasoning_options_set_effort_and_budget(model):
    given = {"reasoning": {"effort": "high", "max_tokens": 5}}
    answer, asked = await post("chat/completions", given, model)
    assert answer.status_code == 200, answer.text
    prompt = model.tokenizer.decode(list(asked.token_ids), skip_special_tokens=False)
    assert "effort: high" in prompt
    assert "max_tokens=5" in asked.sampling.grammar.ebnf


async def written(
    model: ModelCard, text: str, stream: bool, fields: dict[str, Any], **settings: Any
) -> Any:
    """Returns content, reasoning_content and reasoning of an answer when the model writes
    `text`."""
    async with front_of(*writing(text, model=model), model=model, **settings) as front:
        asked = {"messages": MESSAGES, "max_tokens": 200, "stream": stream, **fields}
        answer = await front.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    if not stream:
        messages = [answer.json()["choices"][0]["message"]]
    else:
        chunks = events_of(answer.content)
        messages = [c["delta"] for chunk in chunks for c in chunk["choices"]]
    names = ("content", "reasoning_content", "reasoning")
    return tuple("".join(message.get(name) or "" for message in messages) for name in names)


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_left_out_or_left_in_where_it_is_asked(model, stream):
    text = f"{THOUGHT}It rains."
    thought = "The user asks for Oslo: é 漢."
    assert await written(model, text, stream, {}) == ("It rains.", thought, thought)
    for fields in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        assert await written(model, text, stream, fields) == ("It rains.", "", "")
    for fields in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
        assert await written(model, text, stream, fields) == (text, "", "")
    for name, told in (("reasoning", ("", thought)), ("reasoning_content", (thought, ""))):
        found = await written(model, text, stream, {}, reasoning_field=name)
        assert found == ("It rains.", *told)


@pytest.mark.parametrize("name", ["logprobs", "return_token_ids"])
async def test_reasoning_that_is_left_out_is_not_told_by_tokens(model, name):
    answer, _ = await post("chat/completions", {"include_reasoning": False, name: True}, model)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_sampling_that_grpc_has_is_taken_over_http(path):
    _, asked = await post(path, {"bad_words": ["never"], "priority": -3})
    assert asked.sampling.bad_token_ids
    assert asked.priority == -3
    beams = {"use_beam_search": True, "n": 3, "length_penalty": 2.0, "early_stopping": "never"}
    written = (of(i, event) for i in range(3) for event in (tokens(0, 1, 1), finished()))
    decoding = decode(READY, *written)
    async with front_of(prefill(first(), RELEASED), decoding) as front:
        answer = await front.post(f"/v1/{path}", json={**ROUTES[path], **beams})
    assert answer.status_code == 200, answer.text
    sampling = decoding.requests[0].sampling
    assert (sampling.beam_width, sampling.n, sampling.temperature) == (3, 3, 0.0)
    assert sampling.length_penalty == 2.0
    assert sampling.early_stopping == sampling_pb2.EARLY_STOPPING_NEVER
    _, asked = await post(path, {"use_beam_search": True})
    assert (asked.sampling.beam_width, asked.sampling.temperature) == (0, 0.0)


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
async def test_cache_salt_sets_cached_blocks_apart(path):
    salts = [(await post(path, {"cache_salt": salt}))[1].salt for salt in ("", "a", "a", "b")]
    assert salts[0] == b""
    assert salts[1] == salts[2] != salts[3]
    assert salts[1] != salts[0]
    assert salts[1] != b"a"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_answer_has_token_ids_where_they_are_asked_for(model, path, stream):
    text = "Hello 漢 there."
    computing, decoding = writing(text, 2, model=model)
    fields = {**ROUTES[path], "max_tokens": 50, "return_token_ids": True, "stream": stream}
    async with front_of(computing, decoding, model=model) as front:
        answer = await front.post(f"/v1/{path}", json=fields)
    assert answer.status_code == 200, answer.text
    chunks = events_of(answer.content) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [i for choice in choices for i in choice.get("token_ids", [])]
    assert ids == ids_of(text, model)
    about_prompt = choices if path == "completions" else chunks
    prompts = [each["prompt_token_ids"] for each in about_prompt if "prompt_token_ids" in each]
    assert prompts == [list(computing.requests[0].token_ids)]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_prompt_logprobs_are_those_of_vllm(path):
    top = inference_pb2.TopLogprobs(token_ids=[9, 8], logprobs=[-0.1, -2.0])
    found = inference_pb2.PromptLogprobs(position=1, logprobs=[-3.0], top_logprobs=[top])
    computing = prefill(pb.PrefillResponse(prompt_logprobs=found), first(), RELEASED)
    asked = {**ROUTES[path], "prompt_logprobs": 2}
    if path == "completions":
        asked["prompt"] = [5, 6]
    async with front_of(computing, decode(READY, tokens(1, 1), finished())) as front:
        answer = (await front.post(f"/v1/{path}", json=asked)).json()
    (request,) = computing.requests
    assert request.sampling.prompt_logprobs == 2
    told = (answer["choices"][0] if path == "completions" else answer)["prompt_logprobs"]
    assert told[0] is None
    assert {int(i): (e["logprob"], e["rank"]) for i, e in told[1].items()} == {
        9: (pytest.approx(-0.1), 1),
        8: (-2.0, 2),
        request.token_ids[1]: (-3.0, None),
    }
    assert all(isinstance(entry["decoded_token"], str) for entry in told[1].values())


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_echo_of_no_tokens_is_the_prompt_alone(logprobs):
    scores = pb.PrefillResponse(
        prompt_logprobs=inference_pb2.PromptLogprobs(position=1, logprobs=[-0.5] * 2)
    )
    computing = prefill(*([scores] if logprobs is not None else []), first(), RELEASED)
    asked = {"prompt": [5, 6, 7], "echo": True, "max_tokens": 0, "logprobs": logprobs}
    async with front_of(computing, decode(READY, finished())) as front:
        answer = (await front.post("/v1/completions", json=asked)).json()
        text = (await front.post("/detokenize", json={"tokens": asked["prompt"]})).json()["prompt"]
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    assert answer["usage"]["completion_tokens"] == 0
    if logprobs is not None:
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]


@pytest.mark.parametrize(
    ("stop", "text"), [([], "hello world world"), ([" world"], "hello"), (["rld "], "hello wo")]
)
async def test_completion_continues_the_text_of_its_prompt(stop, text):
    """Decoders as of Llama 2 drop a space at the beginning of a text."""
    asked = {"prompt": "hello", "echo": True, "stop": stop, "max_tokens": 50}
    async with front_of(*writing("world world", model=metaspace()), model=metaspace()) as front:
        answer = await front.post("/v1/completions", json=asked)
        chat = await front.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert answer.json()["choices"][0]["text"] == text
    assert chat.json()["choices"][0]["message"]["content"] == "world world"


def ending() -> ModelCard:
    """A model whose end of an answer, and another token, are not marked as special."""
    tokenizer = bytes_like()
    tokenizer.add_tokens([AddedToken("<end>"), AddedToken("<stop>")])
    ends = frozenset([tokenizer.token_to_id("<end>")])
    return replace(card(), tokenizer=tokenizer, eos_token_ids=ends)


@pytest.mark.parametrize("asked", [{}, {"stop": ["z"]}, {"stop_token_ids": [STOP_TOKEN_ID]}])
async def test_token_that_ended_an_answer_is_not_shown(asked):
    """Though the tokenizer does not mark it as special."""
    model, written = ending(), "hi<stop>" if "stop_token_ids" in asked else "hi<end>"
    async with front_of(*writing(written, model=model), model=model) as front:
        answer = await front.post("/v1/completions", json={"prompt": "a", **asked})
        ignored = await front.post("/v1/completions", json={"prompt": "a", "ignore_eos": True})
    assert answer.json()["choices"][0]["text"] == "hi"
    assert ignored.json()["choices"][0]["text"] == written
