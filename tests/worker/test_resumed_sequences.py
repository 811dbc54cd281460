"""Several sequences that another worker had begun: each goes on behind what it has come to."""

from dataclasses import replace
from typing import Any

import grpc
import pytest

from baton.errors import InvalidArgumentError
from baton.rpc.errors import error_of
from baton.sampling import Grammar, GrammarKind, SamplingParams
from baton.v1 import admin_pb2, decode_pb2
from baton.v1 import inference_pb2 as pb
from tests.support.engine.engines import mostly_slow
from tests.support.grids import grid
from tests.support.worker.pair import TIMEOUT, Pair, pair_of, rest_of
from tests.support.worker.reference import alone, engine_of, prompt_of

SAMPLES = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=5, n=4)
WAYS = {
    "seeded": SAMPLES,
    "penalties": replace(SAMPLES, repetition_penalty=1.3, presence_penalty=0.5),
    "logprobs": replace(SAMPLES, logprobs=True, top_logprobs=2),
}
PLACES = (12, None, 0, 29)

Outputs = list[list[int] | None]


def cut(sequences: list[list[int]], places: tuple[int | None, ...] = PLACES) -> Outputs:
    """Returns the sequences up to their places; None for one that is complete."""
    return [None if at is None else whole[:at] for whole, at in zip(sequences, places, strict=True)]


def asked(
    pair: Pair,
    prompt: list[int],
    params: SamplingParams,
    outputs: Outputs,
    lease_id: bytes | None = None,
) -> decode_pb2.DecodeGenerateRequest:
    request = pair.decode_request(prompt, params, lease_id)
    for output in outputs:
        request.outputs.add(token_ids=output or [], is_complete=output is None)
    return request


async def continued(
    pair: Pair, prompt: list[int], params: SamplingParams, outputs: Outputs, *, handed: bool
) -> list[Any]:
    """Returns the decode worker's messages, with the prompt's KV from the prefill worker or
    without."""
    to_prefill = pair.prefill_request(prompt, params)
    lease_id = to_prefill.lease_id if handed else None
    call = pair.to_decode.Generate(asked(pair, prompt, params, outputs, lease_id), timeout=TIMEOUT)
    said = [await call.read()]
    assert said[0].HasField("admitted")
    if handed:
        await rest_of(pair.to_prefill.Prefill(to_prefill, timeout=TIMEOUT))
    return said + await rest_of(call)


def joined(said: list[Any], outputs: Outputs) -> dict[int, list[int]]:
    """The sequences with what they were given. Each has its end, once."""
    found = {i: list(output) for i, output in enumerate(outputs) if output is not None}
    ended = []
    for event in said:
        if event.HasField("tokens"):
            tokens = event.tokens
            assert tokens.position == len(found[tokens.sequence_index])
            found[tokens.sequence_index] += tokens.token_ids
        elif event.HasField("finished"):
            assert event.finished.reason == pb.FINISH_REASON_LENGTH
            ended.append(event.finished.sequence_index)
    assert sorted(ended) == sorted(found)
    return found


@grid(
    family=mostly_slow(["llama", "gemma3"], "gemma3"),
    name=WAYS,
    handed=[pytest.param(True, id="handed over"), pytest.param(False, id="computed here")],
)
async def test_resumed_sequences_match_uninterrupted_ones(checkpoint, family, name, handed):
    model, params = checkpoint(family), WAYS[name]
    prompts = [prompt_of(n) for n in (1, 16, 40, 64)]
    expected = alone(model, prompts, params)
    async with pair_of(model, max_num_batched_tokens=24) as pair:
        for prompt, sequences in zip(prompts, expected, strict=True):
            outputs = cut(sequences)
            said = await continued(pair, prompt, params, outputs, handed=handed)
            assert joined(said, outputs) == {i: sequences[i] for i in (0, 2, 3)}


async def test_resumed_sequences_keep_their_logprobs(checkpoint):
    model, params, prompt = checkpoint("llama"), WAYS["logprobs"], prompt_of(33)
    (result,) = engine_of(model).generate([prompt], params)
    outputs = cut([list(c.token_ids) for c in result.completions])
    async with pair_of(model) as pair:
        said = await continued(pair, prompt, params, outputs, handed=True)
    for index in (0, 2, 3):
        of_one = [e.tokens for e in said if e.HasField("tokens")]
        of_one = [tokens for tokens in of_one if tokens.sequence_index == index]
        expected = result.completions[index].logprobs[len(outputs[index]) :]
        logprobs = [p for tokens in of_one for p in tokens.logprobs]
        assert logprobs == pytest.approx([p.logprob for p in expected], abs=1e-4)
        tops = [tuple(top.token_ids) for tokens in of_one for top in tokens.top_logprobs]
        assert tops == [p.top_token_ids for p in expected]


