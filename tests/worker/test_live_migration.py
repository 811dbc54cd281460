"""A sequence that stops on one decode worker and goes on, with its KV, on another one."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baton.errors import AlreadyExistsError, BatonError, InvalidArgumentError, NotFoundError
from baton.rpc.errors import error_of
from baton.sampling import Grammar, GrammarKind, SamplingParams
from baton.v1 import decode_pb2
from tests.support.worker.crew import Crew, Member, crew_of, new_lease_id, tokens_of
from tests.support.worker.pair import TIMEOUT, rest_of
from tests.support.worker.reference import alone, prompt_of

GREEDY = SamplingParams(max_tokens=150, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=7)
WAYS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalties": replace(SEEDED, repetition_penalty=1.2, presence_penalty=0.5, min_tokens=120),
    "grammar": replace(
        SEEDED, grammar=Grammar(GrammarKind.REGEX, "([a-z]{3,9} ){60}"), ignore_eos=False
    ),
    "logprobs": replace(SEEDED, logprobs=True, top_logprobs=2),
}


async def read_tokens(call: Any, count: int) -> list[Any]:
    """The messages of a call until so many tokens have come."""
    events: list[Any] = []
    while len(tokens_of(events)) < count:
        events.append(await call.read())
    return events


def order(name: str, claimant: str, **fields: Any) -> decode_pb2.HandOverRequest:
    fields = {"lease_id": new_lease_id(), **fields}
    return decode_pb2.HandOverRequest(request_id=name, claimant=claimant, **fields)


async def stopped(call: Any, events: list[Any]) -> int:
    """Reads on until the sequence has stopped; the tokens whose KV can be fetched."""
    while not events or not events[-1].HasField("suspended"):
        message = await call.read()
        assert message is not grpc.aio.EOF, "it ended before it stopped"
        events.append(message)
    return int(events[-1].suspended.num_tokens)


async def moved(
    crew: Crew, prompt: list[int], params: SamplingParams, *, at: int = 5
) -> tuple[list[int], list[int]]:
    """Returns what the first worker says to a prompt until its hand-over, then the second."""
    giver, taker = crew.members
    call, name = giver.to_decode(prompt, params)
    events = await read_tokens(call, at)
    request = order(name, taker.id)
    await giver.decode.HandOver(request, timeout=TIMEOUT)
    num_tokens = await stopped(call, events)
    said = tokens_of(events)
    assert num_tokens == len(prompt) + len(said) - 1
    assert events[-1].suspended.lease_id == request.lease_id
    handle = giver.handle(request.lease_id, num_tokens)
    going_on, _ = taker.to_decode(prompt, params, tuple(said[:-1]), handle)
    rest = await rest_of(going_on)
    assert [e.WhichOneof("event") for e in rest[:2]] == ["admitted", "kv_ready"]
    assert [e.WhichOneof("event") for e in await rest_of(call)] == ["released"]
    last = tokens_of(rest)
    assert last[0] == said[-1]  # told again, in case the one before has died since
    return said, last[1:]


@pytest.mark.parametrize(
    ("family", "connector"),
    [
        ("llama", "grpc"),
        ("mistral_short", "auto"),
        ("gemma3", "auto"),
        *(
            pytest.param(*kind, marks=pytest.mark.slow)
            for kind in (
                ("qwen2_hybrid", "auto"),
                ("gpt_oss", "grpc"),
                ("deepseek_v3", "auto"),
                ("llama", "nixl"),
                ("gemma3", "nixl"),
            )
        ),
    ],
)
async def test_live_migration_moves_every_kind_of_cache(checkpoint, family, connector):
    model, places = checkpoint(family), {1: 1, 30: 3, 61: 40}
    prompts = {length: prompt_of(length) for length in places}
    expected = alone(model, list(prompts.values()), GREEDY)
    async with crew_of(model, "decode", "decode", kv_connector=connector) as crew:
        for (length, at), (undisturbed,) in zip(places.items(), expected, strict=True):
            before = crew.members[1].num_computed_tokens
            said, rest = await moved(crew, prompts[length], GREEDY, at=at)
            assert said + rest == undisturbed
            assert len(rest) > 0
            assert crew.members[1].num_computed_tokens - before == len(rest)


@pytest.mark.slow  # without drafts: test_sampling_modes.py
@pytest.mark.parametrize("way", WAYS)
async def test_live_migration_resumes_every_sampling_mode_with_drafts(checkpoint, way):
    model, params = checkpoint("tiny"), WAYS[way]
    prompt = [6, 7, 8, 9] * 5
    (undisturbed,) = alone(model, [prompt], params)[0]
    async with crew_of(model, "decode", "decode", max_drafts=4) as crew:
        said, rest = await moved(crew, prompt, params, at=20)
        assert said + rest == undisturbed


async def test_live_migration_skips_held_blocks_and_caches_moved_ones(checkpoint):
    model, prompt = checkpoint("llama"), prompt_of(64)
    async with crew_of(model, "decode", "decode") as crew:
        taker = crew.members[1]
        await taker.answer(prompt, replace(GREEDY, max_tokens=1))
        before = taker.num_computed_tokens
        said, rest = await moved(crew, prompt, GREEDY)
        assert taker.num_computed_tokens - before == len(rest)
        before = taker.num_computed_tokens
        await taker.answer([*prompt, *said, *rest][:200], replace(GREEDY, max_tokens=1))
        assert taker.num_computed_tokens - before == 200 - 192


@pytest.mark.parametrize("ahead", [False, True])
async def test_live_migration_moves_many_sequences_at_once(checkpoint, ahead):
    """Also where steps are launched before the tokens of those before them are known."""
    model, prompts = checkpoint("gemma3"), [prompt_of(5 + 9 * i, seed=i) for i in range(8)]
    expected = alone(model, prompts, GREEDY)
    async with crew_of(model, "decode", "decode", async_scheduling=ahead) as crew:
        parts = await asyncio.gather(*(moved(crew, prompt, GREEDY) for prompt in prompts))
        assert [[said + rest] for said, rest in parts] == expected


async def test_draining_worker_migrates_or_finishes_its_requests(checkpoint):
    model, prompt = checkpoint("llama"), prompt_of(20)
    several = replace(SEEDED, n=2)
    async with crew_of(model, "decode", "decode") as crew:
        giver, taker = crew.members
        (undisturbed,) = alone(model, [prompt], GREEDY)[0]
        call, name = giver.to_decode(prompt, GREEDY)
        other, other_name = giver.to_decode(prompt, several)
        events = await read_tokens(call, 3)
        await giver.membership.drain()
        while not events[-1].HasField("draining"):
            events.append(await call.read())
        request = order(name, taker.id)
        await giver.decode.HandOver(request, timeout=TIMEOUT)
        assert isinstance(await refusal(giver, order(other_name, taker.id)), NotFoundError)
        num_tokens = await stopped(call, events)
        said = tokens_of(events)
        handle = giver.handle(request.lease_id, num_tokens)
        going_on, _ = taker.to_decode(prompt, GREEDY, tuple(said[:-1]), handle)
        assert said[:-1] + tokens_of(await rest_of(going_on)) == undisturbed
        kinds = [e.WhichOneof("event") for e in await rest_of(other)]
        assert "draining" not in kinds
        assert kinds.count("finished") == 2


async def refusal(member: Member, request: decode_pb2.HandOverRequest) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await member.decode.HandOver(request, timeout=TIMEOUT)
    return error_of(caught.value)


async def test_decode_worker_refuses_invalid_migration_and_continues(checkpoint):
    model, prompt = checkpoint("llama"), prompt_of(20)
    async with crew_of(model, "decode", "decode") as crew:
        giver, taker = crew.members
        assert isinstance(await refusal(giver, order("unknown", taker.id)), NotFoundError)
        call, name = giver.to_decode(prompt, GREEDY)
        events = await read_tokens(call, 2)
        for changes in ({"lease_id": b"short"}, {"claimant": ""}):
            wrong = decode_pb2.HandOverRequest()
            wrong.CopyFrom(order(name, taker.id))
            wrong.MergeFrom(decode_pb2.HandOverRequest(**changes))
            if "claimant" in changes:
                wrong.claimant = ""
            assert isinstance(await refusal(giver, wrong), InvalidArgumentError)
        assert tokens_of([*events, *await rest_of(call)]) == alone(model, [prompt], GREEDY)[0][0]
        assert isinstance(await refusal(giver, order(name, taker.id)), NotFoundError)


async def test_decode_worker_stops_request_once_under_new_lease_id(checkpoint):
    async with crew_of(checkpoint("llama"), "decode", "decode") as crew:
        giver, taker = crew.members
        call, name = giver.to_decode(prompt_of(20), GREEDY)
        events = await read_tokens(call, 2)
        request = order(name, taker.id)
        await giver.decode.HandOver(request, timeout=TIMEOUT)
        assert isinstance(await refusal(giver, order(name, taker.id)), AlreadyExistsError)
        await stopped(call, events)
        other, other_name = giver.to_decode(prompt_of(21), GREEDY)
        await read_tokens(other, 2)
        used = order(other_name, taker.id, lease_id=request.lease_id)
        assert isinstance(await refusal(giver, used), AlreadyExistsError)
        call.cancel()
        other.cancel()


async def test_live_migration_refuses_other_tenant_claimant_or_epoch(checkpoint):
    """All three at once, since the lease of each expires unclaimed."""
    async with crew_of(checkpoint("llama"), "decode", "decode", lease_timeout_s=1.0) as crew:
        await asyncio.gather(*(check_refuses(crew, w) for w in ("tenant", "claimant", "epoch")))


async def check_refuses(crew: Crew, wrong: str) -> None:
    """Checks that a lease is not found by a claimant of which one thing is wrong."""
    giver, taker = crew.members
    prompt = prompt_of(20)
    call, name = giver.to_decode(prompt, GREEDY)
    events = await read_tokens(call, 2)
    claimant = "another worker" if wrong == "claimant" else taker.id
    tenant = "acme" if wrong == "tenant" else ""
    request = order(name, claimant, tenant=tenant)
    await giver.decode.HandOver(request, timeout=TIMEOUT)
    handle = giver.handle(request.lease_id, await stopped(call, events))
    if wrong == "epoch":
        handle.source_epoch += 1
    output = tuple(tokens_of(events)[:-1])
    going_on = taker.to_decode(prompt, GREEDY, output, handle)[0]
    kinds = (await going_on.read()).WhichOneof("event")
    assert kinds == "admitted", wrong
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # its lease expires, unclaimed
        await rest_of(call)
    assert isinstance(error_of(caught.value), NotFoundError), wrong
    going_on.cancel()


@pytest.mark.parametrize("who", ["giver", "taker"])
async def test_live_migration_holds_nothing_when_call_is_cancelled(checkpoint, who):
    async with crew_of(checkpoint("llama"), "decode", "decode") as crew:
        giver, taker = crew.members
        prompt = prompt_of(20)
        call, name = giver.to_decode(prompt, GREEDY)
        events = await read_tokens(call, 2)
        request = order(name, taker.id)
        await giver.decode.HandOver(request, timeout=TIMEOUT)
        num_tokens = await stopped(call, events)
        if who == "giver":
            call.cancel()
        handle = giver.handle(request.lease_id, num_tokens)
        going_on, _ = taker.to_decode(prompt, GREEDY, tuple(tokens_of(events)[:-1]), handle)
        await going_on.read()
        if who == "giver":
            with pytest.raises(grpc.aio.AioRpcError):
                await rest_of(going_on)
        going_on.cancel()
        call.cancel()


async def test_draining_prefill_worker_serves_leases_to_their_end(checkpoint):
    model, prompt = checkpoint("llama"), prompt_of(100)
    async with crew_of(model, "prefill", "decode") as crew:
        prefill, decode = crew.members
        request = prefill.prefill_request(prompt, decode_worker=decode.id)
        prefilling = prefill.prefill.Prefill(request, timeout=TIMEOUT)
        while (await prefilling.read()).WhichOneof("event") != "result":
            pass
        await prefill.membership.drain()
        late = prefill.prefill.Prefill(prefill.prefill_request(prompt), timeout=TIMEOUT)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await late.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        handle = prefill.handle(request.lease_id, len(prompt))
        call, _ = decode.to_decode(prompt, params, handle=handle)
        assert tokens_of(await rest_of(call)) == alone(model, [prompt], params)[0][0]
        assert [e.WhichOneof("event") for e in await rest_of(prefilling)] == ["released"]
