"""HTTP server of the page whose answers a test writes, delta by delta, on a real socket."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from baton_router.apis.page.page import page_response

Json = dict[str, Any]

TINY = {"id": "tiny", "max_model_len": 2048, "has_chat_template": True}
TIMELINE = {
    "request_id": "r",
    "seconds": {
        "admission": 0.001,
        "prefill_started": 0.004,
        "time_to_first_token": 0.05,
        "handed_over": 0.06,
        "total": 0.4,
    },
    "usage": {"num_prompt_tokens": 12, "num_output_tokens": 30},
    "prefill_worker": "prefill-0",
    "decode_worker": "decode-0",
    "prefix_source": "",
    "reason": "prefill-0 with decode-0 cost 45.1 ms. The only other choice: decode-0 alone, "
    "7 ms more (stall +9 ms, last request -2 ms).",
    "candidates": [
        {
            "worker": "prefill-0",
            "role": "prefill",
            "computes_prompt": True,
            "num_cached_tokens": 0,
            "terms": {"uncached": 0.04, "congestion": 0.005},
            "excluded": "",
        },
        {
            "worker": "decode-0",
            "role": "decode",
            "computes_prompt": False,
            "num_cached_tokens": 0,
            "terms": {"transfer": 0.0001},
            "excluded": "",
        },
    ],
}


class ScriptedRouter:
    """Answers each request with the next of `answers`, a list of deltas.

    Attributes:
        answers: the deltas of the answers to come; an empty answer to all that follow.
        requests: the bodies of the requests, in order.
        models: the served models, as `/v1/models` lists them.
        api_key: required in the header `authorization`, unless it is empty.
        proceed: clear it to hold answers before their end.
        is_cut: answers end without their end said.
        reason: finish reason of answers.
    """

    def __init__(self) -> None:
        self.answers: list[list[Json]]
        self.requests: list[Json]
        self.models: list[Json]
        self.api_key: str
        self.is_cut: bool
        self.reason: str
        self.proceed = threading.Event()
        self.address = ""
        self.reset()

    def reset(self) -> None:
        """Forgets what earlier tests have set."""
        self.answers, self.requests, self.models = [], [], [TINY]
        self.api_key, self.is_cut, self.reason = "", False, "stop"
        self.proceed.set()

    async def page(self, request: Request) -> Response:
        return page_response(request)

    async def list_models(self, request: Request) -> Response:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": {"message": "no such token"}}, status_code=401)
        return JSONResponse({"object": "list", "data": self.models})

    async def chat(self, request: Request) -> Response:
        self.requests.append(await request.json())
        deltas = self.answers.pop(0) if self.answers else []
        return StreamingResponse(self._events(deltas), media_type="text/event-stream")

    async def _events(self, deltas: list[Json]) -> AsyncIterator[str]:
        for delta in deltas:
            yield _event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        await asyncio.to_thread(self.proceed.wait, 60)
        if self.is_cut:
            return
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": self.reason}]})
        yield _event({"choices": [], "baton": {"requests": [TIMELINE]}})
        yield "data: [DONE]\n\n"


def _event(data: Json) -> str:
    return f"data: {json.dumps(data)}\n\n"


@contextmanager
def scripted_router() -> Iterator[ScriptedRouter]:
    router = ScriptedRouter()
    routes = [
        Route("/", router.page),
        Route("/v1/models", router.list_models),
        Route("/v1/chat/completions", router.chat, methods=["POST"]),
        Route("/v1/completions", router.chat, methods=["POST"]),
    ]
    config = uvicorn.Config(
        Starlette(routes=routes), host="127.0.0.1", port=0, log_level="warning", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    (port,) = [s.getsockname()[1] for one in server.servers for s in one.sockets]
    router.address = f"http://127.0.0.1:{port}"
    yield router
    server.should_exit = True
    thread.join()
