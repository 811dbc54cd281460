"""Images on their way through the router: to every worker of every attempt, and in no record."""

from baton.encoder_input import EncoderInput, TensorData
from baton.encoder_input_wire import to_proto
from baton.errors import UnavailableError
from tests.support.router.scripted import (
    READY,
    decode,
    finished,
    fleet_of,
    prefill_behind,
    run,
    tokens,
)

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
        assert list(request.encoder_inputs) == list(map(to_proto, IMAGES))
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
