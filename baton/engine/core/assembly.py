"""Engine assembly: loads a model, allocates its KV cache and creates its scheduler."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from baton.cluster.prefix import PrefixNamespace
from baton.engine.config import EngineConfig
from baton.engine.executor.attention.interface import Attention
from baton.engine.executor.backend import Backend, choose_backend
from baton.engine.executor.cache.kv_layout import plan_layout
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from baton.engine.executor.cache.kv_scales import FP8, describe, read_scales
from baton.engine.executor.memory.cache_allocation import allocate, memory_of
from baton.engine.executor.memory.cache_plan import CachePlan, EncoderPlan
from baton.engine.executor.memory.machine_memory import return_freed_memory
from baton.engine.executor.models import loader
from baton.engine.executor.models.hf import PreTrainedModel, reporting_progress
from baton.engine.executor.models.transformers_model import (
    AttentionHook,
    ProbedLayer,
    TransformersModel,
    check_state,
    probe,
)
from baton.engine.executor.models.vision_model import VisionModel, is_vision_language, split
from baton.engine.executor.pooler import Pooler
from baton.engine.executor.runner import INDICES, NO_ENCODER, DecoderModel, Encoder, Positions
from baton.engine.executor.self_check import NotFiniteError, SelfCheck
from baton.engine.executor.vision.encoder_limits import (
    NO_ENCODER_LIMITS,
    EncoderLimits,
    encoder_limits,
    tokens_with_decodes,
)
from baton.engine.executor.vision.rope_positions import RopePositions
from baton.engine.executor.vision.vision_encoder import VisionEncoder
from baton.engine.facts import ModelInfo
from baton.engine.plugins import policy_named
from baton.engine.scheduler.kv.block_pool import BlockPool
from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences.config import Preemption, SchedulerConfig
from baton.errors import InvalidArgumentError
from baton.models import DESCRIPTION, WEIGHTS, base_name, checkpoint_folder
from baton.models.digests import digesting
from baton.models.images.families import read_image_processor
from baton.models.images.patched import PatchedImages
from baton.models.pooling import read_pooling
from baton.models.tokenizer_files import end_token_ids
from baton.models.weights import weight_bytes, weight_files
from baton.version import version

LoadProgress = Callable[[str, float], None]
OnLoadedBytes = Callable[[int, int], None]
"""Called with the bytes of weights that are loaded, and those of all weights."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Loaded model that is ready to run, and its KV cache. `path` is its folder; `pooler` None: it
    generates."""

    info: ModelInfo
    model: DecoderModel
    backend: Backend
    attention: Attention
    cache: KvCache
    device: torch.device
    path: str
    pooler: Pooler | None = None
    encoder: Encoder = NO_ENCODER
    positions: Positions = INDICES
    encoder_limits: EncoderLimits = NO_ENCODER_LIMITS


def load(
    path: str,
    config: EngineConfig,
    on_progress: LoadProgress,
    on_loaded_bytes: OnLoadedBytes = lambda _loaded, _all: None,
) -> LoadedModel:
    """Loads a checkpoint: a folder with safetensors, or an id on the Hugging Face hub.

    Raises `UnsupportedModelError` or `InvalidArgumentError` with the reason.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    on_progress("reading configuration", 0.0)

    def on_fetched_bytes(num_here: int, num_all: int) -> None:
        on_progress("downloading", 0.0)
        on_loaded_bytes(num_here, num_all)

    folder = str(checkpoint_folder(path, (*DESCRIPTION, *WEIGHTS), on_fetched_bytes))
    hf_config = loader.load_config(folder)
    if config.encoder_only and not is_vision_language(hf_config):
        raise InvalidArgumentError(
            "encoder_only",
            f"is set, and {base_name(path)!r} has no encoder; choose a vision-language model",
        )
    pooling = read_pooling(Path(folder))
    hook = AttentionHook(loader.max_model_len(hf_config, config))
    # How many of them are the encoder's, transformers does not tell.
    num_bytes = 0 if config.encoder_only else weight_bytes(Path(folder))
    on_progress("loading weights", 0.1)
    on_loaded_bytes(0, num_bytes)
    with (
        digesting(weight_files(Path(folder))) as digests,
        reporting_progress(lambda part: on_loaded_bytes(round(part * num_bytes), num_bytes)),
    ):
        hf_model = loader.load_model(folder, hf_config, config, hook.name, pooling)
        weights = loader.fingerprint(hf_config, hf_model.dtype, digests.combined())
    pooler = None
    if pooling is not None:
        scores = pooling.kind == "score"
        pooler = Pooler(pooling, loader.score_head(folder, hf_model) if scores else None)
    return assemble(hf_model, hook, config, folder, base_name(path), weights, on_progress, pooler)


