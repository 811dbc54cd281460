"""Encoder outputs that are held for other workers, or arrive from them: tokens as transformers'."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from baton.cluster.events.kv_events import KvEvents
from baton.engine.client import EngineClient
from baton.engine.config import EngineConfig
from baton.engine.core.process.engine_process import EngineProcess
from baton.engine.llm import LLM
from baton.engine.request import MultimodalPrompt
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJob
from baton.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from baton.models.images.encoder_input import EncoderInput
from baton.sampling import SamplingParams
from tests.support.engine.engines import load, request
from tests.support.engine.images import IMAGE_TOKEN, greedy, image, save_vision_language, words
from tests.support.engine.streams import assert_empty, read, running, settled

NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
# Small steps, so that a prompt takes several.
SIZES = {"num_blocks": 64, "block_size": 4, "free_block_margin": 0.0, "max_num_batched_tokens": 64}
TEXT = f"w3 {IMAGE_TOKEN} {words(5, 1)} {IMAGE_TOKEN} {words(6, 2)}"
IMAGES = (image(1), image(2))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    @cache
    def save(name: str) -> str:
        folder = tmp_path_factory.mktemp(name)
        save_vision_language(name, folder)
        return str(folder)

    return save


@pytest.fixture(params=["llava_clip", "qwen3_vl"])
def path(request: pytest.FixtureRequest, saved: Callable[[str], str]) -> str:
    return saved(request.param)


@pytest.fixture
def llava(saved: Callable[[str], str]) -> str:
    return saved("llava_clip")


@cache
def engine_of(path: str) -> LLM:
    return load(path, **SIZES)


@cache
def prompt_of(path: str, text: str = TEXT, num_images: int = 2) -> MultimodalPrompt:
    return engine_of(path).prompt_with_images(text, IMAGES[:num_images])


@cache
def expected(path: str, text: str = TEXT, num_images: int = 2) -> tuple[int, ...]:
    return greedy(path, text, IMAGES[:num_images], NUM_TOKENS)


def input_of(path: str, number: int) -> EncoderInput:
    return (
        engine_of(path).prompt_with_images(f"{IMAGE_TOKEN} w1", [image(number)]).encoder_inputs[0]
    )


async def answer(engine: EngineClient, path: str, name: str = "r") -> tuple[int, ...]:
    prompt = prompt_of(path)
    added = request(name, prompt.token_ids, GREEDY, encoder_inputs=prompt.encoder_inputs)
    with engine.open(added) as stream:
        return tuple(u.token_id for u in await read(stream) if u.token_id is not None)


def copy(source: EngineClient, block_ids: Any, target: EngineClient, target_ids: Any) -> None:
    assert source.encoder_pool is not None
    assert target.encoder_pool is not None
    pieces = [bytes(piece) for piece in source.encoder_pool.read_blocks(block_ids)]
    target.encoder_pool.write_blocks(target_ids, pieces)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("when", ["before", "while it waits", "after its first image"])
async def test_arrived_output_changes_no_token(serve, path, when):
    first, second = prompt_of(path).encoder_inputs
    wanted = first if when != "after its first image" else second
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(running(load(path, **SIZES)))
        target = await stack.enter_async_context(serve(path, **SIZES))
        output = await stack.enter_async_context(source.encoded("lease", EncodeJob(wanted)))
        async with target.arriving("a", EncodeJob(wanted)) as arrival:
            if when == "before":
                copy(source, output.block_ids, target, await arrival.block_ids())
                arrival.commit()
            reading = asyncio.create_task(answer(target, path))
            if when != "before":
                await until(lambda: target.reading.work_done.num_prompt_tokens >= wanted.start)
                target_ids = await arrival.block_ids()
                await settled(target)
                assert target.reading.work_done.num_prompt_tokens == wanted.start
                copy(source, output.block_ids, target, target_ids)
                arrival.commit()
            assert await reading == expected(path)
        other = first if wanted is second else second
        assert target.reading.work_done.num_encoder_tokens == other.length
        assert source.reading.work_done.num_encoder_tokens == wanted.length
        await assert_empty(target)


async def test_output_that_is_given_up_is_computed_here(serve, path):
    first, second = prompt_of(path).encoder_inputs
    async with serve(path, **SIZES) as engine:
        async with engine.arriving("a", EncodeJob(first)) as arrival:
            reading = asyncio.create_task(answer(engine, path))
            assert await arrival.block_ids()
            await until(lambda: engine.reading.stats.num_running == 1)
            assert engine.reading.work_done.num_encoder_tokens == 0
        assert await reading == expected(path)
        assert engine.reading.work_done.num_encoder_tokens == first.length + second.length
        await assert_empty(engine)


async def test_output_evicted_after_its_commit_is_computed_here(serve, path):
    first, second = prompt_of(path).encoder_inputs
    most = engine_of(path).core.facts.info.images
    assert most is not None
    sizes = SIZES | {"encoder_cache_tokens": max(most.max_tokens, first.length, second.length)}
    async with serve(path, **sizes, encoder_budget=sizes["encoder_cache_tokens"]) as engine:
        room = engine.reading.stats.num_encoder_blocks
        async with engine.arriving("a", EncodeJob(first)) as arrival:
            assert await arrival.block_ids()  # with rows that are wrong
            arrival.commit()
        for number in range(3, 3 + room):  # of other images, until none is left of it
            async with engine.encoded("b", EncodeJob(input_of(path, number))):
                pass
        with pytest.raises(NotFoundError):
            async with engine.encoded("c", EncodeJob(first), only_cached=True):
                pass
        assert await answer(engine, path) == expected(path)
        await assert_empty(engine)


async def test_text_goes_on_while_a_prompt_awaits_its_image(serve, llava):
    """The prompt begins with its image, and is first in the queue."""
    prompt = prompt_of(llava, f"{IMAGE_TOKEN} {words(4, 3)}", 1)
    (wanted,) = prompt.encoder_inputs
    async with serve(llava, **SIZES) as engine:
        async with engine.arriving("a", EncodeJob(wanted)) as arrival:
            added = request("r", prompt.token_ids, GREEDY, encoder_inputs=prompt.encoder_inputs)
            with engine.open(added):
                await arrival.block_ids()
                with engine.open(request("text", (5, 6, 7), GREEDY)) as text:
                    assert len(await read(text)) == NUM_TOKENS
                assert engine.reading.work_done.num_encoder_tokens == 0
                await settled(engine)
                assert engine.reading.stats.num_preemptions == 0
                assert engine.reading.stats.num_waiting == 1
        await assert_empty(engine)


async def test_engine_used_for_encoding_alone_shares_outputs(serve, path):
    wanted = input_of(path, 4)
    async with serve(path, **SIZES) as engine:
        async with engine.encoded("a", EncodeJob(replace(wanted, start=77))) as first:
            assert not first.was_cached
            assert len(first.block_ids) == -(-wanted.length // SIZES["block_size"])
            async with engine.encoded("b", EncodeJob(wanted)) as second:
                assert second.was_cached
                assert second.block_ids == first.block_ids
            bare = EncoderInput(wanted.content_hash, 0, wanted.length)
            async with engine.encoded("b", EncodeJob(bare), only_cached=True) as third:
                assert third.block_ids == first.block_ids
            assert engine.reading.stats.num_held_encoder_blocks == len(first.block_ids)
            assert engine.reading.idle_since is None
        work = engine.reading.work_done
        assert (work.num_steps, work.num_encoder_tokens) == (1, wanted.length)
        spent = first.times.spent
        assert work.seconds > 0
        assert spent.forward + spent.sample > 0
        await assert_empty(engine)
        assert engine.reading.idle_since is not None
        assert engine.reading.stats.num_cached_encoder_blocks == len(first.block_ids)


async def test_encode_jobs_wait_for_blocks_that_others_hold(serve, llava):
    first, second = input_of(llava, 1), input_of(llava, 2)
    sizes = SIZES | {"encoder_cache_tokens": first.length, "encoder_budget": first.length}
    async with serve(llava, **sizes) as engine, AsyncExitStack() as later:
        async with engine.encoded("a", EncodeJob(first)) as held:
            other = asyncio.create_task(
                later.enter_async_context(engine.encoded("b", EncodeJob(second)))
            )
            gone = asyncio.create_task(
                later.enter_async_context(engine.encoded("c", EncodeJob(second)))
            )
            await until(lambda: engine.reading.stats.num_waiting_encode_jobs == 2)
            assert engine.reading.stats.num_waiting_encoder_tokens == 2 * second.length
            gone.cancel()
            await until(lambda: engine.reading.stats.num_waiting_encode_jobs == 1)
            async with engine.encoded("d", EncodeJob(first)) as again:
                assert again.block_ids == held.block_ids
        output = await asyncio.wait_for(other, 30)
        assert not output.was_cached
        await later.aclose()
        await assert_empty(engine)


@pytest.mark.parametrize("is_committed", [True, False])
async def test_second_arrival_waits_for_the_end_of_the_first(serve, llava, is_committed):
    wanted = input_of(llava, 1)
    async with serve(llava, **SIZES) as engine:
        async with engine.arriving("b", EncodeJob(wanted)) as one:
            filled = await one.block_ids()
            async with AsyncExitStack() as stack:
                two = await stack.enter_async_context(engine.arriving("c", EncodeJob(wanted)))
                encoding = asyncio.create_task(
                    stack.enter_async_context(engine.encoded("a", EncodeJob(wanted)))
                )
                await settled(engine)
                assert engine.reading.stats.num_waiting_encode_jobs == 2
                if is_committed:
                    one.commit()
                    assert await two.block_ids() == ()
                    assert (await encoding).block_ids == filled
                else:
                    encoding.cancel()  # before the arrivals end, or its job would begin
                    await asyncio.gather(encoding, return_exceptions=True)
        if not is_committed:
            async with engine.arriving("c", EncodeJob(wanted)) as two:
                assert await two.block_ids()
        assert engine.reading.work_done.num_encoder_tokens == 0
        await assert_empty(engine)


async def test_flush_of_content_hash_drops_its_output_alone(serve, llava):
    first, second = input_of(llava, 1), input_of(llava, 2)
    async with serve(llava, **SIZES) as engine:
        for each in first, second:
            async with engine.encoded("a", EncodeJob(each)):
                pass
        await engine.flush_cache([first.content_hash])
        async with engine.encoded("b", EncodeJob(second), only_cached=True) as output:
            assert output.was_cached
        with pytest.raises(NotFoundError):
            async with engine.encoded("c", EncodeJob(first), only_cached=True):
                pass
        await assert_empty(engine)


async def test_cache_events_have_the_hashes_of_outputs(serve, llava):
    first, second = input_of(llava, 1), input_of(llava, 2)
    events: list[KvEvents] = []
    sizes = SIZES | {"encoder_cache_tokens": first.length, "encoder_budget": first.length}
    async with serve(llava, **sizes, on_cache_events=events.append) as engine:
        async with engine.encoded("a", EncodeJob(first)):
            await engine.flush_cache()  # does not drop what is held
            await until(lambda: any(event.cleared for event in events))
        async with engine.arriving("b", EncodeJob(second)) as arrival:
            await arrival.block_ids()
            assert events[-1].removed == (first.content_hash,)
            arrival.commit()
            await until(lambda: events[-1].stored == (second.content_hash,))
        await engine.flush_cache()
        await until(lambda: len(events) == 5)
    stored, removed = (first.content_hash,), (first.content_hash,)
    assert events == [
        KvEvents(stored, (), cleared=False),
        KvEvents(stored, (), cleared=True),
        KvEvents((), removed, cleared=False),
        KvEvents((second.content_hash,), (), cleared=False),
        KvEvents((), (), cleared=True),
    ]


async def test_encoded_refuses_what_could_not_be_computed(serve, llava, checkpoints):
    wanted = input_of(llava, 1)
    bare = EncoderInput(wanted.content_hash, 0, wanted.length)
    refused: list[tuple[EncoderInput, bool, type[Exception], str]] = [
        (bare, False, InvalidArgumentError, "encoder_input.tensors"),
        (replace(wanted, length=3), False, InvalidArgumentError, "its image has"),
        (replace(bare, length=10**9), True, InvalidArgumentError, "expected 1 to"),
        (replace(bare, content_hash=b"short"), True, InvalidArgumentError, "expected 16"),
        (bare, True, NotFoundError, "not cached"),
    ]
    async with serve(llava, **SIZES) as engine:
        for encoder_input, only_cached, kind, problem in refused:
            with pytest.raises(kind, match=problem):
                async with engine.encoded("a", EncodeJob(encoder_input), only_cached=only_cached):
                    pass
        async with engine.encoded("a", EncodeJob(wanted)):
            with pytest.raises(AlreadyExistsError, match="'a'"):
                async with engine.encoded("a", EncodeJob(wanted)):
                    pass
            with pytest.raises(InvalidArgumentError, match="has 16 rows"):
                async with engine.encoded(
                    "b", EncodeJob(replace(bare, length=5)), only_cached=True
                ):
                    pass
        await assert_empty(engine)
    async with serve(checkpoints["llama"], num_blocks=8) as text:
        assert text.encoder_pool is None
        with pytest.raises(FailedPreconditionError, match="takes no images"):
            async with text.encoded("a", EncodeJob(wanted)):
                pass


async def test_stop_ends_encode_jobs_that_wait(serve, llava):
    wanted = input_of(llava, 1)
    async with serve(llava, **SIZES) as engine, AsyncExitStack() as stack:
        await stack.enter_async_context(engine.arriving("a", EncodeJob(wanted)))
        waiting = asyncio.create_task(
            stack.enter_async_context(engine.encoded("b", EncodeJob(wanted)))
        )
        await settled(engine)
        await engine.stop()
        with pytest.raises(UnavailableError):
            await waiting


async def test_pause_computes_nothing_for_waiting_jobs(serve, llava):
    wanted = input_of(llava, 1)
    async with serve(llava, **SIZES) as engine, AsyncExitStack() as stack:
        engine.pause()
        waiting = asyncio.create_task(
            stack.enter_async_context(engine.encoded("a", EncodeJob(wanted)))
        )
        await settled(engine)
        assert engine.reading.work_done.num_encoder_tokens == 0
        engine.resume()
        assert not (await asyncio.wait_for(waiting, 30)).was_cached


async def test_encoder_pool_is_shared_where_kv_pools_are(forks, llava):
    config = EngineConfig(device="cpu", dtype="float32", num_blocks=8, shared_pools=True)
    async with running(EngineProcess.load(forks.fork(), llava, config)) as engine:
        assert engine.encoder_pool is not None
        assert engine.encoder_pool.shared is not None
        assert engine.encoder_pool.num_blocks == engine.reading.stats.num_encoder_blocks


async def test_encoder_pool_is_opened_by_handle_as_kv_pools_are(ipc, forks_by_handle, llava):
    config = EngineConfig(device="cpu", dtype="float32", num_blocks=8)
    async with running(EngineProcess.load(forks_by_handle.fork(), llava, config)) as engine:
        assert engine.encoder_pool is not None
        assert engine.encoder_pool.mapped is not None
        assert engine.encoder_pool.num_blocks == engine.reading.stats.num_encoder_blocks
        assert len(ipc.opened) == len(engine.pools) + 1
    assert not ipc.opened
