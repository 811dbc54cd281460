"""Engine facts: the properties of a loaded engine and its model that never change. Plain data."""

from dataclasses import dataclass

from baton.cluster.prefix import PrefixNamespace
from baton.context_length import ContextLength
from baton.engine.executor.cache.kv_layout import KvLayout
from baton.models.images.image_format import ImageFormat
from baton.models.pooling import Pooling


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a loaded model.

    Attributes:
        dtype: of its weights, such as "float32".
        content: hash of its configuration, its dtype and every byte of its weights: two engines of
            the same content serve the same model, however they compute it.
        fingerprint: hash of content and execution; engines exchange KV only if theirs are equal.
        pooling: its pooled output; None: it generates.
        images: the images that it takes in prompts; None: it takes none.
    """

    name: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    content: bytes
    fingerprint: bytes
    namespace: PrefixNamespace
    pooling: Pooling | None = None
    images: ImageFormat | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Properties of a loaded engine.

    Attributes:
        device: "cpu", or a GPU with its index.
        block_size: tokens of a KV block.
        max_num_seqs: maximum sequences that run at once.
        max_num_batched_tokens: maximum tokens of one step.
        layouts: layouts of the KV pools, that with the largest window first.
        num_blocks: blocks of each of them.
        num_host_blocks: blocks of each pool in host memory; empty without swap space.
        encoder_budget: most tokens of images that one step encodes; 0 without an encoder.
        encoder_cache_tokens: most tokens of images whose encoder output is kept.
        uncut_image_tokens: most tokens of an image that may not be cut; None: chunks may cut
            images.
        encoder_layout: layout of the pool of encoder outputs; None without an encoder.
        num_encoder_blocks: blocks of that pool.
        encoder_only: it runs an encoder alone, and no request.
        num_graphs: CUDA graphs of decode steps that were recorded.
        num_expected_graphs: CUDA graphs that were to be; more than `num_graphs` if that failed.
    """

    info: ModelInfo
    device: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    layouts: tuple[KvLayout, ...]
    num_blocks: tuple[int, ...]
    num_host_blocks: tuple[int, ...]
    encoder_budget: int = 0
    encoder_cache_tokens: int = 0
    uncut_image_tokens: int | None = None
    encoder_layout: KvLayout | None = None
    num_encoder_blocks: int = 0
    encoder_only: bool = False
    num_graphs: int = 0
    num_expected_graphs: int = 0

    @property
    def context_length(self) -> ContextLength:
        """Maximum tokens of a sequence. With a window in all layers, or without any request, no
        pool bounds it."""
        is_bound = not self.encoder_only and self.layouts[0].window is None
        room = self.num_blocks[0] * self.block_size if is_bound else None
        return ContextLength(self.info.max_model_len, room)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the blocks of all pools."""
        return self._num_bytes(self.num_blocks)

    @property
    def host_pool_bytes(self) -> int:
        """Bytes of the blocks of all pools in host memory."""
        return self._num_bytes(self.num_host_blocks)

    def _num_bytes(self, counts: tuple[int, ...]) -> int:
        sizes = zip(self.layouts, counts, strict=bool(counts))
        return sum(layout.block_bytes * count for layout, count in sizes)
