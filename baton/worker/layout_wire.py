"""KV layouts as messages of `baton.v1`."""

from collections.abc import Iterable

from baton.engine.executor.cache.kv_layout import KvLayout, LayerLayout
from baton.errors import FailedPreconditionError
from baton.v1 import kv_transfer_pb2 as pb


def layout_to_message(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(
        dtype=layout.dtype,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        layers=[
            pb.KvLayerLayout(
                offset=layer.key_offset,
                value_offset=layer.value_offset,
                head_stride=layer.head_stride,
                num_kv_heads=layer.num_kv_heads,
                key_head_dim=layer.key_head_dim,
                value_head_dim=layer.value_head_dim,
            )
            for layer in layout.layers
        ],
        tensor_parallel_rank=0,
        tensor_parallel_size=1,
        window=layout.window,
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
            LayerLayout(
                m.offset,
                m.value_offset,
                m.head_stride,
                m.num_kv_heads,
                m.key_head_dim,
                m.value_head_dim,
            )
            for m in message.layers
        ),
        message.window if message.HasField("window") else None,
    )


def layouts_to_messages(layouts: Iterable[KvLayout]) -> list[pb.KvLayout]:
    return list(map(layout_to_message, layouts))


def serialize_layouts(layouts: Iterable[KvLayout]) -> bytes:
    """Returns the layouts as a worker's record has them; equal bytes for equal layouts."""
    message = pb.KvLayouts(layouts=layouts_to_messages(layouts))
    return message.SerializeToString(deterministic=True)


def layouts_of(messages: Iterable[pb.KvLayout]) -> tuple[KvLayout, ...]:
    return tuple(map(layout_of, messages))
