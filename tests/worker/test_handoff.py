"""A prompt that one worker computes and another goes on from, against one engine alone."""

import asyncio

import grpc
import pytest

from baton.cluster.prefix import hash_chain
from baton.sampling import SamplingParams
from baton.v1.kv_transfer_pb2_grpc import KvTransferStub
from baton_kvtransfer.exchange.exchange import KvExchange
from baton_kvtransfer.transfer_messages import handle_of
from tests.support.engine.checkpoints import FAMILIES, save_random
from tests.support.engine.engines import mostly_slow
from tests.support.engine.held_steps import held_after
from tests.support.engine.oracle import Oracle
from tests.support.kvtransfer.loopback import payload_request
from tests.support.waiting import until
from tests.support.worker.pair import TIMEOUT, Answer, Pair, pair_of
from tests.support.worker.reference import alone, engine_of, prompt_of

GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 32, 75, 160)


async def through(pair: Pair, prompts: list[list[int]], params: SamplingParams) -> list[Answer]:
    """One after the other, so that the second time everything is cached."""
    return [await pair.hand_over(prompt, params) for prompt in prompts]


KINDS = ["llama", "mistral_short", "qwen2_hybrid", "gemma3", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize(
    ("family", "chunk"),
    [
        *((family, 23) for family in KINDS),
        # Smaller chunks than a block or a window, and none, by half of the kinds each.
        *(pytest.param(f, (8, 256)[i % 2], marks=pytest.mark.slow) for i, f in enumerate(KINDS)),
        *(pytest.param(f, (256, 8)[i % 2], marks=pytest.mark.nightly) for i, f in enumerate(KINDS)),
    ],
)
async def test_handoff_moves_every_kind_of_cache(checkpoint, family, chunk):
    model, prompts = checkpoint(family), [prompt_of(n) for n in LENGTHS]
    expected = alone(model, prompts, GREEDY)
    sizes = {"max_num_batched_tokens": chunk, "handoff_chunk_tokens": 9}
    async with pair_of(model, prefill=sizes) as pair:
        for is_cached in (False, True):
            answers = await through(pair, prompts, GREEDY)
            assert [[o.token_ids for o in a.outputs] for a in answers] == expected
            num_reused = [a.kv_ready.num_reused_blocks for a in answers]
            assert is_cached or not any(num_reused)
            if is_cached and family != "mistral_short":  # which keeps nothing but its window
                assert num_reused == [n // 16 for n in LENGTHS]


@pytest.mark.parametrize("family", mostly_slow(["llama", "gemma3", "gpt_oss"], "llama", "gemma3"))
async def test_handoff_skips_blocks_cached_from_shorter_prompts(checkpoint, family):
    model, whole = checkpoint(family), prompt_of(200)
    prompts = [whole[:n] for n in (40, 64, 65, 96, 130, 200)]
    expected = alone(model, prompts, GREEDY)
    async with pair_of(model, prefill={"max_num_batched_tokens": 16}) as pair:
        answers = await through(pair, prompts, GREEDY)
        assert [[o.token_ids for o in a.outputs] for a in answers] == expected
        assert any(a.prefill_result.num_cached_tokens for a in answers)


@pytest.mark.parametrize("family", mostly_slow(["llama", "gemma3", "gpt_oss"], "llama", "gemma3"))
async def test_concurrent_handoffs_match_single_engine(checkpoint, family):
    model, prompts = checkpoint(family), [prompt_of(11 * i + 1, seed=3) for i in range(12)]
    expected = alone(model, prompts, GREEDY)
    few = {"num_blocks": 24, "max_num_seqs": 4}
    async with pair_of(model, max_num_batched_tokens=32, prefill=few, decode=few) as pair:
        answers = await asyncio.gather(*(pair.hand_over(p, GREEDY) for p in prompts))
        assert [[o.token_ids for o in a.outputs] for a in answers] == expected


@pytest.mark.parametrize("connector", ["grpc", "shm"])
async def test_prompt_of_one_step_moves_half_while_rest_is_computed(checkpoint, connector):
    model, prompt = checkpoint("gemma3"), prompt_of(160)
    halves = {"max_num_batched_tokens": 256, "handoff_chunk_tokens": 32}
    async with pair_of(model, kv_connector=connector, prefill=halves) as pair:
        pool, _ = pair.decode.model.engine.pools
        with held_after(1) as steps:
            answering = asyncio.create_task(pair.hand_over(prompt, GREEDY))
            await until(lambda: pool.content.any(dim=1).sum() == 80 // 16)
            assert steps.num_tokens[0] == 80
            steps.let_go()
            (output,) = (await answering).outputs
    assert steps.num_tokens[:3] == [80, 40, 40]
    assert tuple(output.token_ids) == Oracle()(model, prompt, GREEDY.max_tokens)


async def test_handoff_moves_only_window_of_windowed_group(checkpoint):
    async with pair_of(checkpoint("gemma3"), max_num_batched_tokens=16) as pair:
        answer = await pair.hand_over(prompt_of(200), GREEDY)
        full, windowed = pair.prefill.model.engine.facts.layouts
    # 13 blocks; the last token sees those from position 191 on.
    assert answer.kv_ready.num_transferred_blocks == 13 + 2
    expected = 13 * full.block_bytes + 2 * windowed.block_bytes
    assert answer.kv_ready.num_transferred_bytes == expected


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
async def test_handoff_moves_prompt_longer_than_windowed_pool(checkpoint, family):
    model, prompts = checkpoint(family), [prompt_of(230, seed=i) for i in range(3)]
    expected = alone(model, prompts, GREEDY)
    sizes = {"num_blocks": None, "kv_cache_bytes": 2**22, "block_size": 4, "max_num_seqs": 2}
    async with pair_of(model, max_num_batched_tokens=8, **sizes) as pair:
        for worker in (pair.prefill, pair.decode):
            _, windowed = worker.model.engine.pools
            assert windowed.num_blocks < 230 // 4
        answers = await asyncio.gather(*(pair.hand_over(p, GREEDY) for p in prompts))
        assert [[o.token_ids for o in a.outputs] for a in answers] == expected


@pytest.mark.parametrize("connector", mostly_slow(["grpc", "shm"], "shm"))
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
async def test_handoff_moves_fp8_cache_byte_for_byte(checkpoint, family, connector):
    model, prompts = checkpoint(family), [prompt_of(n) for n in LENGTHS]
    expected = alone(model, prompts, GREEDY, kv_cache_dtype="fp8_e4m3")
    settings = {"kv_cache_dtype": "fp8_e4m3", "decode": {"kv_connector": connector}}
    async with pair_of(model, max_num_batched_tokens=23, **settings) as pair:
        for prompt, output in zip(prompts, expected, strict=True):
            answer = await pair.hand_over(prompt, GREEDY)
            assert [o.token_ids for o in answer.outputs] == output
            engines = [w.model.engine.handle.core for w in (pair.prefill, pair.decode)]
            cached = [_cached_blocks(engine, prompt) for engine in engines]
            assert len(cached[0]) == len(prompt) // 16
            assert cached[0] == cached[1]
        layout = pair.prefill.model.engine.facts.layouts[0]
        assert layout.dtype == "float8_e4m3fn"
        if family == "llama":  # of one group
            moved = answer.kv_ready
            assert moved.num_transferred_bytes == moved.num_transferred_blocks * layout.block_bytes


def _cached_blocks(engine, prompt):
    """Returns what the cache group that sees furthest back holds of a prompt's full blocks."""
    namespace = engine.facts.info.namespace
    hashes = hash_chain(namespace.root(), prompt, namespace.block_size)
    block_ids = engine.scheduler._kv.groups[0].pool.lookup_chain(hashes)
    return [bytes(engine.cache.pools[0].read_block(block_id)) for block_id in block_ids]


@pytest.mark.parametrize("fp8_side", ["prefill", "decode"])
async def test_workers_with_other_kv_dtypes_do_not_pair(checkpoint, fp8_side):
    other = {fp8_side: {"kv_cache_dtype": "fp8_e4m3"}}
    async with pair_of(checkpoint("llama"), **other) as pair:
        handle = handle_of(pair.handle(bytes(16), 9))
        pairing = pair.decode.component(KvExchange).pairing
        unchecked = payload_request(handle, pair.decode.membership.id, pairing)
        channel = pair.decode.channels.get(pair.prefill.server.kv.endpoint)
        for call in (
            pair.to_decode.Generate(
                pair.decode_request(prompt_of(9), GREEDY, bytes(16)), timeout=TIMEOUT
            ),
            KvTransferStub(channel).Fetch(unchecked, timeout=TIMEOUT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "float8_e4m3fn" in caught.value.details()
            assert "float32" in caught.value.details()
            assert "kv_cache_dtype" in caught.value.details()


async def test_workers_with_other_windows_do_not_pair(checkpoint, tmp_path):
    config = FAMILIES["gemma3"]()
    config.sliding_window += 1
    save_random(config, tmp_path)
    async with pair_of(checkpoint("gemma3"), decode={"model": str(tmp_path)}) as pair:
        request = pair.decode_request(prompt_of(9), GREEDY, bytes(16))
        call = pair.to_decode.Generate(request, timeout=TIMEOUT)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_decode_worker_repeats_first_token_with_logprobs(checkpoint, family):
    params = SamplingParams(
        max_tokens=5, ignore_eos=True, temperature=1.0, seed=7, logprobs=True, top_logprobs=3
    )
    prompt = prompt_of(40)
    (result,) = engine_of(checkpoint(family)).generate([prompt], params)
    async with pair_of(checkpoint(family)) as pair:
        answer = await pair.hand_over(prompt, params)
    (output,) = answer.outputs
    (first,) = answer.prefill_result.first_tokens
    assert output.token_ids == list(result.token_ids)
    assert output.logprobs == pytest.approx(list(result.logprobs), abs=1e-4)
    for (ids, logprobs), expected in zip(output.top, result.completions[0].logprobs, strict=True):
        assert ids == expected.top_token_ids
        assert logprobs == pytest.approx(expected.top_logprobs, abs=1e-4)
    assert (first.token_id, first.logprob) == (output.token_ids[0], output.logprobs[0])
    assert tuple(first.top_logprobs.token_ids) == output.top[0][0]


@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("chunk", [16, 256])
async def test_prefill_worker_sends_prompt_logprobs_in_order(checkpoint, chunk, num_top):
    params = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=num_top)
    prompt = prompt_of(50)
    (result,) = engine_of(checkpoint("llama")).generate([prompt], params)
    async with pair_of(checkpoint("llama"), max_num_batched_tokens=chunk) as pair:
        for _ in range(2):  # the second time the prompt is cached, and scored all the same
            answer = await pair.hand_over(prompt, params)
            kinds = [r.WhichOneof("event") for r in answer.prefill]
            assert kinds.index("result") > len(kinds) - 3
            logprobs: list[float] = []
            tops: list[tuple[int, ...]] = []
            for message in answer.prompt_logprobs:
                assert message.position == 1 + len(logprobs)
                logprobs += message.logprobs
                tops += [tuple(m.token_ids) for m in message.top_logprobs]
            expected = [p.logprob for p in result.prompt_logprobs]
            assert len(expected) == len(prompt) - 1
            assert logprobs == pytest.approx(expected, abs=1e-4)
            assert tops == [p.top_token_ids for p in result.prompt_logprobs if num_top]


async def test_prefill_worker_sends_no_logprobs_for_one_token_prompt(checkpoint):
    params = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=2)
    async with pair_of(checkpoint("llama")) as pair:
        answer = await pair.hand_over(prompt_of(1), params)
    assert answer.prompt_logprobs == []
    assert len(answer.outputs[0].token_ids) == 3
