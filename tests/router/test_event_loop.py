import asyncio
import socket
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import grpc

from baton_router.event_loop import EventLoop

NUM_CALLS = 50


class _Watched(EventLoop):
    """Keeps the sockets that have readers."""

    def __init__(self):
        super().__init__()
        self.read = []

    def add_reader(self, fd, callback, *args):
        self.read.append(fd)
        super().add_reader(fd, callback, *args)


async def _echoes():
    """Returns the answers of many calls at once to a server of this loop."""

    async def echo(request, _context):
        return request

    method = grpc.unary_unary_rpc_method_handler(echo)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("test.Echo", {"Echo": method})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/test.Echo/Echo")
        answers = await asyncio.gather(*(call(b"%d" % i) for i in range(NUM_CALLS)))
    await server.stop(0)
    return answers


def _answers():
    """Returns the answers of many calls at once in a loop of the router, and what its reader of
    gRPC's wake-ups receives of three."""
    with asyncio.Runner(loop_factory=_Watched) as runner:
        answers = runner.run(_echoes())
        (of_grpc,) = {type(fd) for fd in runner.get_loop().read}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.__class__ = of_grpc
        theirs.send(b"111")
        return answers, ours.recv(1)


def test_event_loop_reads_wake_ups_of_grpc_at_once():
    # Of its own, since other event loops of a process lose wake-ups.
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        answers, received = process.submit(_answers).result(60)
    assert answers == [b"%d" % i for i in range(NUM_CALLS)]
    assert received == b"111"


def test_event_loop_leaves_other_sockets_alone():
    async def receive(ours, theirs):
        queue = asyncio.Queue()
        asyncio.get_running_loop().add_reader(ours, lambda: queue.put_nowait(ours.recv(1)))
        theirs.send(b"123")
        async with asyncio.timeout(10):
            received = [await queue.get() for _ in range(3)]
        asyncio.get_running_loop().remove_reader(ours)
        return received

    ours, theirs = socket.socketpair()
    with ours, theirs, asyncio.Runner(loop_factory=EventLoop) as runner:
        ours.setblocking(False)
        assert runner.run(receive(ours, theirs)) == [b"1", b"2", b"3"]
