"""Overhead of the HTTP front and of output parsing, per streamed token.

The same conversation is streamed over HTTP and over gRPC by one router, with tools and without, in
turns; the workers are scripted (`bench.router.router_worker`), and write a text without tool calls.
The cost is the CPU time that the router spends on a token: on few cores wall time measures the
client and the worker as well. Over gRPC a parsed token has its text twice, in the chunk and in its
part.

Two equal paths differ by 1 to 4 % in such a run, and a router that is slower by 2 us of anything
spends 5, because it reads its calls otherwise. Parsing's share is therefore measured apart, in a
loop from a worker's message to the bytes of a client's event, of a text with spaces and lines, and
set against a token over HTTP.
"""

import asyncio
import json
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from baton.cli.local.ports import free_port
from baton.cli.local.process import Process
from baton.cluster.redis.embedded import EmbeddedRedis
from baton.models import DEFAULT_MODEL, locate
from baton.sampling import NO_DEFAULTS, SamplingParams
from baton.v1 import decode_pb2, inference_pb2_grpc, sampling_pb2
from baton.v1 import inference_pb2 as pb
from baton_router.apis.answers.answer_writer import AnswerStart
from baton_router.apis.answers.sequence_reader import Reader
from baton_router.apis.openai.choice_formats import ChatShape
from baton_router.apis.openai.choice_writer import ChoiceWriter
from baton_router.apis.openai.schemas import ChatMessage, ChatRequest
from baton_router.call.output_format import ParsingOptions, Tool
from baton_router.call.request import Request
from baton_router.call.request_parsing import RequestParsing
from baton_router.lifecycle.answers.answer import Answer
from baton_router.lifecycle.worker_wire import event_of
from baton_router.text.model_card import read_model_card
from baton_router.text.output_parsing.formats.catalog import output_format
from baton_router.text.token_bytes import TokenBytes
from bench.report import Row, medians
from bench.router.router import MessagePath, child, cpu_of, read, shown, until_ready

NUM_STREAMS = 8
NUM_TOKENS = 500  # of a stream
NUM_ROUNDS = 4  # of each, in turns, to one measurement

_TOKENS_OF_ROUND = NUM_STREAMS * NUM_TOKENS

HTTP_AIM = 0.8
PARSING_AIM = 0.97

_QUESTION = "Write a function."
_TEXT = "def area(width, height):\n    return width * height\n\n" * 40
_CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content=_QUESTION)])
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
_FUNCTION = {"name": "get_weather", "parameters": _SCHEMA}
_TOOL = pb.Tool(name="get_weather", parameters_json_schema=json.dumps(_SCHEMA))
_PARSING = pb.OutputParsing(tools=[_TOOL], tool_choice=pb.TOOL_CHOICE_AUTO)
# The shipped model's own takes no tools.
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{% endif %}"


def run(repeats: int) -> list[Row]:
    """All paths, in turns."""
    port = free_port(set())
    http_port = free_port({port})
    with EmbeddedRedis() as redis, tempfile.TemporaryDirectory() as folder:
        model = Path(folder, DEFAULT_MODEL)
        shutil.copytree(locate(DEFAULT_MODEL), model)
        (model / "chat_template.jinja").write_text(_TEMPLATE)
        flags = {
            "redis_url": redis.url,
            "model": str(model),
            "coalesce_ms": 0,
            "conditional_disaggregation": False,
            "tool_call_parser": "hermes",
        }
        router = Process("router", "router", port, flags, http_port=http_port)
        try:
            router.start(Path(folder))
            return asyncio.run(_compare(redis.url, router, http_port, repeats))
        finally:
            router.signal(signal.SIGKILL)


async def _compare(redis_url: str, router: Process, http_port: int, repeats: int) -> list[Row]:
    async with (
        child("worker", redis_url) as (worker, _),
        grpc.aio.insecure_channel(router.endpoint) as channel,
    ):
        await worker.ask("pace 0")
        await worker.ask("gather 0")
        cpu = cpu_of(router)
        paths = {
            "gRPC": MessagePath(lambda n: _streamed(channel, n, chat=_CHAT), shown, cpu),
            "gRPC, parsed": MessagePath(
                lambda n: _streamed(channel, n, chat=_CHAT, parsing=_PARSING), shown, cpu
            ),
            "HTTP": MessagePath(lambda n: _events(http_port, n), int, cpu),
            "HTTP, parsed": MessagePath(lambda n: _events(http_port, n, has_tools=True), int, cpu),
        }
        for path in paths.values():
            await until_ready(path)
            await _round(path)  # as a warm-up
        micros: dict[str, list[float]] = {name: [] for name in paths}
        rate: dict[str, list[float]] = {name: [] for name in paths}
        for at in range(repeats * NUM_ROUNDS):
            for name in list(paths)[:: 1 if at % 2 else -1]:
                cpu_seconds, seconds = await _round(paths[name])
                micros[name].append(1e6 * cpu_seconds / _TOKENS_OF_ROUND)
                rate[name].append(_TOKENS_OF_ROUND / seconds)
    parsing = [_parsing_micros() for _ in range(repeats * NUM_ROUNDS)]
    return _rows(micros, rate, median(parsing))


