"""Starts remote peers (`remote_peer.py`), all forked from one process that has imported torch."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from baton.cli.local.fork_server import ForkedProcess, ForkServer
from tests.support.repository import ROOT

_MODULE = "tests.support.kvtransfer.remote_peer"

# For what has to begin.
TIMEOUT = 30.0


@dataclass
class RemotePeer:
    """The process of one side, and a line to it."""

    process: ForkedProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    about: Any = None

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    async def receive(self) -> Any:
        return json.loads(await asyncio.wait_for(self.reader.readline(), TIMEOUT))

    async def call(self, name: str, *arguments: Any) -> None:
        self.writer.write(json.dumps([name, *arguments]).encode() + b"\n")
        await self.writer.drain()
        assert await self.receive() == "done"

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    async def end(self) -> None:
        """Returns once it has been reaped."""
        await asyncio.to_thread(self.process.wait, TIMEOUT)


class RemotePeers:
    """Fork server of remote peers. The sockets of their lines are in `folder`."""

    def __init__(self, folder: Path) -> None:
        with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
            self._server = ForkServer([_MODULE])
        self._folder = folder
        self._log = open(2, "wb", closefd=False)  # noqa: SIM115 - whatever is standard error by then
        self._num_started = 0

    @asynccontextmanager
    async def __call__(self, role: str) -> AsyncIterator[RemotePeer]:
        """A "source" or "claimant" with the environment of this moment, killed in the end."""
        self._num_started += 1
        path = str(self._folder / str(self._num_started))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            listener.setblocking(False)
            process = self._server.start(_MODULE, [role, path], dict(os.environ), self._log)
            try:
                accepting = asyncio.get_running_loop().sock_accept(listener)
                line, _ = await asyncio.wait_for(accepting, TIMEOUT)
                side = RemotePeer(process, *await asyncio.open_unix_connection(sock=line))
                side.about = await side.receive()
                yield side
                side.writer.close()
            finally:
                process.send_signal(signal.SIGKILL)
                await asyncio.to_thread(process.wait, TIMEOUT)

    def close(self) -> None:
        self._server.close()
