"""A worker changes its role with the model that it has, and its life before is over."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from baton.cluster.redis.embedded import EmbeddedRedis
from baton.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from baton.sampling import SamplingParams
from baton.v1 import admin_pb2, decode_pb2
from baton.v1 import inference_pb2 as pb
from baton.worker.model_host import ModelHost
from baton.worker.role_changes import RoleChanges
from baton.worker.settings import WorkerSettings
from tests.support.failures import failure_of
from tests.support.redis_loops import RECORD
from tests.support.waiting import until
from tests.support.worker.crew import Crew, Member, crew_of, new_lease_id, tokens_of
from tests.support.worker.loaded_model import LoadedModel, membership_of
from tests.support.worker.pair import TIMEOUT, rest_of
from tests.support.worker.reference import alone, prompt_of

PREFILL, DECODE = pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


async def state_of(member: Member) -> int:
    load = await member.admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=TIMEOUT)
    return int(load.state)


async def handed_over(crew: Crew, giver: Member, taker: Member, prompt: list[int]) -> list[int]:
    """Returns what the taker says to a prompt that the giver computes."""
    wanted = giver.prefill_request(prompt, decode_worker=taker.id)
    decoding, _ = taker.to_decode(prompt, GREEDY, handle=giver.handle(wanted.lease_id, len(prompt)))
    prefilling = giver.prefill.Prefill(wanted, timeout=TIMEOUT)
    tokens, given = await asyncio.gather(rest_of(decoding), rest_of(prefilling))
    assert given[-1].HasField("released")
    await crew.nothing_held()
    return tokens_of(tokens)


@pytest.mark.parametrize("connector", ["grpc", "shm"])
async def test_workers_swap_roles_and_swap_back(checkpoint, connector):
    model = checkpoint("llama")
    prompts = [prompt_of(40 + 7 * i, seed=i) for i in range(3)]
    expected = [answers[0] for answers in alone(model, prompts, GREEDY)]
    async with crew_of(model, "prefill", "decode", kv_connector=connector) as crew:
        giver, taker = crew.members
        for prompt, answer in zip(prompts, expected, strict=True):
            assert await handed_over(crew, giver, taker, prompt) == answer
            before = giver.membership.epoch, taker.membership.epoch
            epochs = await giver.set_role(DECODE), await taker.set_role(PREFILL)
            assert (giver.membership.role, taker.membership.role) == ("decode", "prefill")
            assert epochs == (giver.membership.epoch, taker.membership.epoch)
            assert epochs[0] > before[0]
            assert epochs[1] > before[1]
            giver, taker = taker, giver


async def test_worker_refuses_work_of_other_role_as_unavailable(checkpoint):
    async with crew_of(checkpoint("llama"), "prefill", "decode") as crew:
        prefill, decode = crew.members
        call, _ = prefill.to_decode(prompt_of(9), GREEDY)
        failure = await failure_of(call)
        assert isinstance(failure, UnavailableError)
        assert "in the prefill role now" in str(failure)
        wanted = decode.prefill_request(prompt_of(9))
        assert isinstance(
            await failure_of(decode.prefill.Prefill(wanted, timeout=TIMEOUT)), UnavailableError
        )


async def test_role_change_keeps_cache_and_refuses_earlier_handles(checkpoint):
    model, prompt = checkpoint("llama"), prompt_of(64)
    async with crew_of(model, "prefill", "decode") as crew:
        giver, taker = crew.members
        answer = await handed_over(crew, giver, taker, prompt)
        former = giver.handle(new_lease_id(), len(prompt))
        await giver.set_role(DECODE)
        before = giver.num_computed_tokens
        assert await giver.answer(prompt, GREEDY) == answer
        assert giver.num_computed_tokens - before < len(prompt)
        call, _ = taker.to_decode(prompt, GREEDY, handle=former)
        failure = await failure_of(call)
        assert isinstance(failure, FailedPreconditionError)
        assert "changed its role" in str(failure)
        ended = decode_pb2.EndSequenceRequest(request_id="r", epoch=former.source_epoch)
        stale = giver.decode.EndSequence(ended, timeout=TIMEOUT)
        assert isinstance(await failure_of(stale), FailedPreconditionError)


async def test_role_change_waits_until_routers_would_learn_of_it():
    with EmbeddedRedis() as server:
        member = membership_of("prefill", redis_url=server.url)
        changes = RoleChanges(member, LoadedModel(WorkerSettings(), member))
        async with AsyncExitStack() as stack:
            await member.join(replace(RECORD, epoch=member.epoch), stack)
            await until(lambda: member.redis_answers)
            assert await changes.set_role("decode") == member.epoch
            server.stop()
            await until(lambda: not member.redis_answers)
            unheard = await failure_of(changes.set_role("prefill"))
    assert isinstance(unheard, UnavailableError)
    assert "Redis does not answer" in str(unheard)
    assert member.role == "decode"


async def test_role_change_is_refused_while_the_model_is_loading():
    member = membership_of("prefill")
    changes = RoleChanges(member, ModelHost(WorkerSettings(), member))
    loading = await failure_of(changes.set_role("decode"))
    assert str(loading) == "worker w is not ready yet: starting"


async def test_role_change_migrates_running_sequence_first(checkpoint):
    model, prompt = checkpoint("llama"), prompt_of(20)
    params = replace(GREEDY, max_tokens=200)
    async with crew_of(model, "decode", "decode") as crew:
        giver, taker = crew.members
        (undisturbed,) = alone(model, [prompt], params)[0]
        call, name = giver.to_decode(prompt, params)
        events = [await call.read() for _ in range(3)]
        changing = asyncio.ensure_future(giver.set_role(PREFILL))
        while not events[-1].HasField("draining"):
            events.append(await call.read())
        assert await state_of(giver) == admin_pb2.WORKER_STATE_DRAINING
        order = decode_pb2.HandOverRequest(
            request_id=name, claimant=taker.id, lease_id=new_lease_id()
        )
        await giver.decode.HandOver(order, timeout=TIMEOUT)
        while not events[-1].HasField("suspended"):
            events.append(await call.read())
        assert not changing.done(), "its blocks are yet to be fetched"
        said = tokens_of(events)
        handle = giver.handle(order.lease_id, events[-1].suspended.num_tokens)
        going_on, _ = taker.to_decode(prompt, params, tuple(said[:-1]), handle)
        assert said[:-1] + tokens_of(await rest_of(going_on)) == undisturbed
        await rest_of(call)
        assert await changing == giver.membership.epoch
        assert giver.membership.role == "prefill"
        assert await state_of(giver) == admin_pb2.WORKER_STATE_READY


async def test_role_change_times_out_and_leaves_request_running(checkpoint):
    model, prompt = checkpoint("llama"), prompt_of(20)
    params = replace(GREEDY, max_tokens=200, n=2, temperature=0.9, seed=3)
    async with crew_of(model, "decode", "decode", drain_timeout_s=0.05) as crew:
        member = crew.members[0].membership
        call, _ = crew.members[0].to_decode(prompt, params)
        await call.read()
        epoch = member.epoch
        failure = await failure_of(crew.members[0].set_role(PREFILL))
        assert isinstance(failure, DeadlineExceededError)
        assert (member.role, member.epoch, member.is_draining) == ("decode", epoch, False)
        kinds = [event.WhichOneof("event") for event in await rest_of(call)]
        assert kinds.count("finished") == 2
        assert len(await crew.members[0].answer(prompt, GREEDY)) == 40


async def test_role_change_is_bound_to_epoch_and_made_once(checkpoint):
    async with crew_of(checkpoint("llama"), "prefill") as crew:
        (member,) = crew.members
        first = member.membership.epoch
        wrong = await failure_of(member.set_role(DECODE, epoch=first - 1))
        assert isinstance(wrong, FailedPreconditionError)
        asked = [member.set_role(DECODE, epoch=first, worker=member.id) for _ in range(3)]
        (epoch,) = set(await asyncio.gather(*asked))
        assert epoch == member.membership.epoch > first
        assert await member.set_role(DECODE, epoch=first) == epoch  # as one asks who heard nothing
        stale = await failure_of(member.set_role(PREFILL, epoch=first))
        assert isinstance(stale, FailedPreconditionError)
        assert isinstance(await failure_of(member.set_role(0)), InvalidArgumentError)
        other = await failure_of(member.set_role(PREFILL, worker="unknown"))
        assert isinstance(other, NotFoundError)
        assert (member.membership.role, member.membership.epoch) == ("decode", epoch)


async def test_role_change_outlives_its_caller_and_ends_with_drain(checkpoint):
    model, params = checkpoint("llama"), replace(GREEDY, max_tokens=150)
    async with crew_of(model, "decode", "decode") as crew:
        left, leaving = crew.members
        for member in crew.members:
            call, _ = member.to_decode(prompt_of(20), params)
            await call.read()
            changing = asyncio.ensure_future(member.set_role(PREFILL))
            await until(lambda: member.membership.is_draining)  # noqa: B023
            if member is left:
                changing.cancel()
                await rest_of(call)
            else:
                await member.admin.Drain(admin_pb2.DrainRequest(), timeout=TIMEOUT)
                await rest_of(call)
                assert isinstance(await failure_of(changing), UnavailableError)
        await until(lambda: left.membership.role == "prefill")
        assert leaving.membership.role == "decode"
        again = await failure_of(leaving.set_role(PREFILL))
        assert isinstance(again, UnavailableError)