def assemble(
    hf_model: PreTrainedModel,
    hook: AttentionHook,
    config: EngineConfig,
    folder: str,
    name: str,
    weights: bytes,
    on_progress: LoadProgress = lambda _phase, _fraction: None,
    pooler: Pooler | None = None,
) -> LoadedModel:
    """Prepares a transformers model that is on its device, with `hook` as its attention, to run.
    `folder` contains its tokenizer; `weights` is the fingerprint of its weights. With
    `encoder_only` its language model is described on the meta device, as `loader.load_model` leaves
    it: so all that other workers compare is the same, and nothing of it runs."""
    max_len, device, dtype = hook.max_len, hf_model.device, hf_model.dtype
    hf_config, architecture = hf_model.config, type(hf_model).__name__
    # A chat's end may be known to its tokenizer alone.
    eos_token_ids = loader.eos_token_ids(hf_config, hf_model) | end_token_ids(Path(folder))
    vision, limits = None, NO_ENCODER_LIMITS
    if is_vision_language(hf_config):
        hf_model, vision = split(hf_model, read_image_processor(Path(folder)))
        gpu_bytes = memory_of(device) if device.type == "cuda" else 0
        row_bytes = vision.row_bytes
        limits = encoder_limits(config, vision.images, device.type, row_bytes, gpu_bytes)
    if config.encoder_only:
        hf_model = hf_model.to("meta")  # without its embeddings, too
    on_progress("probing layers", 0.7)
    layers = probe(hf_model, hook)
    backend = choose_backend(config, hf_model, layers, max_len, device, weights)
    model = backend.decoder(hf_model, hook)
    plan = _cache_plan(config, layers, dtype, device, folder)
    if vision is not None:
        plan = replace(plan, encoder=_encoder_plan(config, vision, limits))
    execution = model.execution + describe(plan.scales or [])
    fingerprint = loader.bound_to(weights, execution, version())
    vocab_size = hf_config.get_text_config().vocab_size
    if not config.encoder_only:
        on_progress("checking numerics", 0.8)
        check = SelfCheck(model, backend.attention, plan, vocab_size, max_len, dtype, device)
        try:
            check.run(architecture)
        except NotFiniteError:
            loader.check_finite(hf_model)
            raise
        check_state(hf_model)
    if not isinstance(model, TransformersModel):
        hf_model.to("meta")  # the decoder has weights of its own
    return_freed_memory()  # before the KV cache takes its part of what is available
    on_progress("allocating the KV cache", 0.9)
    cache = allocate(config, plan, model, backend, device, max_len)
    attention = backend.attention(cache)
    model.use(attention)
    info = ModelInfo(
        name=name,
        architecture=architecture,
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=vocab_size,
        max_model_len=max_len,
        eos_token_ids=eos_token_ids,
        content=weights,
        fingerprint=fingerprint,
        namespace=PrefixNamespace(
            fingerprint,
            loader.tokenizer_hash(folder),
            cache.layouts[0].dtype,
            config.block_size,
        ),
        pooling=None if pooler is None else pooler.pooling,
        images=None if vision is None else vision.images,
    )
    encoder, positions = NO_ENCODER, INDICES
    if vision is not None and cache.encoder_pool is not None:
        encoder = VisionEncoder(vision, cache.encoder_pool)
        if model.has_mrope and isinstance(vision.images, PatchedImages):
            positions = RopePositions(config.max_num_seqs, vision.images)
    return LoadedModel(
        info,
        model,
        backend,
        attention,
        cache,
        device,
        folder,
        pooler,
        encoder,
        positions,
        limits,
    )


def _encoder_plan(config: EngineConfig, vision: VisionModel, limits: EncoderLimits) -> EncoderPlan:
    return EncoderPlan(
        plan_layout([vision.shape], vision.dtype, config.block_size),
        limits.num_blocks,
        encode_largest=partial(vision.encode_blank, limits.budget),
    )


def _cache_plan(
    config: EngineConfig,
    layers: list[ProbedLayer],
    dtype: torch.dtype,
    device: torch.device,
    folder: str,
) -> CachePlan:
    """Returns the cache plan of a model whose weights have `dtype`."""
    kv_dtype = loader.resolve_kv_dtype(config.kv_cache_dtype, dtype, loader.capability(device))
    scales = None
    if kv_dtype == FP8:
        scales = read_scales(folder, [layer.shape.num_kv_heads for layer in layers], device)
    return CachePlan.of(layers, kv_dtype, config.block_size, scales)


def make_scheduler(config: EngineConfig, loaded: LoadedModel) -> Scheduler:
    """Creates the scheduler over the blocks of the model's pools."""
    cache, info = loaded.cache, loaded.info
    hosts: list[KvPool | None] = [*cache.host_pools] or [None] * len(cache.pools)
    groups = list(map(_cache_group, cache.pools, hosts))
    limits = loaded.encoder_limits
    scheduler_config = SchedulerConfig(
        max_num_batched_tokens=config.tokens_per_step(loaded.device.type),
        max_num_tokens_with_decodes=tokens_with_decodes(config, info.images, loaded.device.type),
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        prefix_caching=config.prefix_caching,
        max_cache_reads=config.max_cache_reads,
        long_prefill_threshold=config.long_prefill_threshold,
        handoff_chunk_tokens=config.least_handoff_chunk(loaded.device.type),
        free_block_margin=config.free_block_margin,
        full_sequence_must_fit=config.full_sequence_must_fit,
        policy=config.policy,
        preemption=Preemption(config.preemption),
        max_drafts=config.max_drafts,
        encoder_budget=limits.budget,
        encoder_cache_tokens=limits.num_blocks * config.block_size,
        cuts_encoder_inputs=info.images is None or not info.images.is_bidirectional,
    )
    return Scheduler(scheduler_config, groups, policy_named(config.policy))


def _cache_group(pool: KvPool, host: KvPool | None) -> CacheGroup:
    return CacheGroup(
        BlockPool(pool.num_blocks),
        pool.layout.window,
        BlockPool(host.num_blocks) if host is not None else None,
        len(pool.layers),
    )
