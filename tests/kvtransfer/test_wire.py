import pytest
import torch

from baton.engine.executor.cache.kv_layout import KvShape, plan_layout
from baton.engine.scheduler.plan import TokenLogprobs
from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import prefill_pb2
from baton.worker.engine_messages import layouts_of, layouts_to_messages, serialize_layouts
from baton.worker.pairing import Pairing
from baton_kvtransfer.lease.handle import FirstToken
from baton_kvtransfer.transfer_messages import first_token_of, first_token_to_message, handle_of
from tests.support.kvtransfer.loopback import HYBRID, LEASE


def handle(**changes: object) -> pb.KvHandle:
    fields: dict[str, object] = {
        "version": 1,
        "lease_id": LEASE,
        "baton_version": "1.2.3",
        "fingerprint": b"model",
        "layouts": layouts_to_messages(HYBRID),
        "num_tokens": 9,
        "block_hashes": bytes(32),
        "integrity": pb.INTEGRITY_XXH3_64,
    }
    return pb.KvHandle(**{**fields, **changes})


def test_kv_layouts_round_trip_through_messages():
    assert layouts_of(layouts_to_messages(HYBRID)) == HYBRID
    assert layouts_of(pb.KvLayouts.FromString(serialize_layouts(HYBRID)).layouts) == HYBRID


def test_pairing_refuses_layout_with_heads_of_token_together():
    """That of versions before blocks were head-major, with the same shapes and size."""
    ours = plan_layout([KvShape(2, 8, 8)] * 2, torch.float32, 4)
    layers = [
        pb.KvLayerLayout(offset=i * 512, num_kv_heads=2, key_head_dim=8, value_head_dim=8)
        for i in range(2)
    ]
    older = pb.KvLayout(
        dtype="float32", block_size=4, block_bytes=1024, layers=layers, tensor_parallel_size=1
    )
    assert older.block_bytes == ours.block_bytes
    theirs = Pairing("1.2.3", b"model", layouts_of([older]))
    with pytest.raises(FailedPreconditionError, match=r"every 512 bytes.* every 0 bytes"):
        Pairing("1.2.3", b"model", (ours,)).check(theirs, "prefill-0")


@pytest.mark.parametrize(
    "logprobs",
    [None, TokenLogprobs(-1.5), TokenLogprobs(0.0), TokenLogprobs(-1.5, (3, 7), (-0.5, -1.5))],
)
def test_first_token_round_trips_through_message(logprobs):
    token = FirstToken(3, 42, logprobs)
    result = prefill_pb2.PrefillResult(first_tokens=[first_token_to_message(token)])
    assert first_token_of(result) == token


def test_prefill_result_holds_at_most_one_first_token():
    assert first_token_of(prefill_pb2.PrefillResult()) is None
    result = prefill_pb2.PrefillResult(first_tokens=[prefill_pb2.FirstToken()] * 2)
    with pytest.raises(FailedPreconditionError, match="brought 2 sequences"):
        first_token_of(result)


def test_handle_round_trips_through_message():
    read = handle_of(handle())
    assert (read.lease_id, read.num_tokens) == (LEASE, 9)
    assert read.pairing == Pairing("1.2.3", b"model", HYBRID)
    assert read.block_hashes == (bytes(16), bytes(16))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": 2}, "version is 2, this worker's is 1"),
        ({"integrity": pb.INTEGRITY_UNSPECIFIED}, "asks for integrity 0"),
        ({"integrity": 99}, "asks for integrity 99"),
        ({"layouts": [pb.KvLayout(tensor_parallel_size=4)]}, "4 ranks"),
    ],
    ids=["version", "no integrity", "unknown integrity", "tensor parallel"],
)
def test_handle_is_refused_when_worker_cannot_honour_it(changes, named):
    with pytest.raises(FailedPreconditionError, match=named):
        handle_of(handle(**changes))


def test_handle_is_refused_with_partial_block_hash():
    with pytest.raises(InvalidArgumentError, match="block_hashes"):
        handle_of(handle(block_hashes=bytes(17)))
