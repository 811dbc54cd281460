"""Latency model: the one part of the simulator that stands for hardware.

A step is described by what it computes and reads (`StepLoad`); a model says how many seconds that
takes. Models are evaluated for many steps at once, elementwise, so that steps that are run in one
go take exactly as long as one by one.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Load of each of some steps of an engine; they differ in the lengths of contexts alone.

    Attributes:
        num_tokens: computed.
        num_sequences: that they belong to.
        num_pairs: `[num_steps]`, of a token and one that it attends to.
        num_reads: `[num_steps]`, tokens whose KV is read, summed over the sequences.
        num_encoder_tokens: tokens of images that the encoder computes before.
    """

    num_tokens: int
    num_sequences: int
    num_pairs: FloatArray
    num_reads: FloatArray
    num_encoder_tokens: int = 0


class StepLatency(Protocol):
    """Latency of steps."""

    def seconds(self, load: StepLoad) -> FloatArray:
        """`[num_steps]`, all above 0."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """A dense decoder on one accelerator that is either computing or reading.

        seconds = max(FLOP / (peak FLOP/s * efficiency), bytes / (peak bytes/s * efficiency))
                  + encoder FLOP per token * tokens of images / (peak FLOP/s * encoder efficiency)
                  + overhead
        FLOP    = 2 * parameters * tokens + 4 * layers * heads * head_dim * pairs
        bytes   = parameters * 2 + KV bytes per token * (reads + tokens)

    A step that only encodes has neither FLOP nor bytes of the decoder.

    The defaults are a model with the shape of Llama 3.1 8B (8.03e9 parameters in bfloat16, 32
    layers, 32 heads of 128, 8 of them with KV: 2 * 32 * 8 * 128 * 2 = 131,072 bytes per token) on
    an H200 SXM: 989e12 dense bfloat16 FLOP/s and 4.8e12 bytes/s by its data sheet. The efficiencies
    are what good kernels are commonly seen to reach, lower for the narrow layers of encoders, and
    the overhead is for launches, sampling and scheduling; none of them was measured here.
    """

    num_parameters: float = 8.03e9
    num_layers: int = 32
    num_heads: int = 32
    head_dim: int = 128
    kv_bytes_per_token: float = 131_072.0
    peak_flops: float = 989e12
    peak_bandwidth: float = 4.8e12
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    overhead: float = 1e-3
    encoder_flops_per_token: float = 0.0
    encoder_efficiency: float = 0.4

    def seconds(self, load: StepLoad) -> FloatArray:
        pair_flops = 4.0 * self.num_layers * self.num_heads * self.head_dim
        flops = 2.0 * self.num_parameters * load.num_tokens + pair_flops * load.num_pairs
        kv_bytes = self.kv_bytes_per_token * (load.num_reads + load.num_tokens)
        computing = flops / (self.peak_flops * self.compute_efficiency)
        reading = (2.0 * self.num_parameters + kv_bytes) / (
            self.peak_bandwidth * self.memory_efficiency
        )
        encoding = (
            self.encoder_flops_per_token
            * load.num_encoder_tokens
            / (self.peak_flops * self.encoder_efficiency)
        )
        decoding = np.maximum(computing, reading) * (load.num_tokens > 0)
        return decoding + encoding + self.overhead


@dataclass(frozen=True, slots=True)
class Linear:
    """A sum of what each part of a step adds, in seconds; all at least 0, `per_step` above."""

    per_step: float
    per_token: float = 0.0
    per_sequence: float = 0.0
    per_pair: float = 0.0
    per_read: float = 0.0
    per_encoder_token: float = 0.0

    def seconds(self, load: StepLoad) -> FloatArray:
        fixed = (
            self.per_step
            + self.per_token * load.num_tokens
            + self.per_sequence * load.num_sequences
            + self.per_encoder_token * load.num_encoder_tokens
        )
        return fixed + self.per_pair * load.num_pairs + self.per_read * load.num_reads


@dataclass(frozen=True, slots=True)
class Network:
    """Network latency between processes, in seconds. Bandwidth is unlimited.

    Attributes:
        per_request: until an engine has it: tokenizing, placing, two admissions; and what its
            first token takes to the client.
        per_transfer: of a handoff, whatever its size.
        per_token: of a handoff, for each token of KV that is moved.
        per_encoder_token: of an encoder output, for each token of the image.
    """

    per_request: float
    per_transfer: float
    per_token: float
    per_encoder_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """One worker's hardware and what is set to suit it.

    Attributes:
        num_kv_tokens: tokens whose KV its pool holds.
        max_num_seqs, max_num_batched_tokens, encoder_budget, encoder_cache_tokens: as the settings
            of a worker of these names; the latter are 0 where its model takes no images.
    """

    steps: StepLatency
    network: Network
    num_kv_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    encoder_budget: int = 0
    encoder_cache_tokens: int = 0


def transfer_end(
    chunks: list[tuple[float, int]], claimed: float, num_held: int, network: Network
) -> float:
    """Returns the time when a handoff is complete: chunks move one after the other, each once it
    is computed and the blocks are claimed; blocks that the decode worker holds do not move.

    Args:
        chunks: when, in seconds, how many leading tokens were computed; both grow.
        claimed: seconds.
        num_held: leading tokens that are there already.
    """
    end, num_moved = claimed, num_held
    for ready, num_tokens in chunks:
        if num_tokens > num_moved:
            end = max(end, ready) + (num_tokens - num_moved) * network.per_token
            num_moved = num_tokens
    return max(end, chunks[-1][0]) + network.per_transfer
