"""Streams of several sequences, and requests that end in whatever state the engine has them."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from baton.engine.client import EngineClient, SequenceStream
from baton.engine.config import EngineConfig
from baton.engine.core.commands import FailExternal
from baton.engine.core.engine_core import EngineCore, OnPlanned
from baton.engine.llm import LLM
from baton.engine.outputs import StepOutput
from baton.engine.request import EngineRequest, FinishReason, KvSource, Purpose
from baton.errors import CancelledError
from baton.sampling import SamplingParams
from tests.engine.conftest import Checkpoints
from tests.support.engine.engines import load, output_of, request
from tests.support.engine.prompts import NUM_TOKENS, random_prompt
from tests.support.engine.streams import assert_empty, read, running, settled

PROMPT = random_prompt(40)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
RANDOM = replace(GREEDY, temperature=1.5, seed=3)
SEVERAL = replace(RANDOM, n=3)
BEST = replace(RANDOM, n=2, best_of=4)
BEAMS = replace(GREEDY, beam_width=3, n=2)
SHAPES = {"one": GREEDY, "several": SEVERAL, "best": BEST, "beams": BEAMS}
TIGHT = {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 16, "max_num_seqs": 8}
MODES = {
    "recompute": {"preemption": "recompute"}, "swap": {"preemption": "swap", "swap_bytes": 2**20},
}  # fmt: skip


async def exhaust(stream: SequenceStream) -> None:
    """Reads what was told before the end, up to the error that ends it."""
    while True:
        await asyncio.wait_for(stream._next(), 30)


SIZES = {"block_size": 8, "num_blocks": 60, "max_num_seqs": 8, "max_num_batched_tokens": 16}


def make(checkpoints: Checkpoints, **changes: object) -> LLM:
    settings = {"device": "cpu", "dtype": "float32", **SIZES}
    return LLM.from_pretrained(checkpoints["llama"], EngineConfig(**{**settings, **changes}))


class StepGate:
    """A gate before each step of an engine.

    Attributes:
        is_idle: whether its loop awaits a command after the last step.
    """

    def __init__(self, core: EngineCore) -> None:
        self.is_idle = False
        self.gate = threading.Semaphore(0)
        self.stepped = threading.Semaphore(0)
        self._core, self._step = core, core.step
        core.step = self.step  # type: ignore[method-assign]

    def step(self, on_planned: OnPlanned) -> StepOutput:
        assert self.gate.acquire(timeout=60)
        try:
            output = self._step(on_planned)
            self.is_idle = not (output.made_progress and self._core.has_work)
            return output
        finally:
            self.stepped.release()


@asynccontextmanager
async def gated(engine: LLM) -> AsyncIterator[tuple[EngineClient, StepGate]]:
    gate = StepGate(engine.core)
    async with running(engine) as serving:
        try:
            yield serving, gate
        finally:
            gate.gate.release(100_000)


async def let(gate: StepGate, count: int) -> None:
    """Lets the engine take steps, and waits until it has; fewer if it has nothing to do."""
    for _ in range(count):
        gate.gate.release()
        assert await asyncio.to_thread(gate.stepped.acquire, timeout=60)
        if gate.is_idle:
            return


@pytest.mark.parametrize("name", SHAPES)
async def test_stream_yields_all_sequences_of_a_batch_run(serve, checkpoints, name):
    (expected,) = load(checkpoints["llama"]).generate([PROMPT], SHAPES[name])
    async with serve(checkpoints["llama"], **SIZES) as serving:
        with serving.open(request("a", PROMPT, SHAPES[name])) as stream:
            said = output_of(await read(stream))
        await assert_empty(serving)
    if name == "best":
        assert len(said) == 4
        assert {c.token_ids for c in expected.completions} <= set(said.values())
    else:
        assert list(said.values()) == [c.token_ids for c in expected.completions]


async def test_streams_of_all_shapes_run_together(serve, checkpoints):
    alone = {
        name: load(checkpoints["llama"]).generate([PROMPT], params)[0]
        for name, params in SHAPES.items()
    }

    async def one(serving: EngineClient, name: str, number: int) -> None:
        with serving.open(request(f"{name} {number}", PROMPT, SHAPES[name])) as stream:
            said = set(output_of(await read(stream)).values())
        assert {c.token_ids for c in alone[name].completions} <= said

    async with serve(checkpoints["llama"], **SIZES) as serving:
        await asyncio.gather(*(one(serving, name, i) for name in SHAPES for i in range(3)))
        await assert_empty(serving)


@pytest.mark.parametrize("name", ["several", "best", "beams"])
async def test_stream_of_several_sequences_closed_early_leaks_nothing(serve, checkpoints, name):
    async with serve(checkpoints["llama"], **SIZES) as serving:
        for num_read in range(12):
            with serving.open(request("a", PROMPT, SHAPES[name])) as stream:
                count = 0
                async for batch in stream.updates():
                    count += len(batch)
                    if count > num_read:
                        break
            await assert_empty(serving)


ALL_SHAPES = {**SHAPES, "prefill": GREEDY, "external": GREEDY}
PROMPTS = {name: random_prompt(20 + 7 * i, seed=i) for i, name in enumerate(ALL_SHAPES)}


@pytest.fixture(scope="module")
def alone(checkpoints: Checkpoints) -> dict[str, list[tuple[int, ...]]]:
    """Returns what each of `ALL_SHAPES` says in an engine of its own."""
    outputs = {
        name: load(checkpoints["llama"]).generate([PROMPTS[name]], params)[0]
        for name, params in ALL_SHAPES.items()
    }
    return {name: [c.token_ids for c in said.completions] for name, said in outputs.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ending", ["close", "cancel"])
async def test_requests_ended_in_any_state_leave_others_unchanged(
    checkpoints, alone, ending, mode, rng
):
    """Waiting, prefilling, decoding, preempted, swapped, awaiting KV and kept ones all end at some
    of these steps; what goes on says what it says alone. Without a margin, so that all run."""
    states: set[str] = set()
    for num_steps in (0, 1, 4, 8, 13, 18, 25, 36):
        engine = make(
            checkpoints,
            **{**TIGHT, **MODES[mode]},
            free_block_margin=0,
            prefix_caching=num_steps % 2 == 0,
        )
        async with gated(engine) as (serving, gate):
            streams = {
                name: serving.open(
                    request(
                        name,
                        PROMPTS[name],
                        params,
                        purpose=Purpose.PREFILL if name == "prefill" else Purpose.GENERATE,
                        kv_source=KvSource.EXTERNAL if name == "external" else KvSource.LOCAL,
                    )
                )
                for name, params in ALL_SHAPES.items()
            }
            await let(gate, num_steps)
            for of_one in tuple(engine.core.scheduler.requests.values()):
                states |= {s.status.name for s in of_one.sequences}
            # What keeps blocks ends in any case, or the others would wait for it.
            victims = {"prefill", "external", *rng.sample(sorted(SHAPES), 2)}
            for name in victims:
                if ending == "close":
                    serving.close_stream(name)
                    continue
                serving.cancel(name)
                with streams[name] as stream, pytest.raises(CancelledError):
                    await exhaust(stream)
            gate.gate.release(100_000)
            for name in ALL_SHAPES.keys() - victims:
                with streams[name] as stream:
                    said = output_of(await read(stream))
                    if name == "best":
                        assert set(alone[name]) <= set(said.values())
                    else:
                        assert list(said.values()) == alone[name]
            await assert_empty(serving)
    assert states >= {"WAITING", "RUNNING", "AWAITING_KV", "KEPT"}
    assert ("SWAPPED" in states) == (mode == "swap")


# KV from elsewhere. The prompt's own, computed here before, stands for it: every block is a hit.


def external(params: SamplingParams) -> EngineRequest:
    return request("a", PROMPT, params, kv_source=KvSource.EXTERNAL)


async def warm(serving: EngineClient) -> None:
    with serving.open(request("warm", PROMPT, replace(GREEDY, max_tokens=1))) as stream:
        await read(stream)


@pytest.mark.parametrize("name", SHAPES)
async def test_sequences_fork_from_external_kv(serve, checkpoints, name):
    (expected,) = load(checkpoints["llama"]).generate([PROMPT], SHAPES[name])
    async with serve(checkpoints["llama"], **SIZES) as serving:
        await warm(serving)
        for _ in range(2):
            with serving.open(external(SHAPES[name])) as stream:
                allocation = await asyncio.wait_for(stream.allocation(), 30)
                assert allocation.num_hit_blocks == 5
                stream.commit_external(None)
                updates = await read(stream)
            said = output_of(updates)
            assert {c.token_ids for c in expected.completions} <= set(said.values())
            assert len(said) == (4 if name == "best" else len(expected.completions))
            await assert_empty(serving)


async def test_commit_external_passes_on_the_logprob(serve, checkpoints):
    params = replace(GREEDY, max_tokens=1, logprobs=True)
    async with serve(checkpoints["llama"], **SIZES) as serving:
        await warm(serving)
        for logprob in (-1.25, None):
            with serving.open(external(params)) as stream:
                await stream.allocation()
                stream.commit_external(9, logprob)
                (update,) = await read(stream)
            assert (update.token_id, update.logprob) == (9, logprob)
            assert update.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("name", SHAPES)
async def test_fail_external_recomputes_the_prompt(serve, checkpoints, name):
    (expected,) = load(checkpoints["llama"]).generate([PROMPT], SHAPES[name])
    async with serve(checkpoints["llama"], **SIZES) as serving:
        with serving.open(external(SHAPES[name])) as stream:
            await asyncio.wait_for(stream.allocation(), 30)
            for _ in range(2):
                serving.submit(FailExternal("a"))
            # Too late: it goes on by itself.
            stream.commit_external(3)
            said = output_of(await read(stream))
        assert {c.token_ids for c in expected.completions} <= set(said.values())
        await assert_empty(serving)
        serving.submit(FailExternal("unknown"))
        await assert_empty(serving)


async def test_fail_external_after_commit_changes_nothing(serve, checkpoints, oracle):
    expected = oracle(checkpoints["llama"], PROMPT, NUM_TOKENS)
    async with serve(checkpoints["llama"], **SIZES) as serving:
        await warm(serving)
        with serving.open(external(GREEDY)) as stream:
            await stream.allocation()
            stream.commit_external(expected[0])
            stream.commit_external(7)
            serving.submit(FailExternal("a"))
            updates = await read(stream)
        assert tuple(u.token_id for u in updates) == expected[1:]
        assert [u.position for u in updates] == list(range(1, NUM_TOKENS))
        await assert_empty(serving)


@pytest.mark.parametrize("name", SHAPES)
async def test_stream_closed_while_awaiting_kv_frees_its_blocks(serve, checkpoints, name):
    async with serve(checkpoints["llama"], **SIZES) as serving:
        for _ in range(3):
            with serving.open(external(SHAPES[name])) as stream:
                await asyncio.wait_for(stream.allocation(), 30)
                assert serving.reading.stats.num_awaiting_kv == 1
            await assert_empty(serving)
            with serving.open(external(SHAPES[name])) as stream:
                await asyncio.wait_for(stream.allocation(), 30)
                stream.commit_external(None)
            await assert_empty(serving)


async def test_prefill_of_several_sequences_yields_one_token(serve, checkpoints):
    async with serve(checkpoints["llama"], **SIZES) as serving:
        for name in ("several", "best", "beams"):
            with serving.open(
                request("a", PROMPT, SHAPES[name], purpose=Purpose.PREFILL)
            ) as stream:
                updates = await read(stream)
                assert [len(ids) for ids in output_of(updates).values()] == [1]
                assert updates[-1].finish_reason is FinishReason.PREFILLED
                await settled(serving)
                assert serving.reading.stats.num_kept == 1
            await assert_empty(serving)


@pytest.mark.parametrize("mode", MODES)
async def test_streams_in_a_small_pool_never_stall(checkpoints, mode):
    """The engine follows a step in which a sequence only makes room by another, unasked."""
    names = [*SHAPES, *SHAPES]
    prompts = [random_prompt(40, seed=i) for i in range(len(names))]
    plain = load(checkpoints["llama"])
    alone = [plain.generate([p], SHAPES[n])[0] for p, n in zip(prompts, names, strict=True)]
    for caching in (True, False):
        engine = make(checkpoints, **{**TIGHT, **MODES[mode]}, prefix_caching=caching)
        async with running(engine) as serving:
            streams = [
                serving.open(request(str(i), prompts[i], SHAPES[name]))
                for i, name in enumerate(names)
            ]
            for expected, stream in zip(alone, streams, strict=True):
                with stream:
                    said = set(output_of(await read(stream)).values())
                assert {c.token_ids for c in expected.completions} <= said
            assert serving.reading.stats.num_preemptions > 0
            await assert_empty(serving)
