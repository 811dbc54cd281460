"""Messages of `baton.v1` to this room's data and back. The only place where the two meet."""

from baton.engine.kv_pool import KvLayout, LayerLayout
from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import prefill_pb2
from kvtransfer.handle import LEASE_ID_BYTES, FirstToken, Handle, Pairing

HANDLE_VERSION = 1
_HASH_BYTES = 16


def lease_id_of(raw: bytes) -> bytes:
    if len(raw) != LEASE_ID_BYTES:
        raise InvalidArgumentError("lease_id", f"has {len(raw)} bytes; must have {LEASE_ID_BYTES}")
    return raw


def layout_to_message(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(
        dtype=layout.dtype,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        layers=[
            pb.KvLayerLayout(
                offset=layer.offset,
                num_kv_heads=layer.num_kv_heads,
                key_head_dim=layer.key_head_dim,
                value_head_dim=layer.value_head_dim,
            )
            for layer in layout.layers
        ],
        tensor_parallel_rank=0,
        tensor_parallel_size=1,
    )


def layout_of(message: pb.KvLayout) -> KvLayout:
    if (message.tensor_parallel_rank, message.tensor_parallel_size) != (0, 1):
        raise FailedPreconditionError(
            f"the other pool is divided over {message.tensor_parallel_size} ranks, this one is not"
        )
    return KvLayout(
        message.dtype,
        message.block_size,
        message.block_bytes,
        tuple(
            LayerLayout(m.offset, m.num_kv_heads, m.key_head_dim, m.value_head_dim)
            for m in message.layers
        ),
    )


def handle_of(message: pb.KvHandle) -> Handle:
    if message.version != HANDLE_VERSION:
        raise FailedPreconditionError(
            f"the handle's version is {message.version}, this worker's is {HANDLE_VERSION}"
        )
    if message.integrity != pb.INTEGRITY_XXH3_64:
        raise FailedPreconditionError(
            f"the handle asks for integrity {message.integrity}, this connector does "
            f"{pb.INTEGRITY_XXH3_64} ({pb.Integrity.Name(pb.INTEGRITY_XXH3_64)})"
        )
    hashes = message.block_hashes
    if len(hashes) % _HASH_BYTES:
        raise InvalidArgumentError(
            "handle.block_hashes", f"has {len(hashes)} bytes; must be a multiple of {_HASH_BYTES}"
        )
    return Handle(
        source_worker=message.source_worker,
        source_endpoint=message.source_endpoint,
        source_epoch=message.source_epoch,
        lease_id=lease_id_of(message.lease_id),
        pairing=Pairing(message.fingerprint, layout_of(message.layout)),
        num_tokens=message.num_tokens,
        block_hashes=tuple(hashes[i : i + _HASH_BYTES] for i in range(0, len(hashes), _HASH_BYTES)),
    )


def fetch_request(handle: Handle, claimant: str, own: Pairing, num_held: int) -> pb.FetchRequest:
    return pb.FetchRequest(
        lease_id=handle.lease_id,
        source_epoch=handle.source_epoch,
        claimant=claimant,
        fingerprint=own.fingerprint,
        layout=layout_to_message(own.layout),
        num_held_blocks=num_held,
    )


def first_token_to_message(token: FirstToken) -> prefill_pb2.FirstToken:
    return prefill_pb2.FirstToken(
        sequence_index=0, position=token.position, token_id=token.token_id, logprob=token.logprob
    )


def first_token_of(message: prefill_pb2.PrefillResult) -> FirstToken:
    if len(message.first_tokens) != 1:
        raise FailedPreconditionError(
            f"the prefill brought {len(message.first_tokens)} sequences; this worker takes one"
        )
    token = message.first_tokens[0]
    logprob = token.logprob if token.HasField("logprob") else None
    return FirstToken(token.position, token.token_id, logprob)
