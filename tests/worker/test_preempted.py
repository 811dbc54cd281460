"""A decode worker that has no room for a sequence gives it back, if it is told what that costs."""

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from baton.sampling import SamplingParams
from baton.v1 import decode_pb2
from tests.support.worker.pair import Pair, pair_of, rest_of
from tests.support.worker.reference import alone, prompt_of

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
WAYS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.2, seed=3),
    "penalised": SamplingParams(max_tokens=40, ignore_eos=True, repetition_penalty=1.4),
}
# Room for one of two prompts of 40 tokens with all of its output, and for both without.
TIGHT = {"num_blocks": 8, "preemption": "return", "max_num_batched_tokens": 64}
CHEAP = decode_pb2.ReturnCost(fixed=Duration(nanos=1), recompute_token=Duration(seconds=1))


async def generate(
    pair: Pair,
    prompt: list[int],
    params: SamplingParams,
    output: list[int],
    cost: decode_pb2.ReturnCost | None = CHEAP,
) -> decode_pb2.DecodeGenerateResponse:
    """Has both workers go on behind `output`, to which what they say is added. Returns the last
    thing that the decode worker said."""
    given = [*prompt, *output]
    asked = pair.prefill_request(given, params, num_prompt_tokens=len(prompt))
    request = pair.decode_request(given, params, asked.lease_id)
    request.num_prompt_tokens = len(prompt)
    if cost is not None:
        request.return_cost.CopyFrom(cost)
    decoding = pair.to_decode.Generate(request, timeout=30.0)
    assert (await decoding.read()).HasField("admitted")
    prefilling = pair.to_prefill.Prefill(asked, timeout=30.0)
    said, _ = await asyncio.gather(rest_of(decoding), rest_of(prefilling))
    for message in said:
        if message.HasField("tokens"):
            assert message.tokens.position == len(output)
            output += message.tokens.token_ids
    return said[-1]


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize("params", WAYS.values(), ids=WAYS)
async def test_preempted_request_resumes_with_same_tokens(checkpoint, params, max_drafts):
    model = checkpoint("llama")
    prompts = [prompt_of(40, seed=seed) for seed in (1, 2)]
    expected = [sequences[0] for sequences in alone(model, prompts, params)]
    async with pair_of(model, decode={**TIGHT, "max_drafts": max_drafts}) as pair:
        outputs: list[list[int]] = [[], []]
        ends = await asyncio.gather(
            *(generate(pair, p, params, o) for p, o in zip(prompts, outputs, strict=True))
        )
        kinds = [end.WhichOneof("event") for end in ends]
        assert sorted(kinds) == ["finished", "preempted"]
        (i,) = (i for i, kind in enumerate(kinds) if kind == "preempted")
        assert 1 < len(outputs[i]) < 40
        assert outputs[i] == expected[i][: len(outputs[i])]
        stats = pair.decode.model.engine.reading.stats
        assert (stats.num_preemptions, stats.num_returns) == (1, 1)
        await pair.nothing_held()
        assert (await generate(pair, prompts[i], params, outputs[i])).HasField("finished")
        assert outputs == expected


async def test_auto_preemption_returns_request_only_when_cheaper(checkpoint):
    model = checkpoint("llama")
    prompts = [prompt_of(40, seed=seed) for seed in (1, 2)]
    dear = decode_pb2.ReturnCost(fixed=Duration(seconds=9), recompute_token=Duration(nanos=1))
    async with pair_of(model, decode={**TIGHT, "preemption": "auto"}) as pair:
        for cost, num_returns in ((dear, 0), (CHEAP, 1)):
            outputs: list[list[int]] = [[], []]
            await asyncio.gather(
                *(generate(pair, p, GREEDY, o, cost) for p, o in zip(prompts, outputs, strict=True))
            )
            assert pair.decode.model.engine.reading.stats.num_preemptions > 0
            assert pair.decode.model.engine.reading.stats.num_returns == num_returns
            await pair.nothing_held()


async def test_preempted_request_is_recomputed_without_return_cost(checkpoint):
    model = checkpoint("llama")
    prompts = [prompt_of(40, seed=seed) for seed in (1, 2)]
    async with pair_of(model, decode=TIGHT) as pair:
        outputs: list[list[int]] = [[], []]
        await asyncio.gather(
            *(generate(pair, p, GREEDY, o, None) for p, o in zip(prompts, outputs, strict=True))
        )
        assert outputs == [sequences[0] for sequences in alone(model, prompts, GREEDY)]
        stats = pair.decode.model.engine.reading.stats
        assert (stats.num_preemptions > 0, stats.num_returns) == (True, 0)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        pytest.param({"handle": None}, "return_cost", id="computed here"),
        pytest.param({"n": 2}, "return_cost", id="several"),
        pytest.param({"cost": decode_pb2.ReturnCost(fixed=Duration(seconds=-1))},
                     r"return_cost\.fixed", id="less than nothing"),
    ],
)  # fmt: skip
async def test_decode_worker_refuses_invalid_return_cost_by_field(checkpoint, wrong, named):
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=1, n=wrong.get("n", 1))
    async with pair_of(checkpoint("llama")) as pair:
        request = pair.decode_request(prompt_of(20), params, bytes(16))
        if "handle" in wrong:
            request.ClearField("handle")
        request.return_cost.CopyFrom(wrong.get("cost", CHEAP))
        with pytest.raises(grpc.aio.AioRpcError, match=named) as refused:
            await rest_of(pair.to_decode.Generate(request, timeout=10.0))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
