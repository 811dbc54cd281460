"""TCP listener with TLS handshakes that are bounded in time and number.

asyncio's own server has no limit of handshakes, and a connection is seen by the rest of the HTTP
server only after its handshake.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

logger = logging.getLogger(__name__)

# Seconds without accepting after the process has run out of descriptors.
_BACKOFF_SECONDS = 1.0


class Listener:
    """Listener of an HTTP server.

    Args:
        listening: bound and listening.
        new_protocol: makes the protocol of a connection whose handshake is complete.
        context: None: no TLS.
        handshake_seconds: timeout of a TLS handshake.
        max_handshakes: maximum handshakes in progress; beyond it the oldest is dropped.
    """

    def __init__(
        self,
        listening: socket.socket,
        new_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        handshake_seconds: float,
        max_handshakes: int,
    ) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._new_protocol = new_protocol
        self._context = context
        self._handshake_seconds = handshake_seconds
        self._max_handshakes = max_handshakes
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Stops accepting, and drops the handshakes in progress."""
        self._accepting.cancel()
        for handshake in self._handshakes:
            handshake.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)
        self._listening.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except OSError as error:
                logger.warning("cannot accept HTTP connections: %s", error.strerror)
                await asyncio.sleep(_BACKOFF_SECONDS)
                continue
            if len(self._handshakes) >= self._max_handshakes:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
            handshake = asyncio.create_task(self._open(connection))
            self._handshakes[handshake] = None
            handshake.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _open(self, connection: socket.socket) -> None:
        timeout = None if self._context is None else self._handshake_seconds
        with contextlib.suppress(OSError):  # as are ssl.SSLError and that of the timeout
            await asyncio.get_running_loop().connect_accepted_socket(
                self._new_protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=timeout,
            )
