"""Streams over HTTP: never silent, with the usage so far, and equal to the whole answer."""

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from baton.sampling import NO_DEFAULTS, SamplingParams
from baton.serving.deadline import Deadline
from baton.serving.grpc.large_requests import LARGE_BYTES
from baton.v1 import prefill_pb2
from baton_router.apis.answers.answer_writer import AnswerStart, AnswerWriter
from baton_router.apis.answers.http_call import HttpCall
from baton_router.apis.answers.keep_alive import KeepAlive
from baton_router.apis.answers.sequence_reader import Reader, SequenceDelta
from baton_router.apis.anthropic.writer import MessageWriter
from baton_router.apis.openai.choice_formats import ChatShape
from baton_router.apis.openai.choice_writer import ChoiceWriter
from baton_router.apis.openai.sampling import defaults_over_http
from baton_router.apis.openai.schemas import ChatRequest
from baton_router.apis.responses.functions import Functions
from baton_router.apis.responses.schemas import ResponsesRequest
from baton_router.apis.responses.writer import ResponseWriter
from baton_router.call.generate_call import GenerateCall
from baton_router.call.output_delta import OutputDelta
from baton_router.call.output_format import Choice, ParsingOptions, Tool
from baton_router.call.parts import Part, Text, joined
from baton_router.call.tokens import Tokens
from baton_router.routing.admission.quotas import Quota
from baton_router.text.output_parsing.formats.catalog import output_format
from baton_router.text.token_bytes import TokenBytes
from tests.support.grids import nightly
from tests.support.model_outputs import WRITTEN, special_tokenizer
from tests.support.router.event_stream import events_of
from tests.support.router.front import anthropic_client_of, front_of
from tests.support.router.scripted import Cue
from tests.support.router.written import writing
from tests.support.waiting import until

USER = [{"role": "user", "content": "How is the weather in Oslo?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello."},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "Hello."},
    "/v1/messages": {"messages": USER, "max_tokens": 100},
}
LASTS = {
    "/v1/completions": "data: [DONE]",
    "/v1/chat/completions": "data: [DONE]",
    "/v1/responses": "data: [DONE]",
    "/v1/messages": "event: message_stop",
}
COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def keep_alive_of(path: str) -> bytes:
    return PING if path == "/v1/messages" else COMMENT


@pytest.mark.symptom(
    "copilot-cli#4286",
    there="a client gives up on a stream that is silent for long",
    here="Sends a comment, or a ping on `/v1/messages`, while nothing else is sent.",
)
@pytest.mark.parametrize("path", BODIES)
async def test_stream_is_kept_alive_while_it_is_silent(path):
    """The workers go on only once the client has a sign of life, in prefill and in decode."""
    keep_alive = keep_alive_of(path)
    cues = [Cue(), Cue()]
    waiting = iter(cues)
    prefill, decode = writing("It rains in Oslo today.", 1)
    prefill.script.insert(1, cues[0])
    decode.script.insert(4, cues[1])

    def note(part: bytes) -> None:
        if part == keep_alive and (cue := next(waiting, None)):
            cue.event.set()

    body = {"model": "tiny", "stream": True, **BODIES[path]}
    async with front_of(prefill, decode, on_body=note, max_silence=0.02) as front:
        answer = await front.post(path, json=body)
    assert answer.status_code == 200
    assert all(cue.event.is_set() for cue in cues)
    assert LASTS[path] in answer.text.strip().split("\n\n")[-1]


@pytest.mark.nightly
async def test_stream_is_kept_alive_within_ten_seconds():
    """Each request fails after little more."""

    async def kept_alive(path: str) -> None:
        cue = Cue()
        prefill, decode = writing("It rains in Oslo today.", 1)
        decode.script.insert(4, cue)

        def note(part: bytes) -> None:
            if part == keep_alive_of(path):
                cue.event.set()

        body = {"stream": True, "baton": {"timeout_s": 12.0}, **BODIES[path]}
        async with front_of(prefill, decode, on_body=note) as front:
            answer = await front.post(path, json=body)
        assert keep_alive_of(path) in answer.content
        assert LASTS[path] in answer.text.strip().split("\n\n")[-1]

    await asyncio.gather(*map(kept_alive, BODIES))


