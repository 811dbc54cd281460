"""Kernel warm-up: launches every kernel that a model and its options can need.

Triton compiles a kernel at its first launch, which takes seconds. After the warm-up no step does:
sizes that vary between steps are arguments that the kernels are not specialised for.
"""

import numpy as np
import torch

from baton.engine.executor.attention.interface import Attention, RaggedBatch
from baton.engine.executor.attention.static_batch import StaticTritonBatch, StepForm
from baton.engine.executor.attention.triton_attention import TritonAttention
from baton.engine.executor.cache.kv_pool import KvCache
from baton.engine.executor.device_stream import uploader
from baton.engine.executor.runner import DecoderModel
from baton.engine.executor.sampling.sampler import Sampler
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton.sampling import SamplingParams

# Rules of sampling, each set with kernels that the sets before it do not launch.
_SAMPLED = (
    SamplingParams(temperature=1.0),
    SamplingParams(
        temperature=1.0,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        logit_bias=((0, 1.0),),
        bad_token_ids=((0, 0),),
    ),
    SamplingParams(temperature=1.0, min_tokens=1, stop_token_ids=(0,)),
)


@torch.inference_mode()
def warm_up(
    model: DecoderModel,
    attention: Attention,
    recorded: TritonAttention,
    sampler: Sampler,
    cache: KvCache,
    *,
    num_tokens: int,
    max_len: int,
    num_rows: int,
) -> None:
    """Runs prompts, a decode, the rules of sampling and block copies. Changes block 1 of each pool
    and the sampler's first slot, which no sequence has yet.

    Args:
        recorded: the attention of recorded steps.
        num_tokens: tokens of the largest step.
        max_len: tokens of the longest sequence.
        num_rows: most rows of a step that are sampled.
    """
    device = recorded.device
    zeros, lengths = _prompts(num_tokens, max_len)
    table = np.zeros((1, -(-max_len // recorded.block_size)), np.int32)
    tables = [table] * recorded.num_groups
    prompts = RaggedBatch(zeros, zeros, lengths, 0, tables)
    logits = _compute(model, attention, prompts, min(num_rows, num_tokens), device)
    if attention is not recorded:
        _compute(model, attention, RaggedBatch.of_decodes(zeros[:1], zeros[:1], tables), 1, device)
    # Its plan has room for prefixes that sequences share, unlike that of a step without any.
    padding = StaticTritonBatch(recorded, 1, 1).rows(1, StepForm.SHARING)
    token = torch.zeros(1, dtype=torch.int64, device=device)
    model.forward(token, token, padding, token)
    _sample(sampler, logits[:1])
    for pool in cache.pools:
        pool.copy_blocks([0], [1], pool)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _prompts(num_tokens: int, max_len: int) -> tuple[Int64Array, Int64Array]:
    """Returns slots and starts, which are 0, and lengths of prompts of `num_tokens` tokens. All of
    their blocks are the null block, to which nothing is written."""
    lengths = np.diff([*range(0, num_tokens, max_len), num_tokens])
    return np.zeros(len(lengths), np.int64), lengths


def _compute(
    model: DecoderModel,
    attention: Attention,
    ragged: RaggedBatch,
    num_rows: int,
    device: torch.device,
) -> torch.Tensor:
    """Computes a step, and returns the logits of its first `num_rows` tokens."""
    batch = attention.prepare(ragged)
    positions = uploader(device)(batch.positions)
    rows = torch.arange(num_rows, device=device)
    return model.forward(torch.zeros_like(positions), positions, batch, rows)


def _sample(sampler: Sampler, logits: torch.Tensor) -> None:
    """Chooses tokens for one row of logits, by every kernel of sampling."""
    zero, vocab_size = np.zeros(1, np.int64), logits.shape[1]
    everything = np.full((1, -(-vocab_size // 32)), -1, np.int32)
    for params in _SAMPLED:
        sampler.assign(0, params, 1)
        allowed = (zero, everything) if params.logit_bias else None
        sampler.choose(logits, zero, zero, zero + 1, np.zeros((1, 2), np.int32), allowed)
    sampler.assign(0, SamplingParams(), 1)
