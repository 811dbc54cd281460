"""Refusals of both workers before anything is computed, and their descriptions of themselves."""

from baton.engine.config import EngineConfig
from baton.engine.scheduler.scheduling.policy import POLICIES
from baton.engine.scheduler.sequences.config import Preemption
from baton.errors import (
    ContextLengthError,
    EngineLimitError,
    FailedPreconditionError,
    InvalidArgumentError,
    OverloadedError,
)
from baton.sampling import Grammar, GrammarKind, SamplingParams
from baton.v1 import admin_pb2, prefill_pb2
from baton.worker.settings import WorkerSettings
from tests.support.failures import failure_of
from tests.support.worker.pair import TIMEOUT, pair_of
from tests.support.worker.reference import alone, prompt_of

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
BROKEN = SamplingParams(max_tokens=6, grammar=Grammar(GrammarKind.REGEX, "(["))


async def test_workers_refuse_grammar_that_does_not_compile(checkpoint):
    async with pair_of(checkpoint("tiny")) as pair:
        for call in (
            pair.to_prefill.Prefill(pair.prefill_request(prompt_of(9), BROKEN), timeout=TIMEOUT),
            pair.to_decode.Generate(pair.decode_request(prompt_of(9), BROKEN), timeout=TIMEOUT),
        ):
            failure = await failure_of(call)
            assert isinstance(failure, InvalidArgumentError)
            assert failure.field.startswith("sampling.grammar")


async def test_workers_refuse_parameters_beyond_bounds(checkpoint):
    async with pair_of(checkpoint("tiny")) as pair:
        prefill = pair.prefill_request(prompt_of(9), GREEDY)
        decode = pair.decode_request(prompt_of(9), GREEDY)
        for method, request in (
            (pair.to_prefill.Prefill, prefill),
            (pair.to_decode.Generate, decode),
        ):
            request.sampling.temperature = -1.0
            failure = await failure_of(method(request, timeout=TIMEOUT))
            assert isinstance(failure, InvalidArgumentError)
            assert failure.field == "sampling.temperature"


async def test_prefill_worker_refuses_to_pool_by_name_of_model(checkpoint):
    async with pair_of(checkpoint("llama")) as pair:
        request = prefill_pb2.PoolRequest(request_id="r", token_ids=prompt_of(9))
        failure = await failure_of(pair.to_prefill.Pool(request, timeout=TIMEOUT))
    assert isinstance(failure, FailedPreconditionError)
    assert "has no pooled output" in str(failure)


async def test_prefill_worker_refuses_several_sequences(checkpoint):
    several = SamplingParams(max_tokens=6, temperature=1.0, n=2)
    async with pair_of(checkpoint("llama")) as pair:
        request = pair.prefill_request(prompt_of(9), GREEDY)
        request.sampling.n = 2
        request.sampling.temperature = several.temperature
        failure = await failure_of(pair.to_prefill.Prefill(request, timeout=TIMEOUT))
    assert isinstance(failure, InvalidArgumentError)
    assert failure.field == "sampling.n"


async def test_decode_worker_refuses_more_sequences_than_it_runs(checkpoint):
    many = SamplingParams(max_tokens=6, temperature=1.0, n=9)
    async with pair_of(checkpoint("llama")) as pair:
        call = pair.to_decode.Generate(pair.decode_request(prompt_of(9), many), timeout=TIMEOUT)
        failure = await failure_of(call)
    assert isinstance(failure, EngineLimitError)
    assert failure.field == "sampling.n"


async def test_workers_call_refusals_by_own_pool_limits_by_name(checkpoint):
    beams = SamplingParams(max_tokens=6, beam_width=4)
    async with pair_of(checkpoint("llama"), num_blocks=10) as pair:
        prefill = pair.prefill_request(prompt_of(161), GREEDY)
        long, wide = (
            pair.decode_request(prompt_of(161), GREEDY),
            pair.decode_request(prompt_of(40), beams),
        )
        for call in (
            pair.to_prefill.Prefill(prefill, timeout=TIMEOUT),
            pair.to_decode.Generate(long, timeout=TIMEOUT),
            pair.to_decode.Generate(wide, timeout=TIMEOUT),
        ):
            assert isinstance(await failure_of(call), EngineLimitError)


async def test_prefill_worker_bounds_prompt_alone_by_its_length(checkpoint):
    async with pair_of(checkpoint("llama"), prefill={"max_model_len": 48}) as pair:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        prompt = prompt_of(47)
        answer = await pair.hand_over(prompt, params)
        assert answer.outputs[0].token_ids == alone(checkpoint("llama"), [prompt], params)[0][0]
        long = pair.prefill_request(prompt_of(48), params)
        failure = await failure_of(pair.to_prefill.Prefill(long, timeout=TIMEOUT))
        assert isinstance(failure, ContextLengthError)


async def test_promised_capacity_counts_shared_prompt_once(checkpoint):
    several = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, n=4)
    async with pair_of(checkpoint("llama"), decode={"admit_factor": 0.15}) as pair:
        holding = pair.to_decode.Generate(
            pair.decode_request(prompt_of(100), several), timeout=TIMEOUT
        )
        assert (await holding.read()).HasField("admitted")
        load = await pair.decode_admin.GetLoad(admin_pb2.GetLoadRequest())
        assert load.num_promised_blocks == 7 + 3
        request = pair.decode_request(prompt_of(80), GREEDY)
        failure = await failure_of(pair.to_decode.Generate(request, timeout=TIMEOUT))
        assert isinstance(failure, OverloadedError)
        assert "5 more KV blocks were asked for and 10 of 14 are promised" in str(failure)
        holding.cancel()


async def test_worker_load_counts_blocks_of_all_cache_groups(checkpoint):
    async with pair_of(checkpoint("gemma3"), num_blocks=40) as pair:
        for admin in (pair.prefill_admin, pair.decode_admin):
            load = await admin.GetLoad(admin_pb2.GetLoadRequest())
            assert (load.state, load.num_blocks) == (admin_pb2.WORKER_STATE_READY, 80)
            assert load.num_held_blocks == load.num_leases == load.num_promised_blocks == 0


def test_worker_settings_offer_what_the_engine_has():
    fields = WorkerSettings.model_fields
    assert {WorkerSettings(policy=name).engine_config().policy for name in POLICIES} == {*POLICIES}
    assert set(fields["preemption"].annotation.__args__) == {mode.value for mode in Preemption}
    assert WorkerSettings().engine_config() == EngineConfig(shared_pools=True)


def test_worker_settings_reach_engine():
    given = {
        "policy": "deadline",
        "max_cache_reads": 1000,
        "long_prefill_threshold": 64,
        "free_block_margin": 0.3,
        "full_sequence_must_fit": True,
        "preemption": "swap",
        "swap_bytes": 1 << 20,
        "max_drafts": 4,
        "speculate": False,
    }
    config = WorkerSettings(**given).engine_config()
    assert {name: getattr(config, name) for name in given} == given