def _parsing_micros() -> float:
    """Returns the CPU microseconds that parsing adds to the way of a token through the router."""
    card = read_model_card(locate(DEFAULT_MODEL))
    token_ids = card.tokenizer.encode(_TEXT, add_special_tokens=False).ids
    messages = [
        decode_pb2.DecodeGenerateResponse(
            tokens=decode_pb2.DecodeTokens(position=position, token_ids=[token_id])
        )
        for position, token_id in enumerate(token_ids)
    ]
    options = ParsingOptions(tools=(Tool("get_weather"),))
    parsing = RequestParsing(output_format("hermes", None, card.tokenizer), options)
    body = ChatRequest(messages=[ChatMessage("user", _QUESTION)], stream=True)
    params = SamplingParams(max_tokens=len(token_ids))
    seconds = []
    for its_parsing in (None, parsing):
        is_parsed = its_parsing is not None
        answer = Answer(Request("r", (1,), params, parsing=its_parsing), card, 0.0)
        reader = Reader(0, 1)
        shape = ChatShape(TokenBytes(card.tokenizer), is_parsed=is_parsed)
        writer = ChoiceWriter(
            body, shape, AnswerStart("r", "m", [reader], is_parsed, NO_DEFAULTS, None)
        )
        began = time.thread_time()
        for message in messages:
            for event in answer.on_event(event_of(message)):
                b"".join(map(writer.part, reader.read(event)))
        seconds.append(time.thread_time() - began)
    plain, parsed = seconds
    return 1e6 * (parsed - plain) / len(token_ids)


async def _round(path: MessagePath) -> tuple[float, float]:
    """Seconds of CPU, and of the clock, that streams at once take."""
    assert path.cpu is not None, "what is measured"
    before, began = float(await path.cpu()), time.perf_counter()
    await asyncio.gather(*(read(path, NUM_TOKENS) for _ in range(NUM_STREAMS)))
    elapsed = time.perf_counter() - began
    return float(await path.cpu()) - before, elapsed


def _streamed(channel: grpc.aio.Channel, num_tokens: int, **given: Any) -> Any:
    sampling = sampling_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    request = pb.GenerateRequest(sampling=sampling, **given)
    return inference_pb2_grpc.InferenceStub(channel).Generate(request)


async def _events(port: int, num_tokens: int, *, has_tools: bool = False) -> AsyncIterator[int]:
    """Yields the tokens of each event of a streamed conversation."""
    request = {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": _QUESTION}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    if has_tools:
        request["tools"] = [{"type": "function", "function": _FUNCTION}]
    body = json.dumps(request).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        async for line in reader:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                yield len(choices[0]["delta"].get("content") or "")
    finally:
        writer.close()


def _rows(
    micros: dict[str, list[float]], rate: dict[str, list[float]], parsing: float
) -> list[Row]:
    """Takes the figures of each round. What else the machine does changes faster than the
    differences are large, so ratios are medians of the ratios within a round."""
    typical = medians(micros)

    def cost(case: str, name: str, against: str, aim: float | None) -> Row:
        ratio = median(map(truediv, micros[against], micros[name]))
        return Row(case, typical[name], "us", against, typical[against], ratio, aim)

    rates, whole = medians(rate), typical["HTTP"]
    ratio = median(map(truediv, rate["HTTP"], rate["gRPC"]))
    case = f"{NUM_STREAMS} streams over HTTP"
    return [
        cost("token over HTTP", "HTTP", "gRPC", HTTP_AIM),
        Row(case, rates["HTTP"], "tokens/s", "gRPC", rates["gRPC"], ratio, None),
        Row("parsing's share", parsing, "us", "HTTP", whole, 1 - parsing / whole, PARSING_AIM),
        cost("token over HTTP, parsed", "HTTP, parsed", "HTTP", None),
        cost("token over gRPC, parsed", "gRPC, parsed", "gRPC", None),
    ]
