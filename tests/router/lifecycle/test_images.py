"""Images on their way through the router: to every worker of every attempt, within limits, and in
no record."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from baton.errors import InvalidArgumentError, OverloadedError, UnavailableError
from baton.models.images.encoder_input import EncoderInput, TensorData
from baton.rpc.encoder_inputs import encoder_input_to_message
from baton.sampling import SamplingParams
from baton.serving.deadline import Deadline
from baton.serving.tenant import Tenant
from baton_router.call.generate_call import GenerateCall
from baton_router.call.request import Request
from baton_router.lifecycle.inference import Inference
from baton_router.routing.admission.image_budget import ImageBudget
from baton_router.routing.admission.quotas import Quotas
from baton_router.routing.placement.decision import Rules
from baton_router.routing.placement.placer import Placer
from baton_router.routing.placement.record.record_file import RecordFile, RecordLimits
from baton_router.routing.placement.record.recorder import Recorder
from baton_router.text.intake import Intake
from baton_router.text.request_bounds import RequestLimits
from tests.support.router.front import inference_of
from tests.support.router.scripted import (
    READY,
    FakeFleet,
    Forever,
    card,
    decode,
    finished,
    fleet_of,
    lifecycle_of,
    prefill_behind,
    run,
    seen_of,
    tokens,
)
from tests.support.serving.credentials import Call
from tests.support.waiting import until

PIXELS = TensorData("float32", (1, 3, 50, 50), bytes(range(250)) * 120)
IMAGES = (
    EncoderInput(b"a" * 16, start=1, length=20, tensors={"pixel_values": PIXELS}),
    EncoderInput(b"b" * 16, start=30, length=4, tensors={"pixel_values": PIXELS}),
)
PROMPT = tuple(range(5, 45))


async def test_images_reach_both_workers_of_every_attempt():
    failing = decode(READY, tokens(0, 0, 1, 2), UnavailableError("the worker has stopped"))
    second = decode(READY, tokens(3, 3), tokens(4, 4), finished(), name="d1")
    async with fleet_of(prefill_behind(0, 3), failing, second) as fleet:
        seen = await run(fleet, prompt=PROMPT, encoder_inputs=IMAGES)
        requests = [*fleet.member("p0").requests, *failing.requests, *second.requests]
    assert seen.text == "abcde"
    assert len(requests) == 4
    for request in requests:
        assert list(request.encoder_inputs) == list(map(encoder_input_to_message, IMAGES))
        assert tuple(request.token_ids[: len(PROMPT)]) == PROMPT
        assert request.num_prompt_tokens == len(PROMPT)
    # Chain hashes cover the images, those of the second attempt too.
    texts = await _hashes_of(())
    for hashes in (failing.requests[0].handle.block_hashes, second.requests[0].handle.block_hashes):
        assert hashes[:32] == (await _hashes_of(IMAGES))[:32]
        assert hashes[:16] != texts[:16]


async def _hashes_of(images: tuple[EncoderInput, ...]) -> bytes:
    worker = decode(READY, tokens(0, 0, 1, 2, 3, 4), finished())
    async with fleet_of(prefill_behind(0), worker) as fleet:
        await run(fleet, prompt=PROMPT, encoder_inputs=images)
    return bytes(worker.requests[0].handle.block_hashes)


NUM_BYTES = sum(len(each.tensors["pixel_values"].data) for each in IMAGES)


class IntakeWithImages(Intake):
    """Intake whose requests all have the two images."""

    async def read(self, *args: Any) -> Request:
        return replace(await super().read(*args), encoder_inputs=IMAGES)


class IntakeOfFew(IntakeWithImages):
    """Intake of another tenant's requests."""

    async def read(self, *args: Any) -> Request:
        return replace(await super().read(*args), tenant=Tenant("few"))


