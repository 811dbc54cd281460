"""Attacks of one tenant, from one address, on limits that it shares with others.

Each is an async context manager: the attack lasts as long as its block, which begins once it is
under way. As a program, one attack, until stdin is closed; it prints a line once it is under way:

    python -m bench.router.attacks NAME SIZE GRPC_ADDRESS HTTP_ADDRESS
"""

import asyncio
import io
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from subprocess import PIPE

import PIL.Image

from baton import AsyncClient, Image, Message, SamplingParams
from baton.errors import BatonError
from baton.sampling import Grammar, GrammarKind
from bench.router.stream_resets import attackers_again

TOKEN = "attacker"
SOURCE = "127.0.0.2"
# The preface of HTTP/2 with empty settings: a handshake without a call.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FLOW_SECONDS = 0.5
_UNDER_WAY = "under way"
_GENERATE = "/baton.v1.Inference/Generate"
_RESETTING_SOURCE = "127.0.0.3"
_RESETTING_SECONDS = 120.0  # at most
# Pause after a call that was refused, so that the attack does not measure its own client.
_PAUSE_SECONDS = 10.0
_PROMPT = "Once upon a time"
_LONG_TEXT = " ".join(str(number**2) for number in range(90_000))
# One less than the largest body.
_LARGE_BODY = b'{"user":"'.ljust(8 * 2**20 - 1, b"a")
_LARGE_SIDE = 8192  # pixels
_numbers = count()


@dataclass(frozen=True, slots=True)
class Attacked:
    """Addresses of a router: "host:port", and "http://host:port"."""

    address: str
    http_address: str