@pytest.mark.parametrize("path", BODIES)
async def test_stream_begins_while_its_request_is_queued(path):
    """Its tenant may have one request, and that one ends once the stream is kept alive."""
    cue = Cue()
    prefill, decode = writing("It rains in Oslo today.", 1)
    decode.script.insert(4, cue)
    parts: list[bytes] = []

    def note(part: bytes) -> None:
        parts.append(part)
        if part == keep_alive_of(path):
            cue.event.set()

    limits, body = Quota(max_concurrent=1), {"model": "tiny", **BODIES[path]}
    bound = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    async with front_of(prefill, decode, limits=limits, on_body=note, max_silence=0.02) as front:
        first = asyncio.create_task(front.post(path, json=body))
        await until(lambda: decode.num_running == 1)
        answer = await front.post(path, json={**body, "stream": True, bound: 10**6})
        assert (await first).status_code == 200
    assert answer.status_code == 200
    assert answer.headers["x-baton-clamped"].startswith(f"{bound}=")
    assert parts[:2] == [b"", keep_alive_of(path)]  # of the headers
    assert LASTS[path] in answer.text.strip().split("\n\n")[-1]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("max_silence", [0.02, 10.0])
async def test_refusal_in_the_queue_is_an_event_once_the_stream_began(path, max_silence):
    cue = Cue()
    prefill, decode = writing("It rains in Oslo today.", 1)
    decode.script.insert(4, cue)
    limits, body = Quota(max_concurrent=1), {"model": "tiny", **BODIES[path]}
    async with front_of(prefill, decode, limits=limits, max_silence=max_silence) as front:
        first = asyncio.create_task(front.post(path, json=body))
        await until(lambda: decode.num_running == 1)
        late = {**body, "stream": True, "baton": {"timeout_s": 0.1}}
        answer = await front.post(path, json=late)
        cue.event.set()
        await first
    if max_silence == 10.0:
        assert answer.status_code == 504
        return
    assert answer.status_code == 200
    assert answer.content.startswith(keep_alive_of(path))
    events = events_of(answer.content)
    if path == "/v1/responses":
        assert events[0]["type"] == "response.created"
        assert events[-1]["type"] == "response.failed"
        assert answer.text.endswith("\n\ndata: [DONE]\n\n")
        assert events[-1]["response"]["error"]["message"]
    else:
        assert "deadline" in events[-1]["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_stream_begins_while_the_first_workers_are_awaited(path):
    """They are found once it is kept alive."""
    is_discovered = asyncio.Event()
    parts: list[bytes] = []

    def note(part: bytes) -> None:
        parts.append(part)
        if part == keep_alive_of(path):
            is_discovered.set()

    workers = writing("It rains in Oslo today.", 1)
    body = {"model": "tiny", "stream": True, **BODIES[path]}
    async with front_of(
        *workers, is_discovered=is_discovered, on_body=note, max_silence=0.02
    ) as front:
        answer = await front.post(path, json=body)
    assert answer.status_code == 200
    assert parts[:2] == [b"", keep_alive_of(path)]  # of the headers
    assert LASTS[path] in answer.text.strip().split("\n\n")[-1]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
async def test_refusal_before_a_request_is_made_counts_once(path, is_streamed):
    """The second one is beyond the limit. Its prompt is too long, which is known with the
    workers, when the stream has begun."""
    is_discovered = asyncio.Event()

    def note(_part: bytes) -> None:
        is_discovered.set()

    words = "word " * 9000
    turn = {"role": "user", "content": words}
    name = next(name for name in ("prompt", "messages", "input") if name in BODIES[path])
    body = {**BODIES[path], name: [turn] if name == "messages" else words, "stream": is_streamed}
    if not is_streamed:
        is_discovered.set()
    limits = Quota(requests_per_minute=1)
    async with front_of(
        *writing("a"), limits=limits, is_discovered=is_discovered, on_body=note, max_silence=0.02
    ) as front:
        first = await front.post(path, json=body)
        second = await front.post(path, json=body)
    if is_streamed:
        assert first.status_code == 200
        assert first.content.startswith(keep_alive_of(path))
        told = json.dumps(events_of(first.content)[-1])
    else:
        assert first.status_code == 400
        told = first.text
    assert "too long" in told or "maximum context length" in told
    assert second.status_code == 429


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/completions"])
async def test_large_body_is_counted_until_its_request_is_made(path):
    """It waits for the first workers, and is streamed when it is counted no more."""
    is_discovered, cue = asyncio.Event(), Cue()
    prefill, decode = writing("It rains in Oslo today.", 1)
    decode.script.insert(4, cue)
    body = {"model": "tiny", "stream": True, "flavour": "x" * 2 * LARGE_BYTES, **BODIES[path]}
    async with front_of(prefill, decode, is_discovered=is_discovered) as front:
        transport: Any = front._transport
        (endpoint, *_) = [r.endpoint for r in transport.app.app.routes if r.path == path]
        large = endpoint.__self__._bodies._large
        answering = asyncio.create_task(front.post(path, json=body))
        await until(lambda: large.num_bytes > 2 * LARGE_BYTES)
        is_discovered.set()
        await until(lambda: decode.num_running == 1)
        assert large.num_bytes == 0
        cue.event.set()
        assert (await answering).status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_refusal_before_the_stream_began_has_its_own_status(path):
    body = {"model": "tiny", "stream": True, "baton": {"timeout_s": 0.05}, **BODIES[path]}
    async with front_of(*writing("a"), is_discovered=asyncio.Event()) as front:
        assert (await front.post(path, json=body)).status_code == 504


async def test_stream_that_sends_often_is_not_kept_alive():
    """The timer ticks in every round of the event loop, and so does the model write."""

    class Busy:
        async def generate(self, *_given: Any) -> AsyncIterator[OutputDelta]:
            for position in range(9):
                await asyncio.sleep(0)
                yield OutputDelta(0, Tokens(position, [7]), parts=[Text("a")])

    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def prepare() -> list[GenerateCall]:
        return [GenerateCall("Hello.", SamplingParams())]

    inference: Any = Busy()
    caller: Any = None
    call = HttpCall(
        inference,
        caller,
        Deadline.after(20.0),
        "r",
        prepare,
        [Reader(0, 1)],
        writer_of("chat"),
        is_stream=True,
        max_silence=0.0,
    )
    await call.write(send, lambda error: error, nullcontext())
    assert sum(b'"content":"a"' in piece for piece in sent) == 9
    assert COMMENT not in sent


async def test_keep_alive_sends_one_piece_at_a_time():
    pieces: list[bytes] = []
    is_read = asyncio.Event()

    async def send(message: Any) -> None:
        pieces.append(message["body"])
        await is_read.wait()

    async def start() -> None:
        pieces.append(b"")

    async with KeepAlive(send, start, COMMENT, 1000.0) as alive:
        await alive.begin()
        assert pieces.pop() == b""
        for _ in range(3):  # the first looks back at the headers
            alive.tick()
            await asyncio.sleep(0)
        assert pieces == [COMMENT]
        is_read.set()
        await asyncio.sleep(0)
        alive.has_sent = True
        for expected in (1, 2):
            alive.tick()
            await asyncio.sleep(0)
            assert len(pieces) == expected
        is_read.clear()
        alive.tick()
        await asyncio.sleep(0)
    assert len(pieces) == 3
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_keep_alive_has_begun_once_its_headers_are_sent(fails):
    """The stream fails while the timer sends them: they are there or not, and never half."""
    sent: list[str] = []
    may_go_on = asyncio.Event()

    async def start() -> None:
        sent.append("headers")
        await may_go_on.wait()
        if fails:
            raise OSError
        sent.append("sent")

    async def send(_message: Any) -> None:
        sent.append("piece")

    alive = KeepAlive(send, start, COMMENT, 1000.0)

    async def fail() -> None:
        async with alive:
            alive.tick()
            alive.tick()
            await until(lambda: sent == ["headers"])
            assert not alive.has_begun
            asyncio.get_running_loop().call_soon(may_go_on.set)
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        await fail()
    assert alive.has_begun == (not fails)
    assert sent[:2] == (["headers"] if fails else ["headers", "sent"])


async def test_keep_alive_before_the_message_is_left_out_by_clients(model):
    prefill, decode = writing("It rains.", model=model)
    cue = Cue()
    prefill.script.insert(1, cue)
    async with front_of(
        prefill, decode, model=model, on_body=lambda _: cue.event.set(), max_silence=0.02
    ) as front:
        client = anthropic_client_of(front)
        given: Any = {"model": model.name, "max_tokens": 100, "messages": USER}
        async with client.messages.stream(**given) as stream:
            types = [event.type async for event in stream]
            message = await stream.get_final_message()
    assert types[0] == "message_start"
    assert message.content[0].text == "It rains."


@pytest.mark.symptom(
    "dynamo#14850",
    there="cached tokens are 0 in every chunk but the last",
    here="Tells them from the first usage on.",
)
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"stream_options": {"continuous_usage_stats": True}}),
        ("/v1/completions", {"stream_options": {"continuous_usage_stats": True}, "echo": True}),
        ("/v1/chat/completions", {"stream_options": {"continuous_usage_stats": True}}),
        ("/v1/messages", {}),
    ],
)
async def test_running_usage_has_the_cached_tokens_from_the_first(path, more):
    prefill, decode = writing("It rains.", 1)
    begun = prefill_pb2.PrefillStarted(num_cached_tokens=2)
    prefill.script.insert(1, prefill_pb2.PrefillResponse(started=begun))
    body = {"model": "tiny", "stream": True, **BODIES[path], **more}
    async with front_of(prefill, decode) as front:
        answer = await front.post(path, json=body)
    usages = list(map(cached_tokens, events_of(answer.content)))
    assert {usage for usage in usages if usage is not None} == {2}
    assert usages[0] == 2


