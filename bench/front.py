"""Overhead of the HTTP front and of output parsing, per streamed token.

The same conversation is streamed over HTTP and over gRPC by one router, with tools and without, in
turns; the workers are scripted (`bench.router_worker`), and write a text without tool calls. The
cost is the CPU time that the router spends on a token: on few cores wall time measures the client
and the worker as well. Over gRPC a parsed token has its text twice, in the chunk and in its part.
"""

import asyncio
import json
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from baton.cli.ports import free_port
from baton.cli.process import Process
from baton.cluster.embedded import EmbeddedRedis
from baton.models import DEFAULT_MODEL, locate
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc, sampling_pb2
from bench.report import Row, medians
from bench.router import MessagePath, child, cpu_of, read, shown, until_ready

NUM_STREAMS = 8
NUM_TOKENS = 500  # of a stream
NUM_ROUNDS = 4  # of each, in turns, to one measurement: what else the machine does changes faster

HTTP_AIM = 0.8
PARSING_AIM = 0.97

_QUESTION = "Write a function."
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
        for _ in range(repeats):
            for name, (one, per_second) in (await _measure(paths)).items():
                micros[name].append(one)
                rate[name].append(per_second)
    return _rows(medians(micros), medians(rate))


async def _measure(paths: dict[str, MessagePath]) -> dict[str, tuple[float, float]]:
    """Microseconds of CPU that a token takes, and tokens per second, of each."""
    cpu, elapsed = dict.fromkeys(paths, 0.0), dict.fromkeys(paths, 0.0)
    for i in range(NUM_ROUNDS):
        for name in list(paths)[:: 1 if i % 2 else -1]:
            took = await _round(paths[name])
            cpu[name], elapsed[name] = cpu[name] + took[0], elapsed[name] + took[1]
    total = NUM_ROUNDS * NUM_STREAMS * NUM_TOKENS
    return {name: (1e6 * cpu[name] / total, total / elapsed[name]) for name in paths}


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


def _rows(micros: dict[str, float], rate: dict[str, float]) -> list[Row]:
    def cost(case: str, name: str, against: str, aim: float | None) -> Row:
        ratio = micros[against] / micros[name]
        return Row(case, micros[name], "us", against, micros[against], ratio, aim)

    ratio = rate["HTTP"] / rate["gRPC"]
    case = f"{NUM_STREAMS} streams over HTTP"
    return [
        cost("token over HTTP", "HTTP", "gRPC", HTTP_AIM),
        Row(case, rate["HTTP"], "tokens/s", "gRPC", rate["gRPC"], ratio, None),
        cost("token over HTTP, parsed", "HTTP, parsed", "HTTP", PARSING_AIM),
        cost("token over gRPC, parsed", "gRPC, parsed", "gRPC", None),
    ]
