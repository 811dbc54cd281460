import asyncio

import pytest

from baton.errors import DeadlineExceededError
from baton.serving.deadline import Deadline
from baton.v1 import inference_pb2 as pb
from tests.support.clock import Clock
from tests.support.serving.fakes import serving


class Call:
    def __init__(self, remaining: float | None) -> None:
        self._remaining = remaining

    def time_remaining(self) -> float | None:
        return self._remaining


def test_deadline_is_limit_of_call_or_default():
    clock = Clock(100.0)
    assert Deadline.of(Call(3.0), default=60.0, clock=clock).remaining() == 3.0
    assert Deadline.of(Call(None), default=60.0, clock=clock).remaining() == 60.0


def test_deadline_runs_down_to_zero():
    clock = Clock(100.0)
    deadline = Deadline.after(2.0, clock)
    clock.now += 1.5
    assert (deadline.remaining(), deadline.expired) == (0.5, False)
    clock.now += 1.5
    assert (deadline.remaining(), deadline.expired) == (0.0, True)


async def test_deadline_limits_block_and_says_so():
    with pytest.raises(DeadlineExceededError, match="the request's deadline has passed"):
        async with Deadline.after(0.01).limit():
            await asyncio.Event().wait()
    async with Deadline.after(0.01).limit(grace=10.0):
        await asyncio.sleep(0.05)


async def test_deadline_passes_on_timeout_of_its_block():
    with pytest.raises(TimeoutError, match="of its own"):
        async with Deadline.after(10.0).limit():
            raise TimeoutError("of its own")


def test_deadline_forwards_rest_less_margin():
    assert Deadline.after(2.0, Clock(100.0)).forward(margin=0.5) == 1.5


def test_deadline_forwards_positive_time_within_margin():
    assert 0 < Deadline.after(0.01, Clock(100.0)).forward(margin=0.05) <= 0.01


def test_deadline_forwards_nothing_after_expiry():
    deadline = Deadline.after(0.0, Clock(100.0))
    with pytest.raises(DeadlineExceededError):
        deadline.forward()
    with pytest.raises(DeadlineExceededError):
        deadline.check()


async def test_deadline_reads_limit_of_real_call():
    seen: asyncio.Queue[float] = asyncio.Queue()

    async def get_model(request, context):
        seen.put_nowait(Deadline.of(context, default=3000.0).remaining())
        return pb.GetModelResponse()

    async with serving(get_model=get_model) as running:
        await running.inference.GetModel(pb.GetModelRequest(), timeout=500.0)
        await running.inference.GetModel(pb.GetModelRequest())
    # gRPC rounds up what it sends by a percent or so; a call may wait for a busy machine.
    assert await seen.get() == pytest.approx(500.0, rel=0.1)
    assert await seen.get() == pytest.approx(3000.0, rel=0.1)
