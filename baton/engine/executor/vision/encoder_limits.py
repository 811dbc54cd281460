"""Encoder limits: tokens of images that a step encodes and that are kept, by model and config."""

from dataclasses import dataclass

from baton.engine.config import EngineConfig
from baton.errors import InvalidArgumentError
from baton.models.images.image_format import ImageFormat

# The encoder cache holds by default as many steps of images as the budget allows, and at least so
# many bytes, or so much of a GPU's memory: 256 MiB are 56 images of a LLaVA of 7B in float16; its
# four steps are 4 on a CPU and 14 on a GPU. An output that is evicted before its turn is encoded
# twice, so a prefill worker beside an encode pool needs room for the images of its queue.
_STEPS_CACHED = 4
_BYTES_CACHED = 256 * 2**20
_GPU_SHARE = 64


@dataclass(frozen=True, slots=True)
class EncoderLimits:
    """Limits of an encoder, in tokens of images; 0 without an encoder.

    Attributes:
        budget: most that one step encodes.
        cache_tokens: most whose output is kept.
        num_blocks: blocks for these outputs: enough for as many of the largest images.
        uncut_tokens: most of an image that may not be cut; None: chunks may cut images.
    """

    budget: int = 0
    cache_tokens: int = 0
    num_blocks: int = 0
    uncut_tokens: int | None = None


NO_ENCODER_LIMITS = EncoderLimits()


def encoder_limits(
    config: EngineConfig,
    images: ImageFormat,
    device_type: str,
    row_bytes: int,
    gpu_bytes: int = 0,
) -> EncoderLimits:
    """Returns the limits of a model that takes `images`.

    Args:
        row_bytes: bytes of the encoder's output for a token.
        gpu_bytes: memory of the GPU.

    Raises `InvalidArgumentError` if the config allows fewer tokens than one image has.
    """
    budget, cache_tokens = config.encoder_budget, config.encoder_cache_tokens
    if budget is None:
        budget = max(config.tokens_per_step(device_type), images.max_tokens)
    if cache_tokens is None:
        num_bytes = max(_BYTES_CACHED, gpu_bytes // _GPU_SHARE)
        cache_tokens = max(_STEPS_CACHED * budget, num_bytes // row_bytes)
    for field, value in ("encoder_budget", budget), ("encoder_cache_tokens", cache_tokens):
        if value < images.max_tokens:
            raise InvalidArgumentError(
                field, f"is {value}; an image of this model has up to {images.max_tokens} tokens"
            )
    uncut_tokens = None
    if images.is_bidirectional:
        room = tokens_with_decodes(config, images, device_type) - _tokens_of_others(config)
        uncut_tokens = max(0, min(room, config.long_prefill_threshold or room))
    num_whole, rest = divmod(cache_tokens, images.max_tokens)
    num_blocks = num_whole * -(-images.max_tokens // config.block_size)
    num_blocks += -(-rest // config.block_size)
    return EncoderLimits(budget, cache_tokens, num_blocks, uncut_tokens)


def tokens_with_decodes(config: EngineConfig, images: ImageFormat | None, device_type: str) -> int:
    """Returns `max_num_tokens_with_decodes`, or its default, with room for an image that may not be
    cut: it would wait until nothing else decodes."""
    default = config.tokens_with_decodes(device_type)
    if config.max_num_tokens_with_decodes is not None:
        return default
    if images is None or not images.is_bidirectional:
        return default
    needed = images.max_tokens + _tokens_of_others(config)
    return min(config.tokens_per_step(device_type), max(default, needed))


def _tokens_of_others(config: EngineConfig) -> int:
    """Returns the most tokens of a step in which all sequences but one decode."""
    return (config.max_num_seqs - 1) * (1 + config.max_drafts)
