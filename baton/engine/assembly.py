"""Puts an engine's parts together: the loaded model, its KV cache, its scheduler."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.cluster.prefix import PrefixNamespace
from baton.engine import loader
from baton.engine.config import EngineConfig
from baton.engine.core.block_pool import BlockPool
from baton.engine.core.kv_cache_manager import CacheGroup
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.settings import Preemption, SchedulerConfig
from baton.engine.fused_model import FusedModel, can_fuse
from baton.engine.hf import PreTrainedModel, without_progress_bars
from baton.engine.kv_pool import KvCache, KvLayout, KvPool, plan_groups, share_memory
from baton.engine.messages import ModelInfo
from baton.engine.runner import DecoderModel
from baton.engine.transformers_model import AttentionHook, ProbedLayer, TransformersModel, probe
from baton.errors import InvalidArgumentError
from baton.models import DESCRIPTION, WEIGHTS, checkpoint_folder

LoadProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, and its cache. `path` is its folder."""

    info: ModelInfo
    model: DecoderModel
    cache: KvCache
    device: torch.device
    path: str


def load(path: str, config: EngineConfig, on_progress: LoadProgress) -> LoadedModel:
    """Loads a checkpoint: a folder with safetensors, or the id of one on the hub.

    Raises `UnsupportedModelError` or `InvalidArgumentError` with a sentence that says why.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    on_progress("reading configuration", 0.0)
    folder = str(checkpoint_folder(path, (*DESCRIPTION, *WEIGHTS)))
    hf_config = loader.load_config(folder)
    max_len = loader.max_model_len(hf_config, config)
    hook = AttentionHook(max_len)
    on_progress("loading weights", 0.1)
    with without_progress_bars():
        hf_model = loader.load_model(folder, hf_config, config, hook.name)
    on_progress("probing layers", 0.7)
    layers = probe(hf_model, hook)
    model: DecoderModel
    if can_fuse(hf_model):
        fused = FusedModel(hf_model, [layer.attention for layer in layers], max_len)
        model, execution = fused, fused.execution
    else:
        model, execution = TransformersModel(hf_model, hook), TransformersModel.execution
    fingerprint = loader.fingerprint(hf_config, hf_model, execution)
    on_progress("allocating the KV cache", 0.9)
    cache = _allocate(config, hf_model, layers, max_len)
    info = ModelInfo(
        name=Path(path).name,
        architecture=type(hf_model).__name__,
        vocab_size=hf_config.get_text_config().vocab_size,
        max_model_len=max_len,
        eos_token_ids=loader.eos_token_ids(hf_config, hf_model),
        fingerprint=fingerprint,
        namespace=PrefixNamespace(
            fingerprint,
            loader.tokenizer_hash(folder),
            cache.layouts[0].dtype,
            config.block_size,
        ),
    )
    on_progress("ready", 1.0)
    return LoadedModel(info, model, cache, hf_model.device, folder)


def make_scheduler(config: EngineConfig, loaded: LoadedModel) -> Scheduler:
    """The thinking half, over blocks that stand for those of the model's pools."""
    cache, info = loaded.cache, loaded.info
    hosts: list[KvPool | None] = [*cache.host_pools] or [None] * len(cache.pools)
    groups = list(map(_cache_group, cache.pools, hosts))
    scheduler_config = SchedulerConfig(
        max_num_batched_tokens=config.tokens_per_step(loaded.device.type),
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        prefix_caching=config.prefix_caching,
        max_cache_reads=config.max_cache_reads,
        long_prefill_threshold=config.long_prefill_threshold,
        free_block_margin=config.free_block_margin,
        full_sequence_must_fit=config.full_sequence_must_fit,
        policy=config.policy,
        preemption=Preemption(config.preemption),
        max_drafts=config.max_drafts,
    )
    return Scheduler(scheduler_config, groups)


def _cache_group(pool: KvPool, host: KvPool | None) -> CacheGroup:
    return CacheGroup(
        BlockPool(pool.num_blocks),
        pool.layout.window,
        BlockPool(host.num_blocks) if host is not None else None,
    )


def _allocate(
    config: EngineConfig, model: PreTrainedModel, layers: list[ProbedLayer], max_len: int
) -> KvCache:
    """A pool for each set of layers that see the same tokens, and as many on the host."""
    layouts, places = plan_groups(
        [layer.shape for layer in layers],
        [layer.attention.rule.window for layer in layers],
        model.dtype,
        config.block_size,
    )
    counts = _num_blocks(config, layouts, max_len, model.device)
    pools = [KvPool(*sizes, model.device) for sizes in zip(layouts, counts, strict=True)]
    hosts = []
    if config.swap_bytes:
        counts = share_memory(layouts, config.swap_bytes, counts)
        cpu = torch.device("cpu")
        hosts = [KvPool(*sizes, cpu) for sizes in zip(layouts, counts, strict=True)]
    return KvCache(pools, hosts, places)


def peak_blocks(layout: KvLayout, num_tokens: int, max_chunk: int) -> int:
    """The most blocks of one sequence: of a window no more than the window before a step's tokens,
    those, and what lies across the ends."""
    total = -(-num_tokens // layout.block_size)
    if layout.window is None:
        return total
    return min(total, -(-(layout.window - 1 + max_chunk) // layout.block_size) + 1)


def _num_blocks(
    config: EngineConfig, layouts: list[KvLayout], max_len: int, device: torch.device
) -> list[int]:
    """Blocks of each group; of those with a window none that could never be used."""
    if config.num_blocks is not None:
        return [config.num_blocks] * len(layouts)
    chunk = config.tokens_per_step(device.type)
    # Twice what runs, so that prefixes stay findable when their sequences have gone on.
    most = [
        2 * config.max_num_seqs * peak_blocks(layout, max_len, chunk) if layout.window else 2**62
        for layout in layouts
    ]
    counts = share_memory(layouts, config.kv_cache_bytes, most)
    if min(counts) == 0:
        raise InvalidArgumentError(
            "kv_cache_bytes",
            f"is {config.kv_cache_bytes}; one block of each cache group takes "
            f"{sum(layout.block_bytes for layout in layouts)}",
        )
    return counts
