"""The proxy of the tests, in front of a server that only listens."""

import asyncio
import contextlib
import socket

from tests.support.proxy import Link, Proxy


async def test_proxy_closes_a_connection_that_it_has_just_accepted():
    with socket.create_server(("127.0.0.1", 0)) as target:
        async with Proxy.on(Link(), target.getsockname()[1]) as proxy:
            for num_iterations in range(6):
                with socket.create_connection(("127.0.0.1", proxy.port), timeout=5.0) as connection:
                    for _ in range(num_iterations):
                        await asyncio.sleep(0.0)
                    await proxy.close()
                    with contextlib.suppress(ConnectionResetError):  # not accepted yet
                        assert connection.recv(1) == b""
                proxy.open()


async def test_proxy_ends_a_connection_when_its_server_has():
    with socket.create_server(("127.0.0.1", 0)) as target:
        async with Proxy.on(Link(), target.getsockname()[1]) as proxy:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            connection, _ = await asyncio.to_thread(target.accept)
            connection.close()
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 5.0) == b""
            writer.close()
