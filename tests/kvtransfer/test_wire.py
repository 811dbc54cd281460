import pytest
from loopback import LAYOUT, LEASE

from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.v1 import kv_transfer_pb2 as pb
from kvtransfer.wire import handle_of, layout_of, layout_to_message


def handle(**changes: object) -> pb.KvHandle:
    fields: dict[str, object] = {
        "version": 1,
        "lease_id": LEASE,
        "fingerprint": b"model",
        "layout": layout_to_message(LAYOUT),
        "num_tokens": 9,
        "block_hashes": bytes(32),
        "integrity": pb.INTEGRITY_XXH3_64,
    }
    return pb.KvHandle(**{**fields, **changes})


def test_a_layout_survives_its_message():
    assert layout_of(layout_to_message(LAYOUT)) == LAYOUT


def test_a_handle_survives_its_message():
    read = handle_of(handle())
    assert (read.lease_id, read.pairing.layout, read.num_tokens) == (LEASE, LAYOUT, 9)
    assert read.block_hashes == (bytes(16), bytes(16))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": 2}, "version is 2, this worker's is 1"),
        ({"integrity": pb.INTEGRITY_UNSPECIFIED}, "asks for integrity 0"),
        ({"integrity": pb.INTEGRITY_FENCE}, "asks for integrity 2"),
        ({"integrity": 99}, "asks for integrity 99"),
        ({"layout": pb.KvLayout(tensor_parallel_size=4)}, "4 ranks"),
    ],
    ids=["version", "no integrity", "fence", "unknown integrity", "tensor parallel"],
)
def test_a_handle_this_worker_cannot_honour_is_refused(changes, named):
    with pytest.raises(FailedPreconditionError, match=named):
        handle_of(handle(**changes))


def test_hashes_that_are_no_whole_number_are_refused():
    with pytest.raises(InvalidArgumentError, match="block_hashes"):
        handle_of(handle(block_hashes=bytes(17)))
