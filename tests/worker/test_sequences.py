"""Requests of several sequences: samples, the best of many, beams."""

import asyncio
from typing import Any

import grpc
import pytest

from baton.sampling import SamplingParams
from baton.v1 import decode_pb2
from baton.v1 import inference_pb2 as pb
from tests.support.engine.checkpoints import FAMILIES, save_random
from tests.support.engine.engines import mostly_slow
from tests.support.waiting import until
from tests.support.worker.pair import Answer, Pair, pair_of, rest_of
from tests.support.worker.reference import alone, engine_of, prompt_of

SAMPLES = SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, seed=5, n=3)
BEST = SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, seed=5, n=2, best_of=5)
BEAMS = SamplingParams(max_tokens=9, ignore_eos=True, n=2, beam_width=4)
KINDS = {"samples": SAMPLES, "best of": BEST, "beams": BEAMS}


def token_ids(answer: Answer) -> list[list[int]]:
    return [o.token_ids for o in answer.outputs]


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "family", mostly_slow(["llama", "mistral_short", "gemma3", "gpt_oss"], "llama", "gemma3")
)
async def test_several_sequences_match_single_engine_on_either_worker(checkpoint, family, params):
    model = checkpoint(family)
    prompts = [prompt_of(n) for n in (1, 16, 40, 64)]
    expected = alone(model, prompts, params)
    async with pair_of(model, prefill={"max_num_batched_tokens": 24}) as pair:
        for prompt, sequences in zip(prompts, expected, strict=True):
            assert token_ids(await pair.hand_over(prompt, params)) == sequences
        for prompt, sequences in zip(prompts, expected, strict=True):  # what is cached by now
            assert token_ids(await pair.hand_over(prompt, params)) == sequences
            assert token_ids(await pair.decode_alone(prompt, params)) == sequences


@pytest.mark.parametrize("length", [32, 48, 64])
async def test_cached_prompt_forks_where_window_begins_with_block(checkpoint, tmp_path, length):
    config = FAMILIES["gemma3"]()
    config.sliding_window = 17  # the last token sees exactly one token of the block before
    save_random(config, tmp_path)
    prompt = prompt_of(length)
    (expected,) = alone(str(tmp_path), [prompt], SAMPLES)
    async with pair_of(str(tmp_path)) as pair:
        for _ in range(2):
            assert token_ids(await pair.hand_over(prompt, SAMPLES)) == expected


@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_mixed_requests_on_small_pools_match_single_engine(checkpoint, family):
    kinds = [*KINDS.values(), SamplingParams(max_tokens=40, ignore_eos=True)]
    work = [(prompt_of(n, seed=i), kinds[i % 4]) for i, n in enumerate((1, 16, 40, 90) * 4, 1)]
    engine = engine_of(checkpoint(family))
    expected = [
        [list(c.token_ids) for c in engine.generate([prompt], params)[0].completions]
        for prompt, params in work
    ]
    few = {"num_blocks": 34, "max_num_seqs": 6, "max_num_batched_tokens": 32}
    other_order = {"policy": "shortest-prefill"}
    async with pair_of(checkpoint(family), prefill=other_order, **few) as pair:
        answers = await asyncio.gather(*(pair.hand_over(*item) for item in work))
        assert [token_ids(a) for a in answers] == expected


async def test_samples_stream_at_once_and_ranked_sequences_at_end(checkpoint):
    async with pair_of(checkpoint("llama")) as pair:
        samples = await pair.hand_over(prompt_of(20), SAMPLES)
        best = await pair.hand_over(prompt_of(20), BEST)
    indices = [r.tokens.sequence_index for r in samples.decode if r.HasField("tokens")]
    assert indices != sorted(indices), "one sequence after the other"
    kinds = [
        (r.WhichOneof("event"), r.tokens.sequence_index or r.finished.sequence_index)
        for r in best.decode[2:]
    ]
    assert kinds == [("tokens", 0), ("finished", 0), ("tokens", 1), ("finished", 1)]


@pytest.mark.parametrize("params", [SAMPLES, BEST], ids=["samples", "best of"])
async def test_sequences_report_requested_logprobs(checkpoint, params):
    asked = SamplingParams(**{
        **{name: getattr(params, name) for name in params.__slots__},
        "logprobs": True, "top_logprobs": 2,
    })  # fmt: skip
    prompt = prompt_of(33)
    (result,) = engine_of(checkpoint("llama")).generate([prompt], asked)
    async with pair_of(checkpoint("llama")) as pair:
        outputs = (await pair.hand_over(prompt, asked)).outputs
        silent = (await pair.hand_over(prompt, params)).outputs
    assert len(outputs) == asked.n
    for output, completion in zip(outputs, result.completions, strict=True):
        expected = [p.logprob for p in completion.logprobs]
        assert output.logprobs == pytest.approx(expected, abs=1e-4)
        assert [ids for ids, _ in output.top] == [p.top_token_ids for p in completion.logprobs]
    for output in silent:
        assert output.logprobs == []
        assert output.top == []