@asynccontextmanager
async def waiting_calls(cluster: Attacked, size: int) -> AsyncIterator[None]:
    """`size` calls at once, each repeated once it ends."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    async def call(client: AsyncClient) -> None:
        await client.generate(_PROMPT, params).token_ids()

    async with _repeated(cluster, size, call):
        yield


@asynccontextmanager
async def slow_grammars(cluster: Attacked, size: int) -> AsyncIterator[None]:
    """`size` calls at once, each with a grammar that takes too long, and always another."""

    async def call(client: AsyncClient) -> None:
        grammar = Grammar(GrammarKind.REGEX, f"({next(_numbers)}|[a-z]?{{10800}})")
        await client.generate(_PROMPT, SamplingParams(max_tokens=4, grammar=grammar)).token_ids()

    async with _repeated(cluster, size, call):
        yield


@asynccontextmanager
async def ambiguous_grammars(cluster: Attacked, size: int) -> AsyncIterator[None]:
    """`size` calls at once, each of 4 sequences under an ambiguous grammar behind a prefix."""

    async def call(client: AsyncClient) -> None:
        prefix = f"{'x' * 60}{next(_numbers)}"
        text = f'root ::= "{prefix}" s\ns ::= s s s | s s | "a" | "b" | s "c" s | ""'
        grammar = Grammar(GrammarKind.EBNF, text)
        params = SamplingParams(max_tokens=500, n=4, temperature=1.0, grammar=grammar)
        await client.generate(_PROMPT, params).token_ids()

    async with _repeated(cluster, size, call):
        yield


@asynccontextmanager
async def long_texts(cluster: Attacked, size: int) -> AsyncIterator[None]:
    """`size` calls at once, each with a text of almost 1 MiB to be tokenized."""

    async def call(client: AsyncClient) -> None:
        await client.tokenize(_LONG_TEXT)

    async with _repeated(cluster, size, call):
        yield


@asynccontextmanager
async def large_images(cluster: Attacked, size: int) -> AsyncIterator[None]:
    """`size` calls at once, each with another image of as many pixels as a router takes."""

    async def call(client: AsyncClient) -> None:
        image = Image(_large_image() + str(next(_numbers)).encode())
        await client.generate([Message("user", [image])], SamplingParams(max_tokens=1)).token_ids()

    async with _repeated(cluster, size, call):
        yield


@cache
def _large_image() -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (_LARGE_SIDE, _LARGE_SIDE), "white").save(file, "PNG")
    return file.getvalue()


@asynccontextmanager
async def idle_connections(cluster: Attacked, size: int) -> AsyncIterator[None]:
    """`size` gRPC connections without a call."""
    host, _, port = cluster.address.rpartition(":")
    with _connections(host, int(port), _PREFACE, size):
        await asyncio.sleep(_FLOW_SECONDS)
        yield


@asynccontextmanager
async def resetting_connections(cluster: Attacked, size: int) -> AsyncIterator[None]:
    """`size` gRPC connections that reset each call at once, opened again whenever they are dropped:
    from an address of their own, which the port then refuses."""
    port = int(cluster.address.rpartition(":")[2])
    with attackers_again(port, _GENERATE, size, _RESETTING_SECONDS, _RESETTING_SOURCE):
        await asyncio.sleep(_FLOW_SECONDS)
        yield


@asynccontextmanager
async def slow_bodies(cluster: Attacked, size: int) -> AsyncIterator[None]:
    """`size` HTTP connections in the middle of a body."""
    async with _bodies(cluster, size, 1000, b"{"):
        yield


@asynccontextmanager
async def large_bodies(cluster: Attacked, size: int) -> AsyncIterator[None]:
    """`size` HTTP connections with a body of 8 MiB that lacks its last byte."""
    async with _bodies(cluster, size, len(_LARGE_BODY) + 1, _LARGE_BODY):
        yield


@asynccontextmanager
async def _bodies(cluster: Attacked, size: int, num_bytes: int, sent: bytes) -> AsyncIterator[None]:
    """`size` HTTP connections with a body of so many bytes, of which some are sent."""
    host, _, port = cluster.http_address.rpartition("/")[2].rpartition(":")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {TOKEN}\r\n"
        f"content-type: application/json\r\ncontent-length: {num_bytes}\r\n\r\n"
    )
    with _connections(host, int(port), head.encode() + sent, size):
        await asyncio.sleep(_FLOW_SECONDS)
        yield


def _connections(host: str, port: int, first: bytes, size: int) -> ExitStack:
    """Opens connections that send `first`, and no more."""
    with ExitStack() as opened:
        for _ in range(size):
            connection = socket.create_connection((host, port), 10.0, (SOURCE, 0))
            opened.enter_context(connection)
            with suppress(OSError):  # one that is refused at once
                connection.sendall(first)
        return opened.pop_all()


@asynccontextmanager
async def _repeated(
    cluster: Attacked, size: int, call: Callable[[AsyncClient], Awaitable[None]]
) -> AsyncIterator[None]:
    async def repeat(client: AsyncClient) -> None:
        while True:
            try:
                await call(client)
            except BatonError:
                await asyncio.sleep(_PAUSE_SECONDS)

    async with AsyncClient(cluster.address, token=TOKEN) as client:
        tasks = [asyncio.create_task(repeat(client)) for _ in range(size)]
        try:
            await asyncio.sleep(_FLOW_SECONDS)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


ATTACKS = {
    attack.__name__: attack
    for attack in (
        waiting_calls,
        slow_grammars,
        ambiguous_grammars,
        long_texts,
        large_images,
        idle_connections,
        resetting_connections,
        slow_bodies,
        large_bodies,
    )
}


@contextmanager
def running(name: str, size: int, address: str, http_address: str) -> Iterator[None]:
    """Runs one of `ATTACKS` in a process of its own, for the length of the block."""
    command = [sys.executable, "-m", __name__, name, str(size), address, http_address]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == _UNDER_WAY + "\n", f"the attack {name} has ended"
            yield
        finally:
            process.stdin.close()


async def _main(name: str, size: str, address: str, http_address: str) -> None:
    async with ATTACKS[name](Attacked(address, http_address), int(size)):
        print(_UNDER_WAY, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
