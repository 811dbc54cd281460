"""The connection on which blocks come is cut, one way or both, or damages them: the call ends with
a typed error, and blocks, leases, tasks and descriptors are back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import psutil
import pytest

from baton.errors import BatonError, DataLossError, UnavailableError
from baton.models import locate
from baton.rpc.errors import error_of
from baton.sampling import SamplingParams
from tests.support.proxy import (
    Damage,
    Link,
    Proxy,
    corrupted,
    duplicated,
    ended,
    once,
    reordered,
    truncated,
)
from tests.support.worker.pair import TIMEOUT, Answer, Pair, pair_of, rest_of
from tests.support.worker.reference import alone, prompt_of

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@asynccontextmanager
async def wired() -> AsyncIterator[tuple[Pair, Link]]:
    """Both workers, and the link on which the one fetches from the other; chunk by chunk."""
    flags = {"kv_connector": "grpc", "prefix_caching": False}
    prefill = {"max_num_batched_tokens": 16}
    async with pair_of("tiny", prefill=prefill, **flags) as pair:
        link = Link()
        async with Proxy.on(link, pair.prefill.server.kv.port) as proxy:
            pair.proxy = proxy  # type: ignore[attr-defined]
            pair.wire = f"127.0.0.1:{proxy.port}"  # type: ignore[attr-defined]
            yield pair, link


async def begun(pair: Pair, prompt: list[int]) -> tuple[Any, Any]:
    """Both calls of a handoff over the wire, as the router makes them."""
    to_prefill = pair.prefill_request(prompt, GREEDY)
    to_decode = pair.decode_request(prompt, GREEDY, to_prefill.lease_id)
    to_decode.handle.source_endpoint = pair.wire  # type: ignore[attr-defined]
    decoding = pair.to_decode.Generate(to_decode, timeout=TIMEOUT)
    await decoding.read()
    return pair.to_prefill.Prefill(to_prefill, timeout=TIMEOUT), decoding


async def handed_over(pair: Pair, prompt: list[int]) -> list[list[int]]:
    prefilling, decoding = await begun(pair, prompt)
    answer = Answer(await rest_of(prefilling), await rest_of(decoding))
    return [output.token_ids for output in answer.outputs]


async def handoff_failure(pair: Pair, prompt: list[int], after: Any) -> BatonError:
    """Returns the decode worker's error in a handoff; the router then ends the other call."""
    prefilling, decoding = await begun(pair, prompt)
    await prefilling.read()
    await after()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest_of(decoding)
    prefilling.cancel()
    return error_of(caught.value)


def held() -> tuple[int, int]:
    """Tasks of both workers, whose event loop is this one, and descriptors."""
    return len(asyncio.all_tasks()), psutil.Process().num_fds()


async def until_back(pair: Pair, before: tuple[int, int]) -> None:
    """Connections that were begun during the cut take a moment to be given up."""
    await pair.nothing_held(within=5.0)
    for _ in range(750):
        if all(now <= then for now, then in zip(held(), before, strict=True)):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(
        f"(tasks, descriptors) are {held()}, and were {before}: {asyncio.all_tasks()}"
    )


@pytest.mark.parametrize("directions", [("there",), ("back",), ("there", "back")])
async def test_handoff_fails_within_silence_bound_when_link_is_cut(directions):
    prompt = prompt_of(500)
    (expected,) = alone(locate("tiny"), [prompt], GREEDY)
    async with wired() as (pair, link):
        assert await handed_over(pair, prompt) == expected
        before = held()

        async def cut() -> None:
            for direction in directions:
                getattr(link, direction).is_cut = True

        # Noticed by silence, and not by the deadline, which is far.
        assert isinstance(await handoff_failure(pair, prompt, cut), UnavailableError)
        link.there.is_cut = link.back.is_cut = False
        await until_back(pair, before)
        assert await handed_over(pair, prompt) == expected
        await until_back(pair, before)


DAMAGES: dict[str, Damage] = {
    "corrupted": corrupted,
    "truncated": truncated,
    "reordered": reordered,
    "duplicated": duplicated,
    "ended": ended,
}


@pytest.mark.parametrize("name", DAMAGES)
async def test_handoff_fails_with_typed_error_when_link_damages_blocks(name):
    prompt = prompt_of(500)
    (expected,) = alone(locate("tiny"), [prompt], GREEDY)
    async with wired() as (pair, link):
        assert await handed_over(pair, prompt) == expected
        before = held()

        async def damage() -> None:
            link.back.damage = once(DAMAGES[name])

        failure = await handoff_failure(pair, prompt, damage)
        assert isinstance(failure, UnavailableError | DataLossError), failure
        assert link.back.num_damaged == 1
        link.back.damage = None
        # A stream that lacks bytes has lost its frames, which HTTP/2 may notice in a later call.
        pair.proxy.drop_connections()
        await until_back(pair, before)
        assert await handed_over(pair, prompt) == expected