async def test_running_usage_is_left_out_with_the_usage():
    options = {"include_usage": False, "continuous_usage_stats": True}
    body = {"model": "tiny", "stream": True, "stream_options": options}
    for path in ("/v1/completions", "/v1/chat/completions"):
        async with front_of(*writing("It rains.", 1)) as front:
            answer = await front.post(path, json={**body, **BODIES[path]})
        assert all("usage" not in event for event in events_of(answer.content))


def cached_tokens(event: dict[str, Any]) -> int | None:
    usage = event.get("usage") or event.get("message", {}).get("usage")
    if usage is None:
        return None
    details = usage.get("prompt_tokens_details") or usage
    found: int = details.get("cached_tokens", details.get("cache_read_input_tokens"))
    return found


# Streamed and whole.

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": ["integer", "null"]}},
}
CALLS: list[Any] = [("weather", {"city": 'Oslo "{é}"\n漢', "days": 3}), ("time", {})]
OPTIONS = {
    f"{choice.value}{' one' * is_one}{' strict' * strict}{' raw' * (not splits)}": ParsingOptions(
        tools=(Tool("weather", SCHEMA, strict), Tool("time")),
        choice=choice,
        tool_name="weather" if choice is Choice.NAMED else "",
        one_tool_call=is_one,
        splits_reasoning=splits,
    )
    for choice in Choice
    for is_one in (False, True)
    for strict in (False, True)
    for splits in (True, False)
}
THOUGHT = {
    "harmony": "<|channel|>analysis<|message|>Hm {1}\n<|end|>",
    "harmony-role": "<|channel|>analysis<|message|>Hm {1}\n<|end|>",
}
TOKENIZER = special_tokenizer()