async def test_resumed_sequences_compute_received_tokens_as_prompt(checkpoint):
    """A hundred tokens of each are there; ten steps bring the rest."""
    model, prompt = checkpoint("llama"), prompt_of(40)
    params = replace(SAMPLES, max_tokens=110)
    (sequences,) = alone(model, [prompt], params)
    outputs = cut(sequences, (100, 100, None, 105))
    async with pair_of(model) as pair:
        said = await continued(pair, prompt, params, outputs, handed=True)
        done = pair.decode.model.engine.reading.work_done
        (ready,) = (event.kv_ready for event in said if event.HasField("kv_ready"))
    assert joined(said, outputs) == {i: sequences[i] for i in (0, 1, 3)}
    assert ready.num_transferred_blocks == 3, "of the prompt alone"
    assert done.num_prompt_tokens == 101 + 101 + 106
    assert done.num_decode_tokens == 9 + 9 + 4
    assert done.num_steps < 15


async def test_resumed_sequence_can_be_ended_while_others_run(checkpoint):
    model, prompt = checkpoint("llama"), prompt_of(40)
    params = replace(SAMPLES, max_tokens=120, n=2)
    (sequences,) = alone(model, [prompt], params)
    async with pair_of(model) as pair:
        request = asked(pair, prompt, params, [sequences[0][:50], sequences[1][:20]])
        call = pair.to_decode.Generate(request, timeout=TIMEOUT)
        said = [await call.read() for _ in range(10)]
        end = decode_pb2.EndSequenceRequest(
            request_id=request.request_id, epoch=pair.decode.membership.epoch, sequence_index=1
        )
        await pair.to_decode.EndSequence(end, timeout=TIMEOUT)
        said += await rest_of(call)
    endings = {e.finished.sequence_index: e.finished.reason for e in said if e.HasField("finished")}
    assert endings == {0: pb.FINISH_REASON_LENGTH, 1: pb.FINISH_REASON_UNSPECIFIED}
    whole = [e.tokens for e in said if e.HasField("tokens") and not e.tokens.sequence_index]
    assert [token for tokens in whole for token in tokens.token_ids] == sequences[0][50:]


async def test_promised_capacity_counts_received_tokens_of_each(checkpoint):
    async with pair_of(checkpoint("llama")) as pair:
        outputs: Outputs = [[5] * 20, None, [], [5] * 40]
        params = replace(SAMPLES, max_tokens=60)
        request = asked(pair, prompt_of(40), params, outputs)
        call = pair.to_decode.Generate(request, timeout=TIMEOUT)
        assert (await call.read()).HasField("admitted")
        load = await pair.decode_admin.GetLoad(admin_pb2.GetLoadRequest())
        # The prompt's three blocks, two more last ones to write to, and those behind the prompt's.
        assert load.num_promised_blocks == 3 + 2 + (1 + 0 + 2)
        call.cancel()


@pytest.mark.parametrize(
    ("params", "outputs", "field"),
    [
        pytest.param(replace(SAMPLES, n=1), [[5]], "outputs", id="one sequence"),
        pytest.param(replace(SAMPLES, n=2, best_of=3), [[5], []], "outputs", id="the best"),
        pytest.param(
            SamplingParams(max_tokens=9, n=2, beam_width=2), [[5], []], "outputs", id="beams"
        ),
        pytest.param(SAMPLES, [[5], []], "outputs", id="too few"),
        pytest.param(SAMPLES, [[5]] * 5, "outputs", id="too many"),
        pytest.param(SAMPLES, [None] * 4, "outputs", id="nothing left"),
        pytest.param(SAMPLES, [[], [], [5, 512], []], "outputs[2].token_ids[1]", id="no token"),
        pytest.param(SAMPLES, [[5] * 30, [], [], []], "outputs[0].token_ids", id="too long"),
    ],
)
async def test_decode_worker_refuses_invalid_outputs_by_field(checkpoint, params, outputs, field):
    async with pair_of(checkpoint("llama")) as pair:
        request = asked(pair, prompt_of(9), params, outputs)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pair.to_decode.Generate(request, timeout=TIMEOUT).read()
        error = error_of(refused.value)
        assert isinstance(error, InvalidArgumentError)
        assert error.field == field


async def test_decode_worker_refuses_output_outside_grammar(checkpoint):
    grammar = Grammar(GrammarKind.REGEX, "[a-z]+")
    params = replace(SAMPLES, n=2, grammar=grammar, ignore_eos=False)
    model = checkpoint("tiny")
    digit = engine_of(model).tokenizer.encode("7")
    async with pair_of(model) as pair:
        request = asked(pair, prompt_of(9), params, [[], digit])
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pair.to_decode.Generate(request, timeout=TIMEOUT).read()
        error = error_of(refused.value)
        assert isinstance(error, InvalidArgumentError)
        assert error.field == "outputs[1].token_ids"
