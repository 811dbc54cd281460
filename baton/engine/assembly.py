"""Puts an engine's parts together: the loaded model, its KV cache, its scheduler."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.cluster.prefix import PrefixNamespace
from baton.engine import loader
from baton.engine.attention import Attention
from baton.engine.cache_plan import CachePlan
from baton.engine.config import EngineConfig
from baton.engine.core.block_pool import BlockPool
from baton.engine.core.cache_group import CacheGroup
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.settings import Preemption, SchedulerConfig
from baton.engine.fused_model import FusedModel, can_fuse
from baton.engine.gpu_memory import largest_step, measure
from baton.engine.graphs import CudaRecorder, DecodeGraphs
from baton.engine.hf import PreTrainedModel, without_progress_bars
from baton.engine.kernel_choice import uses_triton
from baton.engine.kv_pool import KvCache, KvPool, share_memory
from baton.engine.messages import ModelInfo
from baton.engine.pool_size import GpuMemory, bytes_for_pools, check_holds_longest, num_blocks
from baton.engine.runner import DecoderModel
from baton.engine.torch_attention import TorchAttention
from baton.engine.transformers_model import AttentionHook, ProbedLayer, TransformersModel, probe
from baton.errors import InvalidArgumentError
from baton.models import DESCRIPTION, WEIGHTS, checkpoint_folder

LoadProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, and its cache. `path` is its folder."""

    info: ModelInfo
    model: DecoderModel
    on_triton: bool
    attention: Attention
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
    hook = AttentionHook(loader.max_model_len(hf_config, config))
    on_progress("loading weights", 0.1)
    with without_progress_bars():
        hf_model = loader.load_model(folder, hf_config, config, hook.name)
    return assemble(hf_model, hook, config, folder, Path(path).name, on_progress)


def assemble(
    hf_model: PreTrainedModel,
    hook: AttentionHook,
    config: EngineConfig,
    folder: str,
    name: str,
    on_progress: LoadProgress = lambda _phase, _fraction: None,
) -> LoadedModel:
    """Makes a model of transformers that is on its device, with `hook` as its attention, ready to
    run. `folder` is where its tokenizer is."""
    max_len = hook.max_len
    on_progress("probing layers", 0.7)
    layers = probe(hf_model, hook)
    on_triton = uses_triton(config, hf_model.device, layers)
    model = _decoder(config, hf_model, hook, layers, on_triton=on_triton)
    fingerprint = loader.fingerprint(hf_model.config, hf_model, model.execution)
    on_progress("allocating the KV cache", 0.9)
    plan = CachePlan.of(layers, hf_model.dtype, config.block_size)

    def attend_over(cache: KvCache) -> Attention:
        if not on_triton:
            return TorchAttention(cache)
        return _triton_attention(config, cache, layers, hf_model.dtype, max_len)

    gpu = _measured(config, model, plan, attend_over, hf_model.device, max_len)
    cache = _allocate(config, plan, hf_model.device, max_len, gpu)
    info = ModelInfo(
        name=name,
        architecture=type(hf_model).__name__,
        vocab_size=hf_model.config.get_text_config().vocab_size,
        max_model_len=max_len,
        eos_token_ids=loader.eos_token_ids(hf_model.config, hf_model),
        fingerprint=fingerprint,
        namespace=PrefixNamespace(
            fingerprint,
            loader.tokenizer_hash(folder),
            cache.layouts[0].dtype,
            config.block_size,
        ),
    )
    attention = attend_over(cache)
    model.use(attention)
    on_progress("ready", 1.0)
    return LoadedModel(info, model, on_triton, attention, cache, hf_model.device, folder)


def _decoder(
    config: EngineConfig,
    hf_model: PreTrainedModel,
    hook: AttentionHook,
    layers: list[ProbedLayer],
    *,
    on_triton: bool,
) -> DecoderModel:
    """The model in its fastest form."""
    attentions = [layer.attention for layer in layers]
    if not can_fuse(hf_model):
        if config.deterministic:
            raise InvalidArgumentError(
                "deterministic",
                f"is True; of {type(hf_model).__name__} there is no form whose products do not "
                "depend on the batch, only of Llama, Mistral, Qwen 2 and Qwen 3",
            )
        return TransformersModel(hf_model, hook)
    if not on_triton:
        return FusedModel(hf_model, attentions, hook.max_len)
    from baton.engine.triton_model import TritonModel, batch_invariant, library

    product = batch_invariant if config.deterministic else library
    return TritonModel(hf_model, attentions, hook.max_len, product)


def _triton_attention(
    config: EngineConfig,
    cache: KvCache,
    layers: list[ProbedLayer],
    dtype: torch.dtype,
    max_len: int,
) -> Attention:
    from baton.engine.triton_attention import TritonAttention

    num_heads = [layer.num_heads for layer in layers]
    return TritonAttention(cache, num_heads, dtype, max_len, deterministic=config.deterministic)


def make_graphs(config: EngineConfig, loaded: LoadedModel) -> DecodeGraphs | None:
    """Recorded decode steps, where the device and the attention have them."""
    if loaded.device.type != "cuda" or not config.cuda_graphs:
        return None
    from baton.engine.static_batch import StaticTritonBatch
    from baton.engine.triton_attention import TritonAttention

    if not isinstance(loaded.attention, TritonAttention):
        return None
    max_blocks = -(-(loaded.info.max_model_len + config.max_drafts + 1) // config.block_size)
    batch = StaticTritonBatch(loaded.attention, config.max_num_seqs, max_blocks)
    return DecodeGraphs(
        loaded.model.forward, batch, config.max_num_seqs, loaded.device, CudaRecorder()
    )


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


def _measured(
    config: EngineConfig,
    model: DecoderModel,
    plan: CachePlan,
    attend_over: Callable[[KvCache], Attention],
    device: torch.device,
    max_len: int,
) -> GpuMemory | None:
    """What the model takes of its GPU; None on a CPU, and where it does not matter."""
    if device.type != "cuda" or config.num_blocks or config.kv_cache_bytes:
        return None
    chunk = config.tokens_per_step(device.type)
    step, num_needed = largest_step(chunk, max_len, config.block_size, len(plan.layouts))
    counts = [num_needed] * len(plan.layouts)
    attention = attend_over(plan.cache(plan.pools(counts, device), []))
    model.use(attention)
    return measure(model, attention, step, min(chunk, config.max_num_seqs), device)


def _allocate(
    config: EngineConfig,
    plan: CachePlan,
    device: torch.device,
    max_len: int,
    gpu: GpuMemory | None,
) -> KvCache:
    """As many blocks as there is memory for, and on the host as many as may be swapped to."""
    chunk = config.tokens_per_step(device.type)
    counts = num_blocks(config, plan.layouts, max_len, chunk, bytes_for_pools(config, gpu))
    if device.type == "cuda":
        check_holds_longest(counts, plan.layouts, max_len, chunk)
    hosts = share_memory(plan.layouts, config.swap_bytes, counts) if config.swap_bytes else []
    shared = config.shared_pools and device.type == "cpu"
    return plan.cache(plan.shared_pools(counts) if shared else plan.pools(counts, device), hosts)
