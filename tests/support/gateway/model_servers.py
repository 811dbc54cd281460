"""Model servers of others, as an endpoint picker's gateway has them behind it."""

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class ModelServer:
    """HTTP server on loopback that answers every path with its address and what it was sent.

    Attributes:
        status: of its answers.
        metrics: text at /metrics.
        gap: seconds between two events of a streamed answer.
        num_requests: answered so far, without those for metrics.
    """

    status: int = 200
    metrics: str = ""
    gap: float = 0.02
    num_requests: int = 0
    address: str = ""
    headers: list[dict[str, str]] = field(default_factory=list)

    def app(self) -> Starlette:
        methods = ["GET", "POST"]
        return Starlette(
            routes=[
                Route("/metrics", self._metrics),
                Route("/{path:path}", self._answer, methods=methods),
            ]
        )

    async def _metrics(self, _: Request) -> Response:
        return PlainTextResponse(self.metrics)

    async def _answer(self, request: Request) -> Response:
        self.num_requests += 1
        self.headers.append(dict(request.headers))
        body = await request.body()
        headers = {"x-served-by": self.address}
        fields = (
            json.loads(body) if request.headers.get("content-type") == "application/json" else {}
        )
        if fields.get("stream"):
            return StreamingResponse(
                self._events(), headers=headers, media_type="text/event-stream"
            )
        told = {
            "address": self.address,
            "num_bytes": len(body),
            "sha256": hashlib.sha256(body).hexdigest(),
            "destination": request.headers.get("x-gateway-destination-endpoint"),
        }
        return JSONResponse(told, self.status, headers)

    async def _events(self):
        for index in range(10):
            yield f"data: {index} {self.address}\n\n"
            await asyncio.sleep(self.gap)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def serving(server: ModelServer, port: int = 0) -> Iterator[ModelServer]:
    """The server, answering in a thread; on `port` again if it was there before."""
    config = uvicorn.Config(
        server.app(), port=port, log_level="critical", lifespan="off", ws="none",
        timeout_graceful_shutdown=0,
    )  # fmt: skip
    running = _Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not running.started:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    host, chosen = running.servers[0].sockets[0].getsockname()
    server.address = f"{host}:{chosen}"
    try:
        yield server
    finally:
        running.should_exit = running.force_exit = True
        thread.join(10)