def inference_with_images(fleet: FakeFleet, budget: ImageBudget) -> Inference:
    services = inference_of(fleet, Quotas())._services
    return Inference(
        replace(services, intake=IntakeWithImages(card(), RequestLimits()), images=budget), 0.0
    )


@asynccontextmanager
async def generation(inference: Inference) -> AsyncIterator[Any]:
    call = GenerateCall(PROMPT, SamplingParams(max_tokens=5))
    events = inference.generate(call, Call(), Deadline.after(9.0))
    async with aclosing(events):
        yield events


async def test_images_beyond_limit_are_refused_before_any_worker():
    worker = decode(READY, tokens(0, 0, 1, 2, 3, 4), finished())
    async with fleet_of(prefill_behind(0, 0), worker) as fleet:
        budget = ImageBudget(max_request_bytes=NUM_BYTES - 1)
        with pytest.raises(InvalidArgumentError, match=f"{NUM_BYTES} bytes.*most {NUM_BYTES - 1}"):
            async with generation(inference_with_images(fleet, budget)) as events:
                await anext(events)
        assert worker.requests == fleet.member("p0").requests == []
        assert budget.num_bytes == 0
        async with generation(inference_with_images(fleet, ImageBudget(NUM_BYTES))) as events:
            async for _ in events:
                pass
        assert len(worker.requests) == 1


async def test_images_of_requests_in_flight_share_a_budget():
    async with fleet_of(prefill_behind(0, 0), decode(READY, Forever())) as fleet:
        budget = ImageBudget(max_held_bytes=2 * NUM_BYTES - 1)
        inference = inference_with_images(fleet, budget)
        async with generation(inference) as first:
            await anext(first)
            assert budget.num_bytes == NUM_BYTES
            with pytest.raises(OverloadedError, match="encoder-input-budget-bytes"):
                async with generation(inference) as second:
                    await anext(second)
            assert (budget.num_bytes, budget.num_rejected) == (NUM_BYTES, 1)
        assert budget.num_bytes == 0


async def test_waiting_images_of_largest_tenant_give_way():
    async with fleet_of(prefill_behind(0, 0), decode(READY, Forever())) as fleet:
        budget = ImageBudget(max_held_bytes=3 * NUM_BYTES)
        many = inference_with_images(fleet, budget)
        few = Inference(replace(many._services, intake=IntakeOfFew(card(), RequestLimits())), 0.0)
        controller = many._services.admission_controller
        controller.pause()

        async def wait_for_event(inference: Inference) -> None:
            async with generation(inference) as events:
                await anext(events)

        waiting = [asyncio.create_task(wait_for_event(many)) for _ in range(3)]
        await until(lambda: controller.num_waiting == 3)
        waiting.append(asyncio.create_task(wait_for_event(few)))
        with pytest.raises(OverloadedError, match="encoder-input-budget-bytes"):
            await waiting.pop(2)
        assert (controller.num_waiting, budget.num_bytes) == (3, 3 * NUM_BYTES)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (budget.num_bytes, budget.num_rejected) == (0, 1)


async def test_images_are_in_no_record_and_no_log(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "placements"
    rules = Rules(conditional_disaggregation=False)
    recorder = Recorder(RecordFile(path, RecordLimits(files=1)), rules)
    recorder.start()
    failing = decode(READY, tokens(0, 0), UnavailableError("the worker has stopped"))
    second = decode(READY, tokens(1, 1, 2, 3, 4), finished(), name="d1")
    async with fleet_of(prefill_behind(0, 1), failing, second) as fleet:
        placer = Placer(fleet, rules, recorder)  # type: ignore[arg-type]
        lifecycle = lifecycle_of(fleet, prompt=PROMPT, encoder_inputs=IMAGES, placer=placer)
        await seen_of(lifecycle)
    recorder.stop()
    written = path.read_text() + caplog.text + repr(lifecycle.request)
    assert '"hashes"' in written
    assert len(written) < NUM_BYTES
    assert "pixel_values" not in written
