import asyncio
import logging

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import errors
from baton.v1 import inference_pb2 as pb
from tests.support.failures import failure_of, status_of
from tests.support.serving.fakes import chunk, serving


async def drained(call) -> list[str]:
    return [response.tokens.text async for response in call]


async def test_interceptor_passes_unary_error_with_details():
    async def get_model(request, context):
        raise errors.OverloadedError("full", retry_after=1.5)

    async with serving(get_model=get_model) as running:
        error = await failure_of(running.inference.GetModel(pb.GetModelRequest()))
    assert (type(error), error.retry_after) == (errors.OverloadedError, 1.5)


async def test_interceptor_sends_stream_error_after_sent_messages():
    async def generate(request, context):
        yield chunk("a")
        raise errors.InvalidArgumentError("text", "is bad")

    async with serving(generate) as running:
        call = running.inference.Generate(pb.GenerateRequest())
        assert (await call.read()).tokens.text == "a"
        error = await failure_of(call.read())
    assert (error.field, error.problem) == ("text", "is bad")


async def test_interceptor_logs_unexpected_exception_without_leak(caplog):
    async def generate(request, context):
        raise ValueError("the secret")
        yield

    async with serving(generate) as running:
        with caplog.at_level(logging.ERROR):
            error = await status_of(running.inference.Generate(pb.GenerateRequest()).read())
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(error.details()) + str(error.trailing_metadata())
    assert "the secret" in caplog.text
    assert "/baton.v1.Inference/Generate" in caplog.text


async def test_interceptor_leaves_handler_abort_untouched():
    async def get_model(request, context):
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "mine")

    async with serving(get_model=get_model) as running:
        error = await status_of(running.inference.GetModel(pb.GetModelRequest()))
    assert (error.code(), error.details()) == (grpc.StatusCode.OUT_OF_RANGE, "mine")


async def test_server_reports_unknown_call_as_unimplemented():
    async with serving() as running:
        error = await status_of(running.inference.Tokenize(pb.TokenizeRequest()))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_interceptor_passes_error_of_upstream_call():
    async def refuse(request, context):
        raise errors.FailedPreconditionError("layouts differ")

    async with serving(get_model=refuse) as worker:

        async def forward(request, context):
            return await worker.inference.GetModel(request)

        async with serving(get_model=forward) as router:
            error = await failure_of(router.inference.GetModel(pb.GetModelRequest()))
    assert type(error) is errors.FailedPreconditionError
    assert str(error) == "layouts differ"


async def test_interceptor_closes_generator_when_call_is_cancelled():
    ended = asyncio.get_running_loop().create_future()

    async def generate(request, context):
        try:
            while True:
                yield chunk("a")
                await asyncio.sleep(0.01)
        except BaseException as error:
            ended.set_result(type(error))
            raise

    async with serving(generate) as running:
        call = running.inference.Generate(pb.GenerateRequest())
        await call.read()
        call.cancel()
        kind = await asyncio.wait_for(ended, 1.0)
        await asyncio.wait_for(running.server._in_flight.wait_idle(), 1.0)
    assert kind in (asyncio.CancelledError, GeneratorExit)


async def test_health_can_be_watched_through_the_interceptors():
    async with serving() as running:
        stub = health_pb2_grpc.HealthStub(running.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await running.server.set_ready(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert running.server.num_calls == 0
        watch.cancel()


async def test_interceptor_keeps_order_of_concurrent_streams():
    async def generate(request, context):
        for i in range(20):
            yield chunk(f"{request.text}{i}")

    async with serving(generate) as running:
        calls = [running.inference.Generate(pb.GenerateRequest(text=t)) for t in "abcdefgh"]
        answers = await asyncio.gather(*map(drained, calls))
    assert answers == [[f"{t}{i}" for i in range(20)] for t in "abcdefgh"]


async def test_interceptor_logs_no_end_of_an_engine_for_each_call(caplog):
    async def generate(request, context):
        raise errors.EngineFailedError("the engine failed")
        yield

    async with serving(generate) as running:
        call = running.inference.Generate(pb.GenerateRequest())
        error = await failure_of(call.read())
    assert isinstance(error, errors.EngineFailedError)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
