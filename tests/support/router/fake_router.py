"""A router that plays back what the test gives, on a real socket."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from google.protobuf.duration_pb2 import Duration

from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.v1 import admin_pb2 as admin
from baton.v1 import inference_pb2 as pb
from baton.v1.admin_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from baton.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server


def accepted() -> pb.GenerateResponse:
    candidate = pb.PlacementCandidate(worker="d0", role=2, terms={"queue": 3.0}, excluded="")
    placement = pb.Placement(prefill_worker="p0", decode_worker="d0", candidates=[candidate])
    return pb.GenerateResponse(
        accepted=pb.Accepted(request_id="r-1", num_prompt_tokens=3, placement=placement)
    )


def tokens(position: int, token_ids: list[int], text: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        tokens=pb.TokenChunk(
            position=position, token_ids=token_ids, text=text, logprobs=[-0.5] * len(token_ids)
        )
    )


def finished() -> pb.GenerateResponse:
    return pb.GenerateResponse(
        finished=pb.Finished(
            reason=pb.FINISH_REASON_STOP_STRING,
            stop_string="\n",
            usage=pb.Usage(num_prompt_tokens=3, num_output_tokens=3, num_transferred_bytes=4096),
            timings=pb.Timings(admission=Duration(nanos=2_500_000), total=Duration(seconds=1)),
        )
    )


ANSWER = [accepted(), tokens(0, [5, 6], "Hel"), tokens(2, [7], "lo"), finished()]


def of(index: int, event: pb.GenerateResponse, **fields: object) -> pb.GenerateResponse:
    """The same event of another sequence, with these fields too."""
    part = getattr(event, event.WhichOneof("event"))
    part.MergeFrom(type(part)(sequence_index=index, **fields))
    return event


TWO = [
    accepted(),
    of(1, tokens(0, [5], "He")),
    of(0, tokens(0, [8], "Y")),
    of(1, tokens(1, [6], "y")),
    of(1, finished(), score=-0.5),
    of(0, tokens(1, [9], "o")),
    of(0, finished(), score=-0.25),
]


class FakeRouter(InferenceServicer, AdminServicer):
    """Answers `script`, whose exceptions it raises and whose None makes it wait for the end.

    Attributes:
        requests: what it was asked.
        ended: set when a generation is over, however it ended.
        known: the requests it can abort.
    """

    def __init__(self) -> None:
        self.script: list[pb.GenerateResponse | Exception | None] = list(ANSWER)
        self.requests: list[object] = []
        self.remaining: list[float | None] = []
        self.ended = threading.Event()
        self.known: tuple[str, ...] = ("r-1",)

    async def Generate(self, request, context):  # noqa: N802
        self.requests.append(request)
        self.remaining.append(context.time_remaining())
        try:
            for event in self.script:
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    await asyncio.sleep(60)
                yield event
        finally:
            self.ended.set()

    async def Tokenize(self, request, context):  # noqa: N802
        self.requests.append(request)
        return pb.TokenizeResponse(token_ids=[1, 2], text=request.text or "rendered")

    async def GetModel(self, request, context):  # noqa: N802
        return pb.GetModelResponse(
            name="tiny", vocab_size=256, max_model_len=64, eos_token_ids=[0], has_chat_template=True
        )

    async def ListWorkers(self, request, context):  # noqa: N802
        worker = admin.WorkerInfo(
            id="d0", role=2, endpoint="127.0.0.1:1", epoch=7, state=1, num_requests=2, version="1.3"
        )
        return admin.ListWorkersResponse(workers=[worker])

    async def Abort(self, request, context):  # noqa: N802
        if request.request_id not in self.known:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no request {request.request_id}")
        return admin.AbortResponse()

    async def GetLoad(self, request, context): ...  # noqa: N802

    async def Drain(self, request, context): ...  # noqa: N802

    async def FlushCache(self, request, context): ...  # noqa: N802


@contextmanager
def running(router: FakeRouter, port: int = 0) -> Iterator[str]:
    """Serves the router from a thread of its own. Yields its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> Server:
        server = Server(ServingSettings(port=port))
        server.add(add_InferenceServicer_to_server, router)
        server.add(add_AdminServicer_to_server, router)
        await server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield server.endpoint
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0.0), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
