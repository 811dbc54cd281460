"""Prompts with images through the router's request lifecycle and the workers of both roles: tokens
equal to those of transformers, however a request is moved."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from PIL import Image

from baton.engine import LLM, EngineConfig
from baton.errors import BatonError, FailedPreconditionError, InvalidArgumentError
from baton.models.images.encoder_input import EncoderInput, TensorData
from baton.rpc.encoder_inputs import encoder_input_to_message
from baton.rpc.errors import error_of
from baton.sampling import SamplingParams
from baton.v1 import prefill_pb2
from baton_router.routing.placement.decision import DEFAULT_RULES
from tests.support.engine.images import (
    IMAGE_TOKEN,
    TOKENS_PER_IMAGE,
    greedy,
    image,
    save_vision_language,
    words,
)
from tests.support.failures import failure_of
from tests.support.router.scripted import HANDOFFS
from tests.support.waiting import until
from tests.support.worker.crew import crew_of
from tests.support.worker.fleet import Request, WorkerFleet, fleet_of_workers
from tests.support.worker.pair import TIMEOUT, Pair, pair_of, rest_of

Given = tuple[str, tuple[Image.Image, ...]]

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
# Spans begin and end within blocks of 16 tokens. Text follows each: after an image at the end of a
# prompt, `generate` of transformers' Qwen2.5-VL differs from its own forward without a cache.
PROMPTS: list[Given] = [
    (f"{words(7, 1)} {IMAGE_TOKEN} {words(5, 2)}", (image(1),)),
    (f"{IMAGE_TOKEN} {words(9, 3)} {IMAGE_TOKEN} {words(3, 4)}", (image(1), image(2))),
    (f"{words(20, 5)} {IMAGE_TOKEN} {words(1, 6)}", (image(3),)),
    (f"{words(4, 7)} {IMAGE_TOKEN} {words(1, 8)} {IMAGE_TOKEN} {words(9, 9)}", (image(6),) * 2),
]
ONE_OF_EACH, TWO_DECODE = ("prefill", "decode"), ("prefill", "decode", "decode")


class Model:
    """Checkpoint with an engine that makes prompts of texts and images."""

    def __init__(self, path: str) -> None:
        self.path = path
        config = EngineConfig(device="cpu", dtype="float32", num_blocks=96, max_num_seqs=8)
        self.engine = LLM.from_pretrained(path, config)

    def request(self, fleet: WorkerFleet, given: Given, params: SamplingParams = GREEDY) -> Request:
        prompt = self.engine.prompt_with_images(*given)
        tokens, inputs = list(prompt.token_ids), prompt.encoder_inputs
        rules = HANDOFFS if any(m.role == "prefill" for m in fleet.members) else DEFAULT_RULES
        return Request(fleet, tokens, params, rules, inputs)

    def expected(self, given: Given) -> list[tuple[int, ...]]:
        return [greedy(self.path, *given, NUM_TOKENS)]


@pytest.fixture(
    scope="module", params=["llava_clip", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    save_vision_language(request.param, folder)
    return Model(str(folder))


def said(request: Request) -> list[tuple[int, ...]]:
    return [tuple(completion.token_ids) for completion in request.answer[0]]


def usage_of(request: Request) -> Any:
    assert request.progress.finished is not None
    return request.progress.finished.usage


async def run_all(requests: list[Request]) -> None:
    await asyncio.gather(*(request.run() for request in requests))


@pytest.mark.parametrize("roles", [ONE_OF_EACH, ("decode",)], ids=["handoff", "decode-alone"])
async def test_images_answer_as_transformers_over_workers(model, roles):
    async with fleet_of_workers(model.path, *roles, max_num_batched_tokens=13) as fleet:
        for _ in range(2):  # the second time from the prefix caches
            requests = [model.request(fleet, given) for given in PROMPTS]
            await run_all(requests)
            assert list(map(said, requests)) == list(map(model.expected, PROMPTS))


async def test_equal_images_hit_caches_of_both_roles_and_others_miss(model):
    text = f"{words(5, 1)} {IMAGE_TOKEN} {words(30, 2)}"
    async with fleet_of_workers(model.path, *ONE_OF_EACH) as fleet:
        usages = []
        for seed in (1, 1, 2):
            request = model.request(fleet, (text, (image(seed),)))
            await request.run()
            assert said(request) == model.expected((text, (image(seed),)))
            usages.append(usage_of(request))
    num_blocks = (35 + TOKENS_PER_IMAGE) // 16
    assert [u.num_cached_prompt_tokens for u in usages] == [0, 16 * num_blocks, 0]
    assert [u.num_reused_decode_blocks for u in usages] == [0, num_blocks, 0]


@pytest.mark.parametrize("roles", [ONE_OF_EACH, ("decode",)], ids=["handoff", "decode-alone"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, n=3, temperature=0.9, seed=4),
        SamplingParams(max_tokens=12, ignore_eos=True, n=2, beam_width=3),
    ],
    ids=["samples", "beams"],
)
async def test_several_sequences_share_a_prompt_with_images(model, roles, params):
    prompts = [model.engine.prompt_with_images(*given) for given in PROMPTS]
    expected = [
        [tuple(c.token_ids) for c in result.completions]
        for result in model.engine.generate(prompts, params)
    ]
    async with fleet_of_workers(model.path, *roles) as fleet:
        requests = [model.request(fleet, given, params) for given in PROMPTS]
        await run_all(requests)
        assert list(map(said, requests)) == expected


@pytest.mark.parametrize(
    "preemption", ["recompute", pytest.param("swap", marks=pytest.mark.nightly), "return"]
)
async def test_preemption_on_decode_worker_keeps_images(model, preemption):
    # Two of four requests begin, and have no room to end; no prefix is found cached. The first is
    # ahead: it needs a block before the second does, which is preempted; a sequence that itself
    # needs a block is never swapped.
    tight = {"num_blocks": 7, "preemption": preemption, "swap_bytes": 2**20}
    settings = {**tight, "prefix_caching": False, "prefill": {"num_blocks": 96}}
    async with fleet_of_workers(model.path, *ONE_OF_EACH, **settings) as fleet:
        requests = [model.request(fleet, given) for given in PROMPTS]
        first, *others = requests
        with fleet.member("decode-0").slowed():
            running = asyncio.create_task(first.run())
            await until(lambda: first.progress.num_received >= 3)
            await run_all(others)
            await running
        assert list(map(said, requests)) == list(map(model.expected, PROMPTS))
        stats = fleet.member("decode-0").stats
    of_mode = {
        "recompute": stats.num_recomputes, "swap": stats.num_swaps, "return": stats.num_returns
    }  # fmt: skip
    assert of_mode[preemption] > 0


async def test_live_migration_moves_images_with_their_request(model):
    """The second decode worker has the KV, and the tensors for a preemption after."""
    async with fleet_of_workers(model.path, *TWO_DECODE) as fleet:
        decode, prefill = fleet.member("decode-0"), fleet.member("prefill-0")
        requests = [model.request(fleet, given) for given in PROMPTS]
        with decode.slowed():
            tasks = [asyncio.create_task(request.run()) for request in requests]
            await until(lambda: all(r.progress.num_received >= 5 for r in requests))
            before = prefill.stats.num_computed_tokens
            await decode.drain()
            await asyncio.gather(*tasks)
        assert list(map(said, requests)) == list(map(model.expected, PROMPTS))
        assert [request.num_migrations for request in requests] == [1] * len(PROMPTS)
        assert prefill.stats.num_computed_tokens == before


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_images_survive_the_loss_of_a_worker(model, name):
    roles = ("prefill", "prefill", "decode", "decode")
    async with fleet_of_workers(model.path, *roles, max_num_batched_tokens=8) as fleet:
        lost = fleet.member(name)
        requests = [model.request(fleet, given) for given in PROMPTS]
        with lost.slowed():
            tasks = [asyncio.create_task(request.run()) for request in requests]
            begun = 0 if lost.role == "prefill" else 5
            await until(lambda: lost.stats.num_computed_tokens > 16)
            await until(lambda: all(r.progress.num_received >= begun for r in requests))
            await lost.kill()
            await asyncio.gather(*tasks)
        assert list(map(said, requests)) == list(map(model.expected, PROMPTS))
        assert sum(request.num_migrations for request in requests) > 0


@pytest.mark.parametrize("num_blocks", [1, 2])
async def test_prefix_fetch_ends_within_an_image(model, num_blocks):
    """The rest of the image is computed from its tensors."""
    given = (f"{words(9, 1)} {IMAGE_TOKEN} {words(30, 2)}", (image(1),))
    prompt = model.engine.prompt_with_images(*given)
    tokens, inputs = list(prompt.token_ids), prompt.encoder_inputs
    fields = {"encoder_inputs": [encoder_input_to_message(each) for each in inputs]}
    images = [each.hashed for each in inputs]
    async with crew_of(model.path, "prefill", "prefill") as crew:
        holder, computing = crew.members
        await holder.first_token(tokens, **fields)
        call, lease_id = holder.share(tokens[: 16 * num_blocks], computing.id, images=images)
        assert (await call.read()).shared.num_blocks == num_blocks
        source = holder.source(lease_id, num_blocks)
        result = await computing.first_token(tokens, source, **fields)
        call.cancel()
        assert result.num_cached_tokens == computing.num_pulled_tokens == 16 * num_blocks
        assert result.first_tokens[0].token_id == model.expected(given)[0][0]


async def test_samples_about_images_resume_on_another_worker(model):
    """The other decode worker gets the tokens of each sample, and takes the prompt over again."""
    params = replace(GREEDY, n=2, temperature=0.9, seed=4)
    prompts = [model.engine.prompt_with_images(*given) for given in PROMPTS]
    expected = [
        [tuple(c.token_ids) for c in result.completions]
        for result in model.engine.generate(prompts, params)
    ]
    async with fleet_of_workers(model.path, *TWO_DECODE) as fleet:
        lost = fleet.member("decode-0")
        requests = [model.request(fleet, given, params) for given in PROMPTS]
        with lost.slowed():
            tasks = [asyncio.create_task(request.run()) for request in requests]
            await until(lambda: all(r.progress.num_received >= 10 for r in requests))
            await lost.kill()
            await asyncio.gather(*tasks)
        assert list(map(said, requests)) == expected
        assert [request.num_migrations for request in requests] == [1] * len(PROMPTS)


async def test_client_resumes_answer_about_images_at_other_router(model):
    async with fleet_of_workers(model.path, *ONE_OF_EACH) as fleet:
        requests = [model.request(fleet, given) for given in PROMPTS]
        with fleet.member("decode-0").slowed():
            tasks = [asyncio.create_task(request.run()) for request in requests]
            await until(lambda: all(r.progress.num_received >= 5 for r in requests))
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request in requests:
            request.resume()
        await run_all(requests)
        assert list(map(said, requests)) == list(map(model.expected, PROMPTS))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"content_hash": b"short"}, r"encoder_inputs\[1\].content_hash"),
    ({"start": 3}, r"encoder_inputs\[1\]"),
    ({"start": 2**32 - 1}, r"encoder_inputs\[1\]"),
    ({"length": 0}, r"encoder_inputs\[1\]"),
    ({"length": 3}, r"encoder_inputs\[1\]"),
    ({"tensors": {}}, r"encoder_inputs\[1\].tensors"),
    ({"tensors": {"pixel_values": TensorData("int64", (1,), b"")}}, "encoder_inputs"),
    ({"start": 26}, r"token_ids\[.*\]"),
]


async def test_workers_refuse_images_by_field(model):
    prompt = model.engine.prompt_with_images(*PROMPTS[1])
    async with pair_of(model.path) as pair:
        for changes, field in REFUSED:
            inputs = [*prompt.encoder_inputs]
            inputs[1] = replace(inputs[1], **changes)
            tokens = list(prompt.token_ids)
            await check_refused(pair, tokens, inputs, InvalidArgumentError, field)


async def test_workers_refuse_images_of_model_without(model, checkpoint):
    prompt = model.engine.prompt_with_images(*PROMPTS[0])
    async with pair_of(checkpoint("llama")) as pair:
        given = list(prompt.token_ids), prompt.encoder_inputs
        await check_refused(pair, *given, FailedPreconditionError, "takes no images")


async def check_refused(
    pair: Pair,
    tokens: list[int],
    inputs: Sequence[EncoderInput],
    error: type[BatonError],
    match: str,
) -> None:
    """Checks that both workers refuse a prompt with these images, the decode worker also where it
    would fetch its KV."""
    requests: list[Any] = [pair.prefill_request(tokens, GREEDY)]
    requests += [pair.decode_request(tokens, GREEDY, lease) for lease in (None, bytes(16))]
    for request in requests:
        request.encoder_inputs.extend(map(encoder_input_to_message, inputs))
        is_prefill = isinstance(request, prefill_pb2.PrefillRequest)
        method = pair.to_prefill.Prefill if is_prefill else pair.to_decode.Generate
        failure = await failure_of(method(request, timeout=TIMEOUT))
        assert isinstance(failure, error), match
        assert re.search(match, str(failure))


async def test_worker_takes_large_messages_for_their_images_alone(model):
    limits = {"max_message_bytes": 4096, "max_encoder_input_bytes": 2**22}
    (given, *_) = PROMPTS
    prompt = model.engine.prompt_with_images(*given)
    images = list(map(encoder_input_to_message, prompt.encoder_inputs))
    async with crew_of(model.path, "prefill", "decode", **limits) as crew:
        prefill, decode = crew.members
        assert sum(image.ByteSize() for image in images) > 4096
        fields = {"encoder_inputs": images}
        result = await prefill.first_token(list(prompt.token_ids), **fields)
        assert result.first_tokens[0].token_id == model.expected(given)[0][0]
        for tokens, field in (([5] * 2**21, "token_ids"), ([500] * 2**22, "request")):
            request = prefill.prefill_request(tokens, **fields)
            for method in (prefill.prefill.Prefill, decode.prefill.Prefill):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await rest_of(method(request, timeout=TIMEOUT))
                error = error_of(refused.value)
                assert isinstance(error, InvalidArgumentError)
                assert error.field == field
