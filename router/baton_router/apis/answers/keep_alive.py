"""Keep-alive of a stream: a piece without content, which clients and proxies take for life."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from starlette.types import Send


class KeepAlive:
    """Keep-alive of one stream, while it is entered. A stream that has not begun after
    `max_silence` begins with the piece.

    Attributes:
        has_begun: its headers are sent.
        has_sent: something was sent since the last tick; set by the stream for each message, which
            is all that a token costs.

    Args:
        start: sends the headers; called once at most.
        piece: sent where the stream was silent for half of `max_silence` or longer.
        max_silence: seconds.
    """

    def __init__(
        self, send: Send, start: Callable[[], Awaitable[None]], piece: bytes, max_silence: float
    ) -> None:
        self.has_begun = False
        self.has_sent = True
        self._send = send
        self._start = start
        self._starting = asyncio.Lock()
        self._message = {"type": "http.response.body", "body": piece, "more_body": True}
        self._seconds = max_silence / 2
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._timer = self._loop.call_later(self._seconds, self.tick)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._timer is not None
        self._timer.cancel()
        async with self._starting:  # half-sent headers would neither be there nor not
            pass
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def begin(self) -> None:
        """Sends the headers, unless they are sent."""
        async with self._starting:  # nothing may be sent before them
            if not self.has_begun:
                await self._start()
                self.has_begun = True

    def tick(self) -> None:
        """Sends the piece if nothing was sent since the last tick; called by the timer."""
        # A client that does not read has enough to read.
        is_sending = self._sending is not None and not self._sending.done()
        if not (self.has_sent or is_sending):
            self._sending = asyncio.ensure_future(self._send_piece())
        self.has_sent = False
        self._timer = self._loop.call_later(self._seconds, self.tick)

    async def _send_piece(self) -> None:
        await self.begin()
        await self._send(self._message)
