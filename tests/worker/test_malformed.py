"""Whatever arrives in place of a message is answered with a typed error, and nothing is held."""

import random

import grpc
import pytest
from google.protobuf.message import DecodeError, Message

from baton.sampling import SamplingParams
from baton.v1 import decode_pb2, kv_sharing_pb2, prefill_pb2
from baton.v1 import kv_transfer_pb2 as kv
from baton_kvtransfer.transfer_messages import handle_of
from tests.support.grids import nightly
from tests.support.kvtransfer.loopback import payload_request
from tests.support.worker.pair import Pair, pair_of
from tests.support.worker.reference import prompt_of

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
CODE = grpc.StatusCode
TYPED = {
    CODE.OK,
    CODE.INVALID_ARGUMENT,
    CODE.FAILED_PRECONDITION,
    CODE.NOT_FOUND,
    CODE.ALREADY_EXISTS,
    CODE.RESOURCE_EXHAUSTED,
    CODE.UNAVAILABLE,
    CODE.DATA_LOSS,
    CODE.DEADLINE_EXCEEDED,
}
# No lease will come for what is fetched here.
TIMEOUT = 0.15
NUM_DAMAGED = 60


def messages(pair: Pair) -> dict[str, Message]:
    """A good request of each call."""
    prompt = prompt_of(20)
    handle = pair.handle(bytes(range(16)), len(prompt))
    taken = handle_of(handle)
    fetch = payload_request(taken, pair.decode.membership.id, taken.pairing)
    return {
        "KvTransfer/Describe": kv.DescribeRequest(),
        "KvTransfer/Fetch": fetch,
        "KvTransfer/Confirm": kv.ConfirmRequest(lease_id=bytes(16), generation=1),
        "Prefill/Prefill": pair.prefill_request(
            prompt,
            GREEDY,
            decode_worker="",
            source=prefill_pb2.PrefixSource(
                worker="w", endpoint="127.0.0.1:1", epoch=1, lease_id=bytes(16), num_blocks=1
            ),
        ),
        "Decode/Generate": pair.decode_request(prompt, GREEDY, bytes(range(16))),
        "Decode/HandOver": decode_pb2.HandOverRequest(
            request_id="r", lease_id=bytes(16), claimant="decode-1"
        ),
        "KvSharing/Share": kv_sharing_pb2.ShareRequest(
            lease_id=bytes(16), block_hashes=bytes(64), claimant="prefill-1"
        ),
    }


async def answered(
    pair: Pair, call: str, request: bytes, timeout: float = TIMEOUT
) -> grpc.StatusCode:
    """Returns the status in which a call ends that is given these bytes."""
    worker = pair.decode if call.startswith("Decode") else pair.prefill
    async with grpc.aio.insecure_channel(worker.server.main.endpoint) as channel:
        streaming = channel.unary_stream(f"/baton.v1.{call}")(request, timeout=timeout)
        try:
            async for _ in streaming:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        return CODE.OK


def damaged(request: bytes, chance: random.Random) -> bytes:
    """A message with some bytes changed, left out or put in."""
    content = bytearray(request)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(content) + 1)
        match chance.randrange(4):
            case 0:
                content[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                content[place:place] = chance.randbytes(chance.randint(1, 8))
            case 2:
                del content[place : place + chance.randint(1, 8)]
            case 3:
                content[place:place] = b"\xff" * 9 + b"\x01"  # the largest number there is
    return bytes(content[: chance.choice([None, None, chance.randrange(len(content) + 1)])])


@pytest.mark.parametrize(
    "call",
    [
        "KvTransfer/Describe", "KvTransfer/Fetch", "KvTransfer/Confirm", "Prefill/Prefill",
        "Decode/Generate", "Decode/HandOver", "KvSharing/Share",
    ],
)  # fmt: skip
async def test_worker_answers_damaged_request_with_typed_error(checkpoint, call, rng):
    async with pair_of(checkpoint("llama")) as pair:
        request = messages(pair)[call].SerializeToString(deterministic=True)
        for _ in range(NUM_DAMAGED):
            content = damaged(request, rng)
            assert await answered(pair, call, content) in TYPED, content.hex()
        await pair.nothing_held()
        answer = await pair.hand_over(prompt_of(20), GREEDY)
        assert len(answer.outputs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("turn", [*range(4), *nightly(range(4, 10))])
async def test_worker_answers_many_damaged_requests_with_typed_errors(checkpoint, turn, rng):
    async with pair_of(checkpoint("llama")) as pair:
        requests = messages(pair)
        for _ in range(300):
            call = rng.choice(sorted(requests))
            content = damaged(requests[call].SerializeToString(), rng)
            assert await answered(pair, call, content) in TYPED, content.hex()


HUGE = 2**32 - 1
# Each is made by its test: some have 50,000 parts, and every process of a lane imports this module.
BOUNDLESS = {
    "tokens": lambda: kv.KvHandle(num_tokens=HUGE),
    "a block": lambda: kv.KvHandle(
        layouts=[kv.KvLayout(block_bytes=2**64 - 1, tensor_parallel_size=1)]
    ),
    "a block size of nothing": lambda: kv.KvHandle(layouts=[kv.KvLayout(tensor_parallel_size=1)]),
    "a window": lambda: kv.KvHandle(layouts=[kv.KvLayout(window=HUGE, tensor_parallel_size=1)]),
    "layers": lambda: kv.KvHandle(
        layouts=[kv.KvLayout(layers=[kv.KvLayerLayout()] * 50_000, tensor_parallel_size=1)]
    ),
    "ranks": lambda: kv.KvHandle(
        layouts=[kv.KvLayout(tensor_parallel_rank=7, tensor_parallel_size=HUGE)]
    ),
    "shapes": lambda: kv.KvHandle(
        layouts=[
            kv.KvLayout(
                layers=[kv.KvLayerLayout(num_kv_heads=i) for i in range(50_000)],
                tensor_parallel_size=1,
            )
        ]
    ),
    "groups": lambda: kv.KvHandle(layouts=[kv.KvLayout(tensor_parallel_size=1)] * 20_000),
    "an epoch": lambda: kv.KvHandle(source_epoch=2**64 - 1),
    "a version": lambda: kv.KvHandle(version=HUGE),
}


@pytest.mark.parametrize("name", BOUNDLESS)
async def test_decode_worker_refuses_boundless_numbers_in_handle(checkpoint, name):
    async with pair_of(checkpoint("llama")) as pair:
        request = pair.decode_request(prompt_of(20), GREEDY, bytes(range(16)))
        for field, value in BOUNDLESS[name]().ListFields():
            request.handle.ClearField(field.name)
            if isinstance(value, int):
                setattr(request.handle, field.name, value)
            else:
                getattr(request.handle, field.name).extend(value)
        code = await answered(pair, "Decode/Generate", request.SerializeToString(), 20.0)
        assert code in {CODE.INVALID_ARGUMENT, CODE.FAILED_PRECONDITION}


def test_damaged_request_differs_and_often_fails_to_parse(rng):
    request = bytes(range(100))
    found = [damaged(request, rng) for _ in range(200)]
    assert sum(content != request for content in found) > 190
    num_unreadable = 0
    good = decode_pb2.DecodeGenerateRequest(token_ids=range(50), request_id="r", priority=4)
    for _ in range(200):
        try:
            prefill_pb2.PrefillRequest.FromString(damaged(good.SerializeToString(), rng))
        except DecodeError:
            num_unreadable += 1
    assert 20 < num_unreadable < 190
