"""Budget of large requests: growth, order, and refusal where none could go on."""

import asyncio
import threading

import pytest

from baton.errors import OverloadedError
from baton.serving.bounds import Bounds
from baton.serving.grpc.large_messages import LargeMessages
from baton.serving.grpc.large_requests import LARGE_BYTES, LargeRequests, Share
from baton.v1 import inference_pb2 as pb
from tests.support.waiting import settled

KIB = 2**10


async def waits(task: asyncio.Task[None]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


async def test_budget_is_free_for_small_requests():
    requests = LargeRequests(LARGE_BYTES)
    with requests.share() as full, requests.share() as small:
        await full.grow(LARGE_BYTES + 1)
        await small.grow(LARGE_BYTES)
        assert small.num_bytes == 0


async def test_budget_grants_shares_in_order_of_arrival():
    requests = LargeRequests(500 * KIB)
    with requests.share() as second, requests.share() as third:
        with requests.share() as first:
            await first.grow(400 * KIB)
            growing = [asyncio.create_task(one.grow(200 * KIB)) for one in (second, third)]
            assert await waits(growing[0])
            assert await waits(growing[1])
        await asyncio.gather(*growing)
        assert second.num_bytes == third.num_bytes == 200 * KIB


async def test_budget_lets_a_request_alone_exceed_it():
    requests = LargeRequests(100 * KIB)
    with requests.share() as alone:
        await alone.grow(90 * KIB)
        await alone.grow(300 * KIB)
        assert alone.num_bytes == 300 * KIB


async def test_budget_refuses_last_of_shares_that_all_wait():
    requests = LargeRequests(400 * KIB)
    with requests.share() as first:
        await first.grow(200 * KIB)
        with requests.share() as last:
            await last.grow(150 * KIB)
            growing = asyncio.create_task(first.grow(300 * KIB))
            assert await waits(growing)
            with pytest.raises(OverloadedError) as caught:
                await last.grow(200 * KIB)
            assert caught.value.retry_after > 0
        await growing


async def test_budget_refuses_share_after_its_wait():
    requests = LargeRequests(400 * KIB, wait_seconds=0.05)
    with requests.share() as held, requests.share() as late:
        await held.grow(400 * KIB)
        with pytest.raises(OverloadedError, match="hold 409600 bytes; expected at most 409600"):
            await late.grow(100 * KIB)
        assert late.num_bytes == 0


async def test_budget_forgets_share_that_is_cancelled():
    requests = LargeRequests(400 * KIB)
    with requests.share() as held:
        await held.grow(400 * KIB)

        async def ask() -> None:
            with requests.share() as share:
                await share.grow(100 * KIB)

        task = asyncio.create_task(ask())
        assert await waits(task)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    with requests.share() as whole, requests.share() as other:
        await whole.grow(300 * KIB)
        await other.grow(100 * KIB)


async def test_large_requests_are_parsed_in_a_thread():
    requests = LargeRequests()
    assert await requests.parse("a", threading.current_thread) is not threading.current_thread()
    requests.close()


async def test_requests_are_parsed_in_turns_by_holder():
    requests, gate, order = LargeRequests(), threading.Event(), []
    parsing = [asyncio.create_task(requests.parse("many", gate.wait))]
    await settled()
    parsing += [asyncio.create_task(requests.parse("many", order.append, 1)) for _ in range(3)]
    await settled()
    await requests.parse("few", order.append, 0)
    assert order == [0]
    gate.set()
    await asyncio.gather(*parsing)
    assert order == [0, 1, 1, 1]
    requests.close()


async def test_large_messages_are_parsed_in_turns_by_tenant():
    requests, gate = LargeRequests(), threading.Event()
    bounds = Bounds(max_elements_of={}, max_elements=10, max_bytes=10**6)
    messages = LargeMessages(requests, bounds, holder_of=str)
    given = pb.GenerateRequest(text="a" * LARGE_BYTES)
    read = messages.deferring(pb.GenerateRequest.FromString)
    holding = asyncio.create_task(requests.parse("many", gate.wait))
    await settled()
    of_many = asyncio.create_task(messages.parse(read(given.SerializeToString()), "many"))
    await settled()
    assert await messages.parse(read(given.SerializeToString()), "few") == given
    assert not of_many.done()
    gate.set()
    assert await of_many == given
    assert await holding
    requests.close()


class ArrivingBodies:
    """Bodies that arrive, of several holders, and what became of each."""

    def __init__(self, budget_bytes: int) -> None:
        self.requests = LargeRequests(budget_bytes)
        self.shares: dict[str, Share] = {}
        self.ended: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._close = asyncio.Event()

    async def receive(self, *names: str, num_bytes: int) -> None:
        """Has bodies arrive of the holders whose letters the names begin with, up to so many bytes,
        and not end."""
        for name in names:
            self._tasks.append(asyncio.create_task(self._receive(name, num_bytes)))
            await settled()

    async def close(self) -> None:
        self._close.set()
        await asyncio.gather(*self._tasks)
        assert [share.num_bytes for share in self.shares.values()] == [0] * len(self.shares)
        self.requests.close()

    async def _receive(self, name: str, num_bytes: int) -> None:
        with self.requests.share(name[0]) as share:
            self.shares[name] = share
            try:
                async with share.receiving(60.0):
                    await share.grow(num_bytes)
                    await self._close.wait()
            except OverloadedError:
                self.ended.append(name)


async def test_budget_ends_newest_body_of_largest_holder():
    bodies = ArrivingBodies(500 * KIB)
    await bodies.receive("a0", "a1", "a2", num_bytes=120 * KIB)
    await bodies.receive("b0", num_bytes=100 * KIB)
    assert bodies.ended == []
    await bodies.receive("c0", num_bytes=100 * KIB)
    assert bodies.ended == ["a2"]
    await bodies.receive("c1", num_bytes=100 * KIB)
    assert bodies.ended == ["a2", "a1"]
    held = {name: share.num_bytes // KIB for name, share in bodies.shares.items()}
    assert held == {"a0": 120, "a1": 0, "a2": 0, "b0": 100, "c0": 100, "c1": 100}
    await bodies.close()


async def test_budget_ends_no_body_for_its_own_holder():
    bodies = ArrivingBodies(500 * KIB)
    await bodies.receive("a0", "a1", "a2", num_bytes=200 * KIB)
    assert [bodies.shares[name].num_bytes // KIB for name in ("a0", "a1", "a2")] == [200, 200, 0]
    assert bodies.ended == []
    await bodies.receive("b0", num_bytes=400 * KIB)  # it would have as much as the other
    assert bodies.ended == []
    await bodies.close()


async def test_budget_ends_no_request_that_is_whole():
    requests = LargeRequests(400 * KIB)
    with requests.share("b") as other:
        with requests.share("a") as whole:
            async with whole.receiving(60.0):
                await whole.grow(350 * KIB)
            growing = asyncio.create_task(other.grow(100 * KIB))
            assert await waits(growing)
            assert whole.num_bytes == 350 * KIB
        await growing


async def test_budget_grants_holder_with_least_first():
    requests, granted = LargeRequests(400 * KIB), []

    async def ask(holder: str) -> None:
        with requests.share(holder) as share:
            await share.grow(150 * KIB)
            granted.append(holder)

    with requests.share("a") as kept:
        await kept.grow(100 * KIB)
        with requests.share("a") as held:
            await held.grow(300 * KIB)
            asked = [asyncio.create_task(ask(holder)) for holder in "aab"]
            await settled()
            assert granted == []
        await asyncio.gather(*asked)
    assert granted == ["b", "a", "a"]


async def test_body_that_gave_way_does_not_grow():
    requests = LargeRequests(400 * KIB)
    with requests.share("a") as first, requests.share("b") as other:

        async def receive() -> None:
            async with first.receiving(60.0):
                await first.grow(400 * KIB)
                await other.grow(100 * KIB)
                with pytest.raises(OverloadedError):
                    await first.grow(500 * KIB)

        with pytest.raises(OverloadedError):
            await receive()
        assert (first.num_bytes, other.num_bytes) == (0, 100 * KIB)