def answers_of(name: str, options: ParsingOptions) -> list[str]:
    """Outputs of a model: with calls, cut within the second one and within the thought, with a
    call in a thought that does not end, malformed, and with an unknown tool."""
    way = WRITTEN[name]
    calls = CALLS[:1] if options.one_tool_call or options.choice is Choice.NAMED else CALLS
    thought = THOUGHT.get(name, "<think>\nHm {1}\n</think>\n\n")
    written = way.write(calls, "I look." if way.takes_text else "")
    return [
        f"{thought}{written}",
        f"{thought}{written}"[:-15],
        f"{thought}{written}"[:20],
        written,
        f"<think>Hm.\n{written}",
        f"{thought}{written.replace(': 3', ': [3}')}",
        f"{thought}{way.write([('unknown', {'city': 'Oslo'}), *calls], '')} Done.\n",
        f"{thought}It <rains [in {{Oslo.\n",
    ]


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    places = [0, *sorted(cuts), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_parts_of_a_stream_are_those_of_the_whole(name, options):
    reasoning = "harmony" if "harmony" in name else "think"
    form = output_format(WRITTEN[name].format_name, reasoning, TOKENIZER)

    def parts_of(pieces: Sequence[str]) -> list[Part]:
        parser = form.parser(options)
        parts = [part for piece in pieces for part in parser.push(piece)]
        return joined([*parts, *parser.finish()])

    places = random.Random(3)
    for text in answers_of(name, options):
        whole = parts_of([text])
        cuts: Sequence[int] = range(1, len(text))
        if options not in (OPTIONS["auto"], OPTIONS["required"]):
            cuts = places.sample(cuts, 9)
        for cut in cuts:
            assert parts_of(pieces_of(text, [cut])) == whole, (text[:cut], text[cut:])
        assert parts_of(list(text)) == whole


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
@pytest.mark.parametrize("step", [5, *nightly([1])])  # 5: with each value of each option
async def test_streamed_answer_is_the_whole_answer(name, api, step):
    cuts = random.Random(7)
    reasoning = "harmony" if "harmony" in name else "think"
    form = output_format(WRITTEN[name].format_name, reasoning, TOKENIZER)
    for options in itertools.islice(OPTIONS.values(), 0, None, step):
        for text in answers_of(name, options):
            parser = form.parser(options)
            updates = [
                SequenceDelta(0, parts=parser.push(piece))
                for piece in pieces_of(text, cuts.sample(range(len(text)), 9))
            ]
            updates += [
                SequenceDelta(0, parts=parser.finish()),
                SequenceDelta(0, finish_reason="stop"),
            ]
            whole = await writer_of(api).whole(updates)
            writer = writer_of(api)
            stream = b"".join([writer.opening(), *map(writer.part, updates)])
            stream += await writer.closing()
            assert ADDED_UP[api](events_of(stream)) == SHOWN[api](whole), text


def writer_of(api: str) -> AnswerWriter:
    start = AnswerStart("r", "m", [Reader(0, 1)], True, defaults_over_http(NO_DEFAULTS), None)
    if api == "chat":
        shape = ChatShape(TokenBytes(TOKENIZER), is_parsed=True)
        return ChoiceWriter(ChatRequest(messages=[], stream=True), shape, start)
    if api == "messages":
        return MessageWriter(start)
    return ResponseWriter(ResponsesRequest(input="Hello."), Functions([]), None, start)


def chat_of_stream(events: list[dict[str, Any]]) -> Any:
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for choice in (choice for event in events for choice in event["choices"]):
        delta, reason = choice["delta"], choice["finish_reason"]
        for field in ("content", "reasoning_content"):
            message[field] += delta.get(field) or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message, reason


def chat_of_whole(answer: dict[str, Any]) -> Any:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = {field: message.get(field) or "" for field in ("content", "reasoning_content")}
    return {**texts, "tool_calls": calls}, choice["finish_reason"]


def message_of_stream(events: list[dict[str, Any]]) -> Any:
    blocks: list[dict[str, Any]] = []
    pieces: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            pieces = []
        elif event["type"] == "content_block_delta":
            for field, piece in event["delta"].items():
                if field == "partial_json":
                    pieces.append(piece)
                elif field != "type":
                    blocks[-1][field] += piece
        elif event["type"] == "content_block_stop" and pieces:
            blocks[-1]["input"] = input_of("".join(pieces))
    return blocks, events[-2]["delta"]["stop_reason"]


def input_of(written: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:  # a message that is whole has an object in its place
        return {"arguments": written}


def message_of_whole(answer: dict[str, Any]) -> Any:
    return answer["content"], answer["stop_reason"]


def response_of_stream(events: list[dict[str, Any]]) -> Any:
    deltas = {"response.output_text.delta", "response.reasoning_text.delta"}
    deltas.add("response.function_call_arguments.delta")
    texts: dict[int, str] = {}
    for event in events:
        if event["type"] in deltas:
            at = event["output_index"]
            texts[at] = texts.get(at, "") + event["delta"]
    response = events[-1]["response"]
    assert [texts.get(at, "") for at in range(len(response["output"]))] == list(
        texts_of_response(response)
    )
    return response_of_whole(response)


def texts_of_response(response: dict[str, Any]) -> Iterator[str]:
    for item in response["output"]:
        is_call = item["type"] == "function_call"
        yield item["arguments"] if is_call else item["content"][0]["text"]


def response_of_whole(response: dict[str, Any]) -> Any:
    # Each response has a random id, of which those of its items are made.
    items = [{**item, "id": item["id"].partition("_")[0]} for item in response["output"]]
    return items, response["status"]


ADDED_UP = {
    "chat": chat_of_stream,
    "messages": message_of_stream,
    "responses": response_of_stream,
}
SHOWN = {"chat": chat_of_whole, "messages": message_of_whole, "responses": response_of_whole}