async def test_best_of_sequences_are_ordered_by_mean_logprob(checkpoint):
    params = SamplingParams(
        max_tokens=6, ignore_eos=True, temperature=1.5, seed=1, n=4, best_of=8, logprobs=True
    )
    async with pair_of(checkpoint("llama")) as pair:
        outputs = (await pair.hand_over(prompt_of(33), params)).outputs
    means = [sum(o.logprobs) / len(o.logprobs) for o in outputs]
    assert len(means) == 4
    assert means == sorted(means, reverse=True)


async def test_beams_have_scores_best_first(checkpoint):
    prompt = prompt_of(33)
    (result,) = engine_of(checkpoint("llama")).generate([prompt], BEAMS)
    async with pair_of(checkpoint("llama")) as pair:
        outputs = (await pair.hand_over(prompt, BEAMS)).outputs
        samples = (await pair.hand_over(prompt, SAMPLES)).outputs
    scores = [o.finished.score for o in outputs]
    assert scores == sorted(scores, reverse=True)
    assert scores == pytest.approx([c.score for c in result.completions], abs=1e-4)
    assert {o.finished.reason for o in outputs} == {pb.FINISH_REASON_LENGTH}
    assert not any(o.finished.HasField("score") for o in samples)


async def test_one_token_sequences_are_handed_off(checkpoint):
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=3, n=4)
    prompt = prompt_of(40)
    (expected,) = alone(checkpoint("llama"), [prompt], params)
    async with pair_of(checkpoint("llama")) as pair:
        answer = await pair.hand_over(prompt, params)
        assert token_ids(answer) == expected
        assert answer.kv_ready.num_transferred_blocks == 3


async def test_ended_sequence_frees_its_blocks_and_reports_its_reason(checkpoint):
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=1.0, seed=5, n=2)
    prompt = prompt_of(40)
    (expected,) = alone(checkpoint("llama"), [prompt], params)
    async with pair_of(checkpoint("llama")) as pair:
        request = pair.decode_request(prompt, params)
        call = pair.to_decode.Generate(request, timeout=30.0)
        answer = Answer([], [await call.read() for _ in range(40)])
        assert pair.decode.model.engine.reading.stats.num_running == 2
        await end(pair, request, 1, reason=pb.FINISH_REASON_STOP_STRING)
        await until_running(pair, 1)
        held = pair.decode.model.engine.reading.stats.num_held_blocks
        assert held <= -(-240 // 16), "of one sequence"
        await end(pair, request, 1)  # again, which changes nothing
        answer.decode.extend(await rest_of(call))
    whole, cut = answer.outputs
    assert whole.token_ids == expected[0]
    assert cut.token_ids == expected[1][: len(cut.token_ids)]
    assert len(cut.token_ids) < len(expected[1])
    reasons = [o.finished.reason for o in (whole, cut)]
    assert reasons == [pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP_STRING]


async def end(pair: Pair, request: Any, index: int, **changes: Any) -> None:
    fields = {"request_id": request.request_id, "epoch": pair.decode.membership.epoch, **changes}
    message = decode_pb2.EndSequenceRequest(sequence_index=index, **fields)
    await pair.to_decode.EndSequence(message, timeout=10.0)


async def until_running(pair: Pair, number: int) -> None:
    await until(lambda: pair.decode.model.engine.reading.stats.num_running == number)


async def test_end_sequence_refuses_unknown_request_or_epoch(checkpoint):
    async with pair_of(checkpoint("llama")) as pair:
        request = pair.decode_request(prompt_of(9), SAMPLES)
        for changes, code in (
            ({}, grpc.StatusCode.NOT_FOUND),
            ({"epoch": pair.decode.membership.epoch - 1}, grpc.StatusCode.FAILED_PRECONDITION),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await end(pair, request, 0, **changes)
            assert caught.value.code() is code


async def test_request_is_not_handed_off_when_first_token_is_last(checkpoint):
    params = SamplingParams(max_tokens=1)
    async with pair_of(checkpoint("llama")) as pair:
        request = pair.prefill_request(prompt_of(40), params)
        events = [r async for r in pair.to_prefill.Prefill(request, timeout=10.0)]
        assert [e.WhichOneof("event") for e in events] == ["admitted", "started", "result"]
        assert events[-1].result.first_tokens[0].finish_reason == pb.FINISH_REASON_LENGTH
